"""What is saved beside Megatron's state: the planner's, and every rank's random numbers.

The planner's state is equal on all ranks (:meth:`Session.state`). The first one writes it into the
checkpoint's folder (:mod:`megatron_wlb.runtime.saving.state_file`), before Megatron names the
checkpoint its latest. The random-number streams are an entry of Megatron's own files. Megatron
saves those of the first data-parallel rank alone, as all draw in step; ranks whose micro-batches
differ in length do not.

Checksums of the files lie beside them, as in :mod:`megatron_wlb.runtime.saving.checksums`. Those of
``torch_dist`` are there before Megatron names the checkpoint its latest, also with
``--async-save``; in ``torch`` Megatron leaves no such moment, and they come just after.

A run may go on at another DP, TP or PP: the same documents in the same order. Random numbers of
another layout mean nothing and start anew, as in Megatron.
"""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_wlb.errors import CheckpointError, WLBError
from megatron_wlb.reading import one_line
from megatron_wlb.runtime.compat.patching import PatchSet
from megatron_wlb.runtime.megatron_lm import fsdp
from megatron_wlb.runtime.megatron_lm.lr_schedule import require_same_schedule
from megatron_wlb.runtime.megatron_lm.session import Session
from megatron_wlb.runtime.ranks import watchdog
from megatron_wlb.runtime.ranks.transfer import from_first_rank, of_all_ranks
from megatron_wlb.runtime.saving import checksums, state_file
from megatron_wlb.runtime.saving.core import (
    FAILURES,
    begin_save,
    refuse_save,
    rng_state,
    set_rng_state,
    sharded_rng,
)
from megatron_wlb.runtime.saving.newest import damaged, folder_of, newest_step
from megatron_wlb.runtime.saving.sealed import is_store
from megatron_wlb.runtime.saving.unpickling import check_metadata
from megatron_wlb.runtime.stepping.optimizer import make_loadable

RNG = "megatron_wlb_rng"
SEAL = "megatron_wlb_state"
"""In each of Megatron's own files of the format ``torch``: the checksum of the state that is saved
with it. A save that ends halfway over an older one leaves both."""

logger = logging.getLogger(__name__)


