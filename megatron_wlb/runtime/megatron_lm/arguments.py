"""Megatron-LM's arguments -> the settings that planning is told."""

from __future__ import annotations

import argparse
import functools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_wlb.data.ramp import Ramp
from megatron_wlb.runtime.megatron_lm import refusals
from megatron_wlb.settings.command_line import add_flags, refuse_arguments
from megatron_wlb.settings.config import Config, WlbConfig, from_flat, table
from megatron_wlb.settings.setting import SAME

logger = logging.getLogger(__name__)

ALONE = ("--wlb-device",)
"""Flags of ours that do not ask for plans."""

_AS_THEY_ARE = {
    name: name if known.script == SAME else known.script
    for name, known in table().items()
    if known.script and not name.startswith("wlb_")
}
"""Settings whose values are the script's, by the argument that has each."""


def _several(name: str) -> Callable[[argparse.Namespace], tuple[Any, ...]]:
    """A list that Megatron makes a single value of where it has one."""

    def read(args: argparse.Namespace) -> tuple[Any, ...]:
        given = getattr(args, name)
        return tuple(given) if isinstance(given, (list, tuple)) else (given,)

    return read


def _skipped_windows(args: argparse.Namespace) -> str | None:
    skipped = getattr(args, "window_attn_skip_freq", None)  # parsed: a number or a list
    return None if skipped is None else str(skipped)


_CONVERTED: dict[str, Callable[[argparse.Namespace], Any]] = {
    "bf16": lambda args: args.bf16 or args.fp16,  # which has the same sizes and rates
    "optimizer": lambda args: "sgd" if args.optimizer == "sgd" else "adam",  # for its memory
    "disable_bias_linear": lambda args: not args.add_bias_linear,
    "no_overlap_p2p_communication": lambda args: (
        args.virtual_pipeline_model_parallel_size is not None and not args.overlap_p2p_comm
    ),
    "window_size": lambda args: tuple(getattr(args, "window_size", None) or ()),
    "window_attn_skip_freq": _skipped_windows,
    "moe_layer_freq": lambda args: str(args.moe_layer_freq),  # parsed likewise
    "moe_router_load_balancing_type": _several("moe_router_load_balancing_type"),
    "moe_aux_loss_coeff": _several("moe_aux_loss_coeff"),
    "fp8_recipe": lambda args: str(getattr(args.fp8_recipe, "value", args.fp8_recipe)),
    "vocab_size": lambda args: (  # which the tokenizer says, once it is built
        getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)
    ),
    "data_path": lambda args: tuple(args.data_path or ()),
    "step_batch_size_schedule": lambda args: getattr(args, "step_batch_size_schedule", None),
}
"""Settings that have another form there."""

READ = frozenset({*_AS_THEY_ARE, *_CONVERTED})
"""Settings, besides those that begin with ``wlb_``, that :func:`config_of` takes of Megatron's."""


def asks_for_plans(words: Sequence[str]) -> bool:
    """Whether a command line turns the plugin on: it has a flag of ours, other than the device."""
    flags = {word.split("=")[0] for word in words}
    return any(flag.startswith("--wlb-") and flag not in ALONE for flag in flags)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds our flags to Megatron's parser, in a group of their own, with their defaults.

    Help texts with a bare per cent sign, which some versions have, are made printable. Mistakes are
    a line each instead of argparse's usage, which lists a thousand flags.
    """
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%%|%(?!\(\w+\))", "%%", action.help)
    add_flags(parser, "workload balance (megatron-wlb)", WlbConfig, defaults=True)
    parser.error = functools.partial(  # type: ignore[method-assign]
        refuse_arguments, parser, reasons=refusals.OF_OTHER_VERSIONS
    )
    return parser


def prepare(args: argparse.Namespace) -> None:
    """Sets what plans need of Megatron, before its own checks.

    Tokens of ragged micro-batches weigh the same only if the step is divided by them once. So the
    loss is a sum over tokens where Megatron's is a mean, and fp16 asks for two things more. One is
    that gradients are added up in fp32, as dividing them by the tokens would bring fp16 ones below
    its smallest number; the other is :func:`scale_losses`.
    """
    refusals.turn_off(args)
    args.calculate_per_token_loss = True
    args.dataloader_type = "external"
    if args.fp16:
        args.accumulate_allreduce_grads_in_fp32 = True


def scale_losses(args: argparse.Namespace) -> None:
    """Makes loss scales of fp16 smaller by the power of two next to a step's tokens.

    Then the numbers that pass through the model are as large as in a mean. To be called after
    Megatron's own checks, which fill in the sizes of the batch that are not given.
    """
    if not args.fp16:
        return
    windows, schedule = args.global_batch_size, getattr(args, "step_batch_size_schedule", None)
    if schedule is not None:
        windows = Ramp.schedule(schedule, args.seq_length).sizes[-1]
    shift = (windows * args.seq_length - 1).bit_length()
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        if getattr(args, name) is not None:
            setattr(args, name, getattr(args, name) * 2.0**-shift)
    logger.info(
        "--fp16: gradients are added up in fp32; loss scales are 2^%d smaller, because the loss is "
        "a sum over the tokens of a step", shift,
    )  # fmt: skip


def config_of(args: argparse.Namespace) -> Config:
    """The settings that planning, batches and guards read, of arguments that Megatron has checked.

    Schedule, logs and checkpoints stay Megatron's: their settings keep their defaults here, and
    nothing reads them.
    """
    values = {ours: getattr(args, theirs) for ours, theirs in _AS_THEY_ARE.items()}
    values |= {name: value for name, value in vars(args).items() if name.startswith("wlb_")}
    values |= {name: convert(args) for name, convert in _CONVERTED.items()}
    modules = getattr(args, "recompute_modules", None)  # core_attn if not given
    if values["recompute_granularity"] == "selective" and "core_attn" not in (
        modules or ["core_attn"]
    ):
        values["recompute_granularity"] = None  # what other modules save is not counted
    if values["recompute_granularity"] is None:  # Megatron then reads neither
        values["recompute_method"] = values["recompute_num_layers"] = None
    if values["split"] is None:  # each split has its own corpora
        del values["split"]
    return from_flat(values)


def of_evaluation(args: argparse.Namespace, config: Config) -> Config:
    """The settings of evaluations, whose batches may have sizes of their own."""
    training = config.training
    return replace(
        config,
        training=replace(
            training,
            global_batch_size=getattr(args, "eval_global_batch_size", None)
            or training.global_batch_size,
            micro_batch_size=getattr(args, "eval_micro_batch_size", None)
            or training.micro_batch_size,
        ),
    )
