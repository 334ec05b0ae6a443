"""What commands that simulate have in common: model, machine, layout and batch."""

from __future__ import annotations

import argparse
import math
from dataclasses import fields
from pathlib import Path

from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.inputs import (
    add_cost_file,
    add_micro_batch_size,
    cost_of_file,
    fill_micro_batch_size,
    fill_window,
)
from megatron_wlb.cli.model import Model, add_model_flag, read_model
from megatron_wlb.cost import Execution, Parallelism, Recompute, load_hardware
from megatron_wlb.cost.model_file import padded_vocabulary
from megatron_wlb.planning.from_config import recompute
from megatron_wlb.planning.run import MEMORY_SHARE, Run
from megatron_wlb.reading import MOST_DEVICES, whole_number
from megatron_wlb.settings.config import flag_of
from megatron_wlb.settings.megatron import ParallelConfig
from megatron_wlb.settings.split import PipelineSplit

RECOMPUTE = {
    "none": Recompute(),
    "selective": Recompute("selective"),
    "full": Recompute("full", "uniform", 1),
}
"""Core attention, or every layer for itself."""

SPLIT = {
    "decoder_first_pipeline_num_layers": " N",
    "decoder_last_pipeline_num_layers": " N",
    "account_for_embedding_in_pipeline_split": "",
    "account_for_loss_in_pipeline_split": "",
    "pipeline_model_parallel_layout": " LAYOUT",
}
"""Flags of uneven stages, with what their values are called."""

MACHINES = """\
machine:
  --hardware NAME|FILE h100-sxm, h200, a100, a800, cpu, or a YAML file as in configs/hardware
  --cost FILE          measured instead of modelled: what megatron_wlb.measure_cost wrote
"""


def add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and machine")
    add_model_flag(group, required=True)
    flag(group, "--hardware NAME|FILE", "the machine (default: --model's, or h100-sxm)")
    share = f"{MEMORY_SHARE:.0%}% of what context and communicators leave"
    about = f"what tensors may take on a device (default: --model's, or {share})"
    flag(group, "--memory-gib GIB", about)
    add_cost_file(group, ", also of the hardware's attention")


def add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout and batch")
    for size, text in (
        ("tp", "tensor-parallel ranks, with sequence parallelism"),
        ("cp", "context-parallel ranks"),
        ("pp", "pipeline stages"),
        ("vpp", "model chunks a pipeline rank (interleaved schedule)"),
        ("dp", "data-parallel replicas"),
        ("ep", "ranks over which experts are divided, of several replicas where one has too few"),
        ("etp", "ranks over which each expert is divided"),
    ):
        none = "1" if size != "etp" else "TP"
        flag(group, f"--{size}-size N", f"{text} (default: --model's, or {none})")
    about_settings = {f.name: str(f.metadata["help"]) for f in fields(ParallelConfig)}
    for name, value in SPLIT.items():
        flag(group, f"{flag_of(name)}{value}", f"{about_settings[name]} (as --model, if none)")
    about = "of a step over all replicas: --global-batch-size ÷ --micro-batch-size"
    flag(group, "--num-micro-batches N", f"{about} (default: --model's, or PP × DP)")
    add_micro_batch_size(group)
    flag(group, "--recompute", "activations (default: --model's, or none)", choices=RECOMPUTE)
    about = "memory of a rank whose experts get so many times the mean rank's tokens"
    flag(group, "--expert-imbalance X", f"{about} (default: --model's, or 1)")
    about = "reduce gradients after the last backward instead of beside it"
    flag(group, "--no-overlap-grad-reduce", about)


def fill_machine(args: argparse.Namespace) -> Model:
    """Fills window, machine and memory where they are not given; returns the model."""
    model = fill_window(args)
    args.hardware = args.hardware or model.config.wlb.wlb_hardware
    if args.memory_gib is None:
        args.memory_gib = model.config.wlb.wlb_memory_gib
    return model


def fill_layout(args: argparse.Namespace) -> None:
    """Fills window, batch and sizes that the command line leaves open, as ``--model`` has them."""
    model = fill_machine(args)
    p = model.config.parallel
    for name, size in (
        ("tp_size", p.tensor_model_parallel_size),
        ("cp_size", p.context_parallel_size),
        ("pp_size", p.pipeline_model_parallel_size),
        ("ep_size", p.expert_model_parallel_size),
        ("etp_size", p.expert_tensor_parallel_size),
        ("expert_imbalance", model.config.wlb.wlb_expert_imbalance),
    ):
        if getattr(args, name) is None:
            setattr(args, name, size)
    _fill_stages(args, model)
    if args.dp_size is None:
        names = "tp_size", "cp_size", "pp_size"
        sizes = (whole_number(flag_of(n), getattr(args, n), 1, MOST_DEVICES) for n in names)
        args.dp_size = model.dp_size(math.prod(sizes)) or 1
    size = fill_micro_batch_size(args, model)
    if args.num_micro_batches is None:
        args.num_micro_batches = model.num_micro_batches(size) or args.pp_size * args.dp_size


def _fill_stages(args: argparse.Namespace, model: Model) -> None:
    """Fills VPP and each stage's layers: those of the flags, else those of ``--model`` where its
    pipeline is the one that is simulated.
    """
    split, p = PipelineSplit.of(args), model.config.parallel
    pp_size = whole_number("--pp-size", args.pp_size, 1, MOST_DEVICES)
    same = p.pipeline_model_parallel_size == pp_size and args.vpp_size in (None, p.vpp_size)
    if not split.given and same:
        split = p.split
    if args.vpp_size is None:
        args.vpp_size = split.vpp_size(pp_size) or p.num_virtual_stages_per_pipeline_rank or 1
    vpp_size = whole_number("--vpp-size", args.vpp_size, 1, MOST_DEVICES)
    args.stage_layers = split.uneven(model.shape.num_layers, pp_size, vpp_size)


def run_of(args: argparse.Namespace) -> Run:
    """What the flags describe. Raises :class:`ConfigError` for what cannot be."""
    model, hardware = read_model(args.model), load_hardware(args.hardware)
    shape, config = model.shape, model.config
    layout = Parallelism(
        *(args.tp_size, args.cp_size, args.pp_size, args.vpp_size, args.dp_size),
        sequence_parallel=args.tp_size > 1,
        group_size=config.parallel.microbatch_group_size_per_virtual_pipeline_stage,
        stage_layers=args.stage_layers,
        ep_size=args.ep_size,
        etp_size=args.etp_size,
    )
    return Run(
        padded_vocabulary(shape, layout.tp_size),
        Execution(
            layout,
            RECOMPUTE[args.recompute] if args.recompute else recompute(config),
            overlap_grad_reduce=not args.no_overlap_grad_reduce,
            expert_imbalance=args.expert_imbalance,
        ),
        hardware,
        args.window,
        args.num_micro_batches,
        args.memory_gib,
        None if args.cost is None else cost_of_file(args, shape, layout),
        args.cost_extrapolate,
        micro_batch_size=args.micro_batch_size,
    )


def machine_title(args: argparse.Namespace, num_devices: int) -> str:
    return f"{Path(args.model).stem} on {num_devices} × {Path(args.hardware).stem}"