def newest_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Our settings in the checkpoint that a run is to go on from; none where there is none.

    Its files are not verified yet: if they are damaged, their load says so.
    """
    load, step = args.load, getattr(args, "ckpt_step", None)
    if args.finetune or load is None or is_store(load):
        return {}
    at = [(step or newest_step(load) or 0, load)]
    if args.non_persistent_ckpt_type == "global":
        root = args.non_persistent_global_ckpt_dir or f"{load}/non_persistent"
        at.insert(0, (newest_step(root) or 0, root))
    iteration, root = max(at, key=lambda one: one[0])  # of equal ones Megatron takes that one
    if not iteration:
        return {}
    folder = folder_of(root, iteration)
    try:
        return dict(state_file.state_of(folder)["settings"])
    except CheckpointError as error:
        logger.warning("the packing of checkpoint %s cannot be read (%s)", folder, one_line(error))
        return {}


class Hooks:
    """Wraps Megatron's save and load."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._saving: tuple[dict[str, Any], Callable[[str], str]] | None = None
        """The entries to save, and what writes the planner's state into a folder."""
        self._loaded: dict[str, Any] | None = None
        """The newest state dict that Megatron read of a run to go on with."""
        self._state: dict[str, Any] = {}
        """The planner's state of that checkpoint."""
        self._scheduler: Any = None
        """Megatron's scheduler while it loads a checkpoint."""
        self._compared: tuple[str, bool] | None = None
        """The folder that Megatron reads, and whether its files may be trusted."""

    def install(self, patches: PatchSet) -> None:
        from megatron.core import dist_checkpointing
        from megatron.training import checkpointing, training

        for module, name in (
            (training, "save_checkpoint"),
            (training, "load_checkpoint"),
            (training, "maybe_finalize_async_save"),
            (checkpointing, "generate_state_dict"),
            (checkpointing, "_load_base_checkpoint"),
            (checkpointing, "_get_checkpoint_format"),
            (checkpointing, "_load_global_dist_base_checkpoint"),
            (dist_checkpointing, "save"),
        ):
            patches.wrap(module, name, getattr(self, name.lstrip("_")))

    def save_checkpoint(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Collects what is ours on all ranks, of which Megatron may ask only some for a state.

        Before, what is still to be written of the steps in it: a run that goes on from here does
        not run them again.
        """
        self.session.catch_up()
        begin_save("a checkpoint", self.session.runner, self.session.ledger)
        settings = self.session.args
        rng: Any = rng_state()
        is_distributed = settings.ckpt_format == "torch_dist"
        if is_distributed:
            rng = sharded_rng(RNG, rng, self.session.model)
        else:
            rng = of_all_ranks(rng, self.session.model.groups.dp_cp)
        iteration = args[0] if args else kwargs["iteration"]
        writes, folder = self._writes(settings.save), _folder(settings.save, iteration)
        state = self.session.state()
        state |= {"checksums": writes and is_distributed, "sealed": not is_distributed}

        def write_state(into: str) -> str:
            return from_first_rank(functools.partial(state_file.write, into, iteration, state))

        entries = {RNG: rng}
        self._saving = entries, write_state
        if not is_store(folder):  # what is there of a save that this one replaces
            if self._skips:
                Path(folder, checksums.NAME).unlink(missing_ok=True)
            if is_distributed and dist.get_rank() == 0:
                Path(folder, state_file.NAME).unlink(missing_ok=True)
        try:
            if not is_distributed:
                entries[SEAL] = write_state(folder)
            saved = original(*args, **kwargs)
            if writes and not is_distributed:
                checksums.write(folder)
        except FAILURES as failure:
            refuse_save(f"iteration {iteration} to {settings.save}", failure)
        finally:
            self._saving = None
        return saved

    def maybe_finalize_async_save(
        self, original: Any, blocking: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Megatron's, which waits at the end of a run for what ``--async-save`` still writes."""
        if blocking:
            watchdog.at("the end of a checkpoint that is written meanwhile", is_slow=True)
        try:
            return original(blocking, *args, **kwargs)
        except FAILURES as failure:
            refuse_save(self.session.args.save, failure)

    def save(self, original: Any, state: Any, folder: str, *args: Any, **kwargs: Any) -> Any:
        """Saves as ``dist_checkpointing`` does, then adds the planner's state, and checksums."""
        request = original(state, folder, *args, **kwargs)
        if self._saving is None:
            return request
        adds = [self._saving[1], *([checksums.write] if self._writes(folder) else [])]
        for add in adds:
            if request is None:
                add(folder)
            else:  # before Megatron's last one, which names the checkpoint its latest
                request.add_finalize_fn(functools.partial(add, folder))
        return request

    def generate_state_dict(self, original: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Adds our random numbers to what is saved, and to the form into which is loaded."""
        state: dict[str, Any] = original(*args, **kwargs)
        if self._saving is not None:
            state |= self._saving[0]
        elif self._rng_fits():
            state[RNG] = sharded_rng(RNG, None, self.session.model)
        return state

    def load_base_checkpoint(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Reads the planner's state of a checkpoint in the middle of a run, and notes what Megatron
        reads before Megatron uses it.

        Raises :class:`CheckpointError` on every rank as :func:`.state_of` does, where the checksums
        that it was saved with are not there, for weights of another save than the state, and for
        another schedule than this run's.
        """
        found = original(*args, **kwargs)
        state, is_release = found[0], found[2]
        if not (state and state.get("iteration")) or is_release or self.session.args.finetune:
            return found
        if self._loaded is None:  # it is read twice
            assert self._compared is not None, "looked for before Megatron read it"
            folder, trusted = self._compared
            self._state = from_first_rank(functools.partial(state_file.state_of, folder))
            if self._state.get("checksums") and not trusted:
                raise damaged(folder, f"its {checksums.NAME} is missing")
            seal = self._state["crc32"] if self._state.get("sealed") else None
            if any(of_all_ranks(state.get(SEAL) != seal)):
                raise damaged(folder, f"its weights are of another save than {state_file.NAME}")
        self._loaded = state
        require_same_schedule(self.session.args, self._scheduler, state)
        return found

    def get_checkpoint_format(self, original: Any, folder: str, *args: Any) -> Any:
        """Verifies the files of a checkpoint that Megatron is about to read."""
        self._verify(folder)
        return original(folder, *args)

    def load_global_dist_base_checkpoint(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Verifies a checkpoint that is not persistent, whose format Megatron does not ask for."""
        root, _, _, _, iteration, release = args[:6]
        self._verify(_folder(root, iteration, release))
        return original(*args, **kwargs)

    def _verify(self, folder: str) -> None:
        if self._compared is None or self._compared[0] != folder:  # it is read twice
            trusted = checksums.verify(folder, skip=self._skips)
            self._compared = folder, trusted
            check_metadata(folder, sizes=self._skips or not trusted)

    @property
    def _skips(self) -> bool:
        return self.session.config.wlb.wlb_no_checksums

    def _writes(self, folder: str) -> bool:
        return not self._skips and not is_store(folder)

    def load_checkpoint(
        self,
        original: Any,
        ddp_model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Restores, after Megatron's load, the packer's state for when the data are opened, and the
        random numbers.
        """
        self.session.take_model(ddp_model)
        if optimizer is not None:
            make_loadable(optimizer)
        self._scheduler = opt_param_scheduler
        try:
            found = original(ddp_model, optimizer, opt_param_scheduler, *args, **kwargs)
        except CheckpointException as error:  # of all ranks
            refused = [one for one, _ in error.failures.values() if isinstance(one, WLBError)]
            if not refused or self._compared is None:
                raise
            raise damaged(self._compared[0], refused[0]) from error
        finally:
            self._scheduler = None
        iteration, settings = found[0], self.session.args
        if not iteration or settings.finetune:
            return found
        assert self._loaded is not None, "looked for as the checkpoint was read"
        self.session.restored = self._state
        if fsdp.is_sharded(ddp_model[0]) and not settings.no_load_optim:
            fsdp.resume(optimizer, self._loaded["optimizer"])
        if not settings.no_load_rng:
            self._restore_rng()
        self._loaded = None
        return found

    def _restore_rng(self) -> None:
        if not self._rng_fits():
            logger.warning(
                "the checkpoint is of PP, TP, DP × CP %s, this run has %s: documents go on in the "
                "same order, random numbers (dropout) start anew",
                " ".join(map(str, self._state["layout"])),
                " ".join(map(str, self.session.layout())),
            )
            return
        assert self._loaded is not None
        states = self._loaded[RNG]
        groups = self.session.model.groups
        set_rng_state(states[groups.dp_cp.rank() if len(states) > 1 else 0])

    def _rng_fits(self) -> bool:
        return self._loaded is not None and self._state["layout"] == self.session.layout()


def _folder(root: str, iteration: int, release: bool = False) -> str:
    from megatron.training.checkpointing import get_checkpoint_name

    return str(get_checkpoint_name(root, iteration, release, return_base_dir=True))
