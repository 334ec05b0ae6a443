"""Puts plans into Megatron-LM's training loop: one explicit call, undone by another.

Nothing is edited on disk. Every name replaced stands in :mod:`megatron_wlb.runtime.compat.hooks`
with the parameters counted on; a missing or changed one is an error that names the Megatron
version.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_wlb.cost.cost_files import read_cost
from megatron_wlb.errors import CheckpointError, ConfigError, refuse_all
from megatron_wlb.extensions import load
from megatron_wlb.planning import guards as layout_guards
from megatron_wlb.planning.extension import extension_of
from megatron_wlb.planning.packing.settings import is_open
from megatron_wlb.runtime import emulation
from megatron_wlb.runtime.compat import hooks, script
from megatron_wlb.runtime.compat.patching import PatchSet
from megatron_wlb.runtime.compat.source import MegatronSource
from megatron_wlb.runtime.gpt import prediction
from megatron_wlb.runtime.megatron_lm import (
    arguments,
    fsdp,
    log,
    refusals,
    saved_plans,
    schedule,
)
from megatron_wlb.runtime.megatron_lm.session import Session
from megatron_wlb.runtime.rank_main import check_writable, end
from megatron_wlb.runtime.ranks import agreement, watchdog
from megatron_wlb.runtime.saving import unpickling
from megatron_wlb.runtime.saving.core import lock_folder
from megatron_wlb.runtime.saving.newest import latest, tracked
from megatron_wlb.runtime.saving.resume import missing_load
from megatron_wlb.runtime.saving.sealed import is_store
from megatron_wlb.runtime.stepping.losses import load_loss
from megatron_wlb.runtime.stepping.optimizer import check_checkpoints
from megatron_wlb.settings.config import Config

_patches = PatchSet()
_installed = False
_session: Session | None = None


def installed() -> bool:
    """Whether Megatron's loop runs plans in this process."""
    return _installed


def install_flags() -> None:
    """Adds our flags to Megatron's parser, and nothing else: for ``--help``."""
    _patches.wrap("megatron.training.arguments", "add_megatron_arguments", _add_arguments)


def install(*, allow_untested: bool = False) -> None:
    """Makes Megatron's training loop run plans; a second call does nothing.

    Raises :class:`CompatibilityError` where this Megatron lacks a name, or has it with other
    parameters; or is of another version than the tested ones, unless ``allow_untested``.
    """
    global _installed
    if _installed:
        return
    hooks.check(allow_untested=allow_untested)
    try:
        from megatron.training import training

        unpickling.install(_patches)
        _patches.wrap("megatron.training.arguments", "add_megatron_arguments", _add_arguments)
        _patches.wrap("megatron.training.global_vars", "_build_tokenizer", _build_tokenizer)
        _patches.wrap("megatron.training.arguments", "validate_args", _validate_args)
        _patches.wrap(training, "setup_model_and_optimizer", _set_up)
        _patches.wrap(training, "pretrain", _pretrain)
        _patches.replace("megatron.training", "pretrain", training.pretrain)  # scripts import it
    except BaseException:
        _patches.restore()
        raise
    _installed = True


def uninstall() -> None:
    """Restores every name; a second call does nothing."""
    global _installed, _session
    if _session is not None:
        _session.close()
    _patches.restore()
    prediction.uninstall()
    load("states off")()
    _session, _installed = None, False


