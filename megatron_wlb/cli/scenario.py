"""What commands that simulate have in common: model, machine, layout and batch."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.inputs import (
    Job,
    add_cost_file,
    add_division,
    add_micro_batch_size,
    asked,
    cost_of_file,
    divided,
    replicas,
)
from megatron_wlb.cli.model import add_model_flag, read_model
from megatron_wlb.cost import Recompute
from megatron_wlb.cost.model_file import padded_vocabulary
from megatron_wlb.planning.from_config import parallelism
from megatron_wlb.planning.run import MEMORY_SHARE, Run
from megatron_wlb.settings.config import from_flat

RECOMPUTE = {
    "none": Recompute(),
    "selective": Recompute("selective"),
    "full": Recompute("full", "uniform", 1),
}
"""Core attention, or every layer for itself."""

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
    about = "the host's memory for each device, where activations of slices may wait"
    flag(group, "--host-gib GIB", f"{about} (default: --model's, or 0)")
    add_cost_file(group, ", also of the hardware's attention")


def add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout and batch")
    add_division(group)
    about = "of a step over all replicas: --global-batch-size ÷ --micro-batch-size"
    flag(group, "--num-micro-batches N", f"{about} (default: --model's, or PP × DP)")
    add_micro_batch_size(group)
    flag(group, "--recompute", "activations (default: --model's, or none)", choices=RECOMPUTE)
    add_expert_imbalance(group)
    about = "reduce gradients after the last backward instead of beside it"
    flag(group, "--no-overlap-grad-reduce", about)


def add_expert_imbalance(group: argparse._ArgumentGroup) -> None:
    about = "memory of a rank whose experts get so many times the mean rank's tokens"
    flag(group, "--expert-imbalance X", f"{about} (default: --model's, or 1)")


def read_job(args: argparse.Namespace) -> Job:
    """What the flags of a command that simulates say.

    Raises :class:`ConfigError` for a file that is none, and values that cannot be.
    """
    model = read_model(args.model)
    config = divided(args, asked(args, model), as_model=True, keep_vpp=True)
    values = config.flat() | {"sequence_parallel": config.parallel.tensor_model_parallel_size > 1}
    if args.recompute:
        again = asdict(RECOMPUTE[args.recompute])
        values |= {f"recompute_{name}": value for name, value in again.items()}
    config = from_flat(values)
    layout = parallelism(config, replicas(args, model, config) or 1)
    number = args.num_micro_batches
    if number is None:
        number = model.num_micro_batches(config.training.micro_batch_size)
        number = number or layout.pp_size * layout.dp_size
    shape = padded_vocabulary(model.shape, layout.tp_size)
    return Job(args, model, config, layout, shape, (number,))


def run_of(job: Job) -> Run:
    """What the flags describe. Raises :class:`ConfigError` for what cannot be."""
    args = job.args
    cost = None if args.cost is None else cost_of_file(args, job.model.shape, job.layout)
    (number,) = job.numbers
    return job.run(number, cost).executed(overlap_grad_reduce=not args.no_overlap_grad_reduce)


def machine_title(model: str, hardware: str, num_devices: int) -> str:
    return f"{Path(model).stem} on {num_devices} × {Path(hardware).stem}"
