"""The packer's state and every rank's random numbers in the checkpoints that Megatron saves.

Two entries beside Megatron's own, in its ``torch_dist`` and ``torch`` formats: ``megatron_wlb``,
text that is equal on all ranks (:meth:`Session.state`), and ``megatron_wlb_rng``, the random-number
streams of each rank. Megatron saves those of the first data-parallel rank alone, as all draw in
step; ranks whose micro-batches differ in length do not.

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
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron_wlb.errors import CheckpointError, WLBError
from megatron_wlb.reading import one_line
from megatron_wlb.runtime.compat.patching import PatchSet
from megatron_wlb.runtime.megatron_lm import fsdp
from megatron_wlb.runtime.megatron_lm.lr_schedule import require_same_schedule
from megatron_wlb.runtime.megatron_lm.session import Session
from megatron_wlb.runtime.ranks import watchdog
from megatron_wlb.runtime.ranks.transfer import of_all_ranks
from megatron_wlb.runtime.saving import checksums
from megatron_wlb.runtime.saving.core import (
    FAILURES,
    begin_save,
    opened_state,
    refuse_save,
    rng_state,
    set_rng_state,
    sharded_rng,
)
from megatron_wlb.runtime.saving.newest import damaged, folder_of, newest_step
from megatron_wlb.runtime.saving.saved_state import state_of
from megatron_wlb.runtime.saving.unpickling import check_metadata
from megatron_wlb.runtime.stepping.optimizer import make_loadable

STATE = "megatron_wlb"
RNG = "megatron_wlb_rng"

logger = logging.getLogger(__name__)


def newest_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Our settings in the checkpoint that a run is to go on from; none where there is none.

    Its files are not verified yet: if they are damaged, their load says so.
    """
    load, step = args.load, getattr(args, "ckpt_step", None)
    if args.finetune or load is None or "://" in load:
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
        return dict(state_of(folder)["settings"])
    except (CheckpointError, KeyError) as error:
        logger.warning("which packing %s has cannot be read (%s)", folder, one_line(error))
        return {}


class Hooks:
    """Wraps Megatron's save and load."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._saving: dict[str, Any] | None = None
        self._loaded: dict[str, Any] | None = None
        """The newest state dict that Megatron read, if it has an entry of ours."""
        self._scheduler: Any = None
        """Megatron's scheduler while it loads a checkpoint."""
        self._state: dict[str, Any] = {}
        """What this entry says."""
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
        writes = self._writes(settings.save)
        state = self.session.state() | {"checksums": writes and is_distributed}
        # It is text, because Megatron compares what all ranks share value by value.
        self._saving = {STATE: checksums.seal_state(state), RNG: rng}
        iteration = args[0] if args else kwargs["iteration"]
        if self._skips and "://" not in settings.save:  # those of a save that this one replaces
            Path(_folder(settings.save, iteration), checksums.NAME).unlink(missing_ok=True)
        try:
            saved = original(*args, **kwargs)
            if writes and not is_distributed:
                checksums.write(_folder(settings.save, iteration))
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
        """Saves as ``dist_checkpointing`` does, then adds checksums of the files."""
        request = original(state, folder, *args, **kwargs)
        if self._saving is not None and self._writes(folder):
            if request is None:
                checksums.write(folder)
            else:  # before Megatron's last one, which names the checkpoint its latest
                request.add_finalize_fn(functools.partial(checksums.write, folder))
        return request

    def generate_state_dict(self, original: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Adds what is ours to what is saved, and to the form into which is loaded."""
        state: dict[str, Any] = original(*args, **kwargs)
        if self._saving is not None:
            state |= self._saving
        elif self._rng_fits():
            state[RNG] = sharded_rng(RNG, None, self.session.model)
        return state

    def load_base_checkpoint(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Notes what is ours in what Megatron reads, before Megatron uses it.

        Raises :class:`CheckpointError` where it was changed, or lacks the checksums that it was
        saved with; for a checkpoint in the middle of a run that has no packer's state, or another
        schedule than this run.
        """
        found = original(*args, **kwargs)
        state = found[0]
        if state is None:
            return found
        self._loaded = state if STATE in state else None
        if self._loaded is not None:
            folder, trusted = self._compared or (self.session.args.load, True)
            try:
                self._state = opened_state(state[STATE], trusted)
            except CheckpointError as error:
                raise damaged(folder, error) from error
        is_release = found[2]
        if state.get("iteration") and not (is_release or self.session.args.finetune):
            if self._loaded is None:
                raise CheckpointError(
                    f"the checkpoint in --load {self.session.args.load} has no packing state: "
                    "which documents were trained is not known; go on without the --wlb flags, or "
                    "start a run from its weights with --finetune"
                )
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
            self._compared = folder, checksums.verify(folder, skip=self._skips)
            check_metadata(folder)

    @property
    def _skips(self) -> bool:
        return self.session.config.wlb.wlb_no_checksums

    def _writes(self, folder: str) -> bool:
        return not self._skips and "://" not in folder  # a path of Megatron's multi-storage client

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
