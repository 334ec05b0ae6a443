"""What is said where a run that resumes is not quite the run that was saved.

What cannot go on, such as another packing or other corpora, is refused where that is loaded; the
rest may change, but not unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_wlb.cost import load_hardware
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.errors import CheckpointError
from megatron_wlb.planning.packing import simulates
from megatron_wlb.runtime.saving.sealed import is_store
from megatron_wlb.runtime.stepping.losses import loss_source
from megatron_wlb.settings.config import Config, flag_of, table

logger = logging.getLogger(__name__)

_OF_PLANS = tuple(name for name, known in table().items() if known.resume == "told")
_OTHER_FILE = {
    "machine": "--wlb-hardware {wlb_hardware} says other figures than when the checkpoint was "
    "saved: the same documents run, but CP shardings and shapes may differ from here on",
    "loss": "--wlb-loss {wlb_loss} holds another text than when the checkpoint was saved, so "
    "losses may differ from here on; give the file of then to go on as before",
}


def missing_load(load: str | None, save: str | None) -> str:
    """What is wrong with a ``--load`` folder that does not exist, or nothing.

    The first start of ``--save X --load X`` is fine; with another missing folder, such as one that
    was mistyped, a run would start anew without a word.
    """
    if load is None or is_store(load) or os.path.exists(load):
        return ""
    if save is not None and os.path.realpath(save) == os.path.realpath(load):
        return ""
    return (
        f"--load {load} does not exist; give the folder of a --save, or leave it out to start anew "
        f"(with --save {load} too, a first start makes it)"
    )


def plan_settings(config: Config, *others: str) -> dict[str, Any]:
    """Our settings by which plans are made, and ``others``, JSON-able."""
    settings = json.loads(json.dumps(config.flat()))
    return {name: settings[name] for name in (*_OF_PLANS, *others)}


def tell_changes(
    config: Config, saved: Mapping[str, Any], noted: Mapping[str, Any], *others: str
) -> None:
    """Warns of what may differ from the checkpoint, but not unnoticed.

    ``saved`` are the checkpoint's settings, ``noted`` its :func:`file_digests`, of which old
    checkpoints lack some. Settings by which plans are made are compared, and ``others``.
    """
    # What was not yet a setting when it was saved had its default.
    before = plan_settings(Config(), *others) | dict(saved)
    if changed := differences(before, plan_settings(config, *others)):
        logger.warning(
            "other settings than the checkpoint's, so steps differ from here on: %s", changed
        )
    for name, now in file_digests(config).items():
        if None not in (noted.get(name), now) and noted[name] != now:
            logger.warning("%s", _OTHER_FILE[name].format_map(config.flat()))


def require_same_tokens(corpora: Corpora, saved: Sequence[str] | None) -> None:
    """Compares the corpora's samples with those of the checkpoint; old checkpoints have None. Other
    lengths are refused where the planner's state is loaded.

    Raises :class:`CheckpointError` where a corpus holds other tokens.
    """
    for corpus, before, now in zip(corpora.corpora, saved or (), corpora.samples, strict=False):
        if before != now:
            raise CheckpointError(
                f"{corpus.prefix}.bin holds other tokens than when the checkpoint was saved (crc32 "
                f"of samples {now}, expected {before}); give the corpus that it was saved with"
            )


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """``--lr 0.001 there, 0.5 here; …``: the settings of ``now`` that are others in ``saved``.

    Empty where none is. A setting that ``saved`` lacks is None there.
    """
    return "; ".join(
        f"{name if name == 'processes' else flag_of(name)} {saved.get(name)} there, {value} here"
        for name, value in now.items()
        if saved.get(name) != value
    )


def file_digests(config: Config) -> dict[str, str | None]:
    """Digests what files hold that steps depend on and that may be edited under their name: 16 hex
    digits, or None where none does. A checkpoint holds them: of the ``machine`` the figures of
    ``--wlb-hardware``, of the ``loss`` the text of ``--wlb-loss``. The cost is restored itself.
    """
    wlb = config.wlb
    plans = config.parallel.context_parallel_size > 1 or simulates(wlb) or wlb.wlb_strategies
    held = {
        "machine": repr(load_hardware(wlb.wlb_hardware)).encode() if plans else None,
        "loss": None if wlb.wlb_loss is None else loss_source(wlb.wlb_loss),
    }
    return {
        name: None if content is None else hashlib.sha256(content).hexdigest()[:16]
        for name, content in held.items()
    }
