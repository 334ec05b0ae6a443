"""What a command line of ``pretrain_gpt.py`` asks for, without a checkout that could parse it.

Megatron's own defaults and demands, as of core_v0.16.1, where they differ from this project's, and
the refusals of :mod:`~megatron_wlb.runtime.megatron_lm.refusals` on what was typed.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning import guards as common_guards
from megatron_wlb.planning.from_words import settings_of_script
from megatron_wlb.runtime.megatron_lm import arguments, refusals
from megatron_wlb.settings.config import Config, flag_of, script_defaults

DEFAULTS = script_defaults()
_OF_GUARDS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "overlap_p2p_comm": True,
    "ckpt_format": "torch_dist",
}
"""Megatron's defaults that refusals look at."""
_REQUIRED = (
    "num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "seq_length",
    "micro_batch_size",
)  # fmt: skip


class Words(argparse.Namespace):
    """Flags of a command line as Megatron's parser would name them; what is not given is None."""

    def __init__(self, words: Sequence[str], **others: Any) -> None:
        names = {refusal.flag: refusal.name for refusal in refusals.REFUSALS}
        values: dict[str, Any] = DEFAULTS | _OF_GUARDS | others
        name = ""
        for word in words:
            if word.startswith("--"):
                flag, equals, value = word.partition("=")
                name = names.get(flag, flag[2:].replace("-", "_"))
                off = flag in names and flag.startswith("--no-")  # it clears x of --no-x
                values[name] = _value(value) if equals else not off
            elif name:
                given = values[name]
                more = [*given, _value(word)] if isinstance(given, list) else [given, _value(word)]
                values[name] = more[1] if isinstance(given, bool) else more
        super().__init__(**values)

    def __getattr__(self, name: str) -> Any:
        return None  # only asked for what is not there


def check(words: Sequence[str], num_devices: int, environment: Mapping[str, str]) -> None:
    """Refuses what the run would, as far as flags and environment variables tell.

    Raises :class:`ConfigError` for the first flag that cannot run or is missing.
    """
    refusals.check_words(words)
    given = Words(words, world_size=num_devices)
    refusals.check(given)
    for name in _REQUIRED:
        if getattr(given, name) is None:
            raise ConfigError(
                f"{flag_of(name)} is missing, and Megatron-LM has no default; give it"
            )
    if given.deterministic_mode:
        common_guards.check_algorithms(environment)


def settings(words: Sequence[str], num_devices: int) -> Config:
    """Reads settings by :func:`~megatron_wlb.planning.from_words.settings_of_script`.

    Schedule, logs and checkpoints keep ours, as nothing reads them. Raises :class:`ConfigError` for
    flags of which they cannot be read.
    """
    config, given = settings_of_script(_read(words)), Words(words)
    common_guards.check_ranges(config)
    training = config.training
    if given.global_batch_size is None:
        dp_size = max(1, common_guards.data_parallel_size(config, num_devices))
        training = dataclasses.replace(
            training, global_batch_size=training.micro_batch_size * dp_size
        )
    return dataclasses.replace(config, training=training)


def _read(words: Sequence[str]) -> list[str]:
    """Reads all settings but Megatron's own, which may have values that ours may not."""
    names = {name for name in Config().flat() if not name.startswith("wlb_")}
    unread = {flag_of(name) for name in names - arguments.READ - {"vocab_size"}}
    kept, keep = [], True
    for word in words:
        if word.startswith("--"):
            keep = word.partition("=")[0] not in unread
        if keep:
            kept.append(word)
    return kept


def _value(word: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word
