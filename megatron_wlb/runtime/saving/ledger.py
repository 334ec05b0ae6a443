"""Opens the ledger of a training run; see :mod:`megatron_wlb.planning.ledger`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from megatron_wlb.planning.ledger.writer import StepLedger
from megatron_wlb.runtime.saving.newest import newest_step
from megatron_wlb.runtime.saving.sealed import is_store
from megatron_wlb.settings.config import Config


def open_ledger(
    config: Config,
    folder: str | None,
    loaded: str | None,
    iteration: int,
    planner: Any,
    vocab_size: int,
) -> StepLedger:
    """Begins to write in a folder of ``--save``, after ``iteration`` of the one of ``--load``;
    ``planner`` plans what comes.

    Only the first rank writes, and none without a folder, in one of Megatron's multi-storage
    client, or with ``--wlb-no-ledger``.
    """
    is_file = folder is not None and not is_store(folder)
    writes = is_file and not config.wlb.wlb_no_ledger and torch.distributed.get_rank() == 0
    ledger = StepLedger(folder if writes else None)
    is_elsewhere = None not in (folder, loaded) and _differ(str(folder), str(loaded))
    defaults = Config().flat()
    cost = getattr(planner, "cost", None)  # strategies have one each
    ledger.start(
        iteration,
        planner,
        elsewhere=iteration > 0 and is_elsewhere,
        stood=newest_step(Path(str(folder))) if writes else None,
        processes=torch.distributed.get_world_size(),
        dp_size=getattr(planner, "dp_size", 1),
        vocab_size=vocab_size,
        settings={name: v for name, v in config.flat().items() if v != defaults[name]},
        cost=None if cost is None else cost.as_dict(),
    )
    return ledger


def _differ(folder: str, other: str) -> bool:
    return os.path.realpath(folder) != os.path.realpath(other)