def _add_arguments(original: Any, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    return arguments.add_arguments(original(parser))


def _validate_args(original: Any, args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
    """Megatron's own checks of arguments, between ours."""
    for check in _BEFORE:
        check(args)
    checked = megatrons_own_checks(original, args, *rest, **kwargs)
    for check in _BEHIND:
        check(args)
    return checked


def _compare_ranks(args: argparse.Namespace) -> None:
    if not getattr(args, "fake_process_group", False):
        agreement.compare_at_start(vars(args), args.distributed_timeout_minutes)


def _refuse_flags(args: argparse.Namespace) -> None:
    refusals.check(args, list(load("cpu refusals")(args)) if emulation.installed() else ())


def _find_load(args: argparse.Namespace) -> None:
    elsewhere = args.pretrained_checkpoint or args.non_persistent_global_ckpt_dir
    if not elsewhere and args.load is not None and not is_store(args.load):
        if error := missing_load(args.load, args.save):
            raise CheckpointError(error)
        if args.ckpt_step is None and tracked(args.load) != "release":
            latest(args.load)


def _settle_known(args: argparse.Namespace) -> None:
    if not is_open(arguments.config_of(args).wlb):
        _settle(args)


_BEFORE: tuple[Callable[[argparse.Namespace], None], ...] = (
    _compare_ranks,  # first: ranks that were told unlike things would refuse unlike things
    _refuse_flags,  # as they were typed: Megatron's checks change them
    _find_load,  # Megatron ends with status 0 where its tracker has no number
    arguments.prepare,  # last: Megatron's checks look at what plans need
)
"""What is done before Megatron checks its arguments, in this order."""
_BEHIND: tuple[Callable[[argparse.Namespace], None], ...] = (
    arguments.scale_losses,  # by the sizes of the batch that Megatron has filled in
    _settle_known,  # last, with arguments as they stay; what is open waits for a vocabulary
)
"""What is done behind it, in this order."""


def _build_tokenizer(original: Any, args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
    """Has Megatron build its tokenizer, then chooses the packing if that waits for it."""
    tokenizer = megatrons_own_checks(original, args, *rest, **kwargs)
    if _session is None:
        _settle(args)
    return tokenizer


def settle(args: argparse.Namespace, saved: Callable[[], Mapping[str, Any]] = dict) -> Config:
    """The settings of arguments that Megatron has checked: takes a packing, as :func:`settled`
    does, and checks all that depends on it.
    """
    config = arguments.config_of(args)
    if is_open(config.wlb):
        refused = functools.partial(refusals.of_choice, args)
        config = load("settled")(config, args.world_size, refused, saved=saved)
    refuse_all(refusals.of_packing(args, config.wlb.wlb_packing))  # that of a checkpoint, too
    args.wlb_packing, args.wlb_max_tokens = config.wlb.wlb_packing, config.wlb.wlb_max_tokens
    if config.wlb.wlb_loss is not None:
        load_loss(config.wlb.wlb_loss)
    num_ranks, alone = args.world_size, config
    if config.wlb.wlb_strategies is None and config.wlb.wlb_cost not in ("analytic", "measured"):
        read_cost(config.wlb.wlb_cost, "--wlb-cost")  # of which model is seen when it is built
    if extension := extension_of(config):
        num_ranks, alone = 1, extension.alone(config, args.world_size)
    layout_guards.check(alone, num_ranks)
    layout_guards.check_micro_batches(alone, num_ranks)
    if args.eval_iters:
        layout_guards.check_evaluation(arguments.of_evaluation(args, config), num_ranks)
    return config


def _settle(args: argparse.Namespace) -> None:
    """Settles the packing, which a checkpoint may say, and makes the session."""
    config = settle(args, functools.partial(saved_plans.newest_settings, args))
    check_checkpoints(
        args.use_distributed_optimizer,
        None if args.no_save_optim else args.save,
        None if args.no_load_optim or args.finetune else args.load,
    )
    _begin(args, config)


def megatrons_own_checks(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes one line of the errors by which Megatron refuses arguments, those of its tokenizer too:
    of files that are not there, of libraries that are not installed.

    Raises :class:`ConfigError` with what Megatron says, or the assertion itself where it says
    nothing.
    """
    try:
        return original(*args, **kwargs)
    except (AssertionError, ValueError, RuntimeError, OSError, ImportError) as error:
        said = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line
        said = str(said).rstrip(".")
        raise ConfigError(
            f"Megatron-LM refuses the arguments: {said}; correct them (WLB_TRACEBACK=1 shows where)"
        ) from error


def _begin(args: argparse.Namespace, config: Any) -> None:
    """Makes the session and the hooks that need it."""
    from megatron.training import training

    global _session
    last = args.world_size - 1  # it knows the loss, and may be on another machine than rank 0
    if config.wlb.wlb_metrics is not None:
        check_writable("--wlb-metrics", Path(config.wlb.wlb_metrics), last)
    if args.tensorboard_dir and not is_store(args.tensorboard_dir):
        check_writable("--tensorboard-dir", Path(args.tensorboard_dir), last, is_folder=True)
    watchdog.watch(config.wlb.wlb_hang_seconds, end)
    extension = extension_of(config)
    kind = Session if extension is None else extension.session()
    _session = kind(config, args, training.num_floating_point_operations)
    run = schedule.forward_backward(_session)
    _patches.replace(training, "get_forward_backward_func", lambda *_, **__: run)
    _session.install(_patches)
    fsdp.install(_patches, args)
    skip = functools.partial(schedule.skip_step, _session)
    _patches.replace(training, "dummy_train_step", skip)
    saved_plans.Hooks(_session).install(_patches)
    log.Log(_session).install(_patches)


def _set_up(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Notes the model, as a checkpoint is loaded into it or else at the end; ``--save`` is ours
    from here on.
    """
    assert _session is not None, "arguments are checked before a model is built"
    save = _session.args.save
    if save is not None and not is_store(save):
        lock_folder(save)
    built = original(*args, **_session.set_up(kwargs))
    _session.take_model(built[0])
    return built


def _pretrain(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs Megatron's ``pretrain`` with our data in place of the script's, if that is Megatron's.

    Raises :class:`ConfigError` for a script that brings a loss or data of its own.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    theirs = call.arguments["train_valid_test_dataset_provider"]
    script.check(MegatronSource.installed().version, call.arguments["forward_step_func"], theirs)

    @functools.cache
    def plans() -> Any:
        assert _session is not None
        return _session.open_data()

    def our_provider(_num_samples: Any, vp_stage: int | None = None) -> Any:
        return plans()  # once, for all chunks

    our_provider.is_distributed = True  # type: ignore[attr-defined]
    call.arguments["train_valid_test_dataset_provider"] = our_provider
    try:
        return original(*call.args, **call.kwargs)
    finally:
        if _session is not None:
            _session.close()
