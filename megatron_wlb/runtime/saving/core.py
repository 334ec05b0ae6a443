"""What both ways to save share: that of the launcher and that of :class:`.SampleTrainer`.

Before a save: what ranks have read is compared, and the ledger is on disk. In a checkpoint:
the random-number streams of every rank. A failed save is one line. Beside this, both use the
checksums, the lock, the ledger and the comparisons of this folder.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NoReturn

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from megatron_wlb.errors import CheckpointError, WLBError
from megatron_wlb.planning.ledger.writer import StepLedger
from megatron_wlb.runtime.gpt.build import Model
from megatron_wlb.runtime.ranks import watchdog
from megatron_wlb.runtime.ranks.transfer import from_first_rank
from megatron_wlb.runtime.saving import lock as save_lock

FAILURES = (OSError, RuntimeError, CheckpointException, CheckpointingException, CheckpointError)
"""What a save may raise."""


def begin_save(place: str, runner: Any, ledger: StepLedger) -> None:
    """Says at which ``place`` the run is, compares what ranks have read since the last step, and
    puts the ledger on disk: no checkpoint has weights of tokens that are not compared.
    """
    watchdog.at(place, is_slow=True)
    runner.compare_reads()
    ledger.sync()


def sharded_rng(name: str, rng: dict[str, Any] | None, model: Model) -> ShardedObject:
    """The streams of this rank alone, as Megatron's distributed format holds them.

    Those of data-parallel ranks too, unlike Megatron: theirs draw in step only while all
    micro-batches are of one length.
    """
    groups = (model.groups.pp, model.groups.tp, model.groups.dp_cp)
    return ShardedObject(
        name, [rng], tuple(g.size() for g in groups), tuple(g.rank() for g in groups)
    )


def rng_state() -> dict[str, Any]:
    """The random-number streams of this rank."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Continues the streams that :func:`rng_state` noted."""
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def lock_folder(root: str) -> None:
    """Keeps other runs out of the folder of ``--save`` until the program ends; called by every
    rank, of which the first one holds the lock.

    Raises :class:`CheckpointError` on every rank where another process has it, or nothing can be
    written.
    """

    def take() -> None:
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root):
                pass
            save_lock.take(Path(root))
        except OSError as error:
            raise CheckpointError(
                f"cannot write --save {root}: {error.strerror}; choose another folder"
            ) from None

    from_first_rank(take)


def refuse_save(folder: str | Path, failure: BaseException) -> NoReturn:
    """Raises :class:`CheckpointError` for one of :data:`FAILURES`, or itself if it says enough."""
    if isinstance(failure, CheckpointError) or watchdog.lost_peer(failure):
        raise failure
    remedy = "free some room there, or choose another folder"
    if isinstance(failure, torch.OutOfMemoryError):
        remedy = "leave more of the device free by a smaller --wlb-memory-gib"
    raise CheckpointError(f"cannot save {folder}: {reason(failure)}; {remedy}") from failure


def reason(error: BaseException) -> str:
    """Puts an error into one line: the first rank's, where Megatron collects several."""
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            return reason(failure)
        return "it failed on another rank"
    text = " ".join(str(error).split())[:300]
    known = isinstance(error, OSError | RuntimeError | WLBError)
    return text if known else f"{type(error).__name__}: {text}"
