#!/usr/bin/env python3
"""Puts a step's samples through the planners of RL trainers and through ours.

    scripts/evidence/arena.py --slime ~/slime --verl ~/verl --nemo-rl ~/RL

The planners of the checkouts run as they are, with this step's lengths and one cap of tokens:

* slime: `build_dp_schedule`, first fit, and with `--balance-by-flops`;
* verl: samples to ranks and then to micro-batches by `get_seqlen_balanced_partitions`, as its
  trainer and `rearrange_micro_batches` do. Its file runs alone, without ray and tensordict;
* NeMo-RL: `modified_first_fit_decreasing`, its bins to ranks in turns;
* ours: `plan_batch` with whole samples and with slices.

*Simulated*: the time of a step of a 7B model on H100s, with our model of costs, whose launches take
`--kernel-us`. *Counted*: micro-batches above the cap. *Measured*: CPU time of planning. ``--json``
prints the figures to stdout.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
from _common import add_seeds, parser_of, verdict
from rich.table import Table

from megatron_wlb.cli import output
from megatron_wlb.cli.flags import flag
from megatron_wlb.cost import Execution, Parallelism, load_hardware
from megatron_wlb.cost.model_file import load_model, padded_vocabulary
from megatron_wlb.data.lengths import sample_lengths
from megatron_wlb.errors import ConfigError, run_program
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.run import Run
from megatron_wlb.planning.samples import (
    plan_of,
    plan_samples,
    replica_of,
    sample,
    slice_samples,
    whole,
)
from megatron_wlb.simulator.step import Simulator

Schedule: TypeAlias = list[list[list[int]]]
"""``[dp_size][micro-batches][numbers of samples]``."""
Planner: TypeAlias = Callable[[list[int]], "Schedule | StepPlan"]

LAYOUTS = {
    "PP 1, DP 8": Parallelism(tp_size=8, dp_size=8, sequence_parallel=True),
    "PP 4, DP 4": Parallelism(tp_size=4, pp_size=4, dp_size=4, sequence_parallel=True),
    "PP 4, DP 2, CP 2": Parallelism(4, 2, 4, dp_size=2, sequence_parallel=True),
}
LENGTHS = ("reference", "slimpack", "stdlib")
WINDOW = 65536
"""The longest sample; longer ones are left out."""
MOST = 64
"""A plan is simulated though a micro-batch is above the cap, up to so many times."""


@dataclass
class Row:
    """What a planner came to in one layout, over all lengths and seeds."""

    layout: str
    planner: str
    ratio: float
    """Simulated time of a step over that of ours with whole samples, geometric mean."""
    lowest: float
    highest: float
    over_cap: int
    """Micro-batches above the cap."""
    most_of_cap: float
    plan_ms: float
    """Median."""


def ours(run: Run, cap: int) -> dict[str, Planner]:
    def with_slices(lengths: list[int]) -> StepPlan:
        return slice_samples(lengths, cap, run.cost, run.costs, run.parallelism)

    def of_whole(lengths: list[int]) -> StepPlan:
        return plan_samples(lengths, cap, run.costs, run.parallelism)

    return {"ours, whole": of_whole, "ours, slices": with_slices}


def slime(folder: Path, layout: Parallelism, cap: int, shape: Any, **settings: bool) -> Planner:
    module = _of(folder, "slime.utils.dp_schedule")
    parallel = {
        "dp_size": layout.dp_size, "cp_size": layout.cp_size, "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }  # fmt: skip
    options = SimpleNamespace(
        use_dynamic_batch_size=True, max_tokens_per_gpu=cap // layout.cp_size, balance_data=True,
        hidden_size=shape.hidden_size, num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups, vocab_size=shape.vocab_size,
        ffn_hidden_size=shape.ffn_hidden_size, num_experts=None, num_layers=shape.num_layers,
        kv_channels=shape.kv_channels, **settings,
    )  # fmt: skip

    def plan(lengths: list[int]) -> Schedule:
        given = {"global_batch_size": len(lengths), "rollout_indices": list(range(len(lengths)))}
        own, micro_batches, *_ = module.build_dp_schedule(options, parallel, lengths, **given)
        return [
            [[samples[n] for n in one] for one in rank]
            for samples, rank in zip(own, micro_batches, strict=True)
        ]

    return plan


def verl(folder: Path, layout: Parallelism, cap: int) -> Planner:
    others: dict[str, dict[str, Any]] = {
        "verl": {}, "verl.utils": {}, "verl.protocol": {"DataProto": object},
        "verl.utils.tensordict_utils": {"index_select_tensor_dict": lambda _, chosen: chosen},
        "verl.utils.device": {"get_device_name": lambda: "cpu"},
    }  # fmt: skip
    for name, values in others.items():
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(values)
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)
    path = folder / "verl/utils/seqlen_balancing.py"
    if not path.exists():
        raise ConfigError(f"{folder} has no {path.relative_to(folder)}; give a checkout of verl")
    spec = importlib.util.spec_from_file_location("verl.utils.seqlen_balancing", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch = module.torch

    def plan(lengths: list[int]) -> Schedule:
        work = module.calculate_workload(torch.tensor(lengths)).tolist()
        ranks = module.get_seqlen_balanced_partitions(work, layout.dp_size, equal_size=True)
        least = max(-(-sum(lengths[n] for n in own) // cap) for own in ranks)
        schedule = []
        for own in ranks:
            ends = torch.tensor([0, *(lengths[n] for n in own)]).cumsum(0)
            batch = {"input_ids": SimpleNamespace(is_nested=True, offsets=lambda ends=ends: ends)}
            _, found = module.rearrange_micro_batches(batch, cap, min_num_micro_batch=least)
            schedule.append([[own[n] for n in one] for one in found])
        return schedule

    return plan


def nemo_rl(folder: Path, layout: Parallelism, cap: int) -> Planner:
    module = _of(folder, "nemo_rl.data.packing.algorithms", "nemo_rl/data/packing/algorithms.py")
    packer = module.get_packer(
        module.PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING, cap,
        min_bin_count=layout.dp_size, bin_count_multiple=layout.dp_size,
    )  # fmt: skip

    def plan(lengths: list[int]) -> Schedule:
        bins = packer.pack(lengths)
        return [bins[rank :: layout.dp_size] for rank in range(layout.dp_size)]

    return plan


def _of(folder: Path, name: str, file: str | None = None) -> ModuleType:
    """A module of a checkout; of a ``file`` alone, without the packages that it is in."""
    path = folder / (file or f"{name.replace('.', '/')}.py")
    if not path.exists():
        raise ConfigError(f"{folder} has no {path.relative_to(folder)}; give a checkout of it")
    if file is None:
        sys.path.insert(0, str(folder))
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(title: str, schedule: Schedule, lengths: Sequence[int]) -> None:
    """Raises :class:`ConfigError` where a sample is lost or runs twice."""
    if sorted(n for rank in schedule for one in rank for n in one) != list(range(len(lengths))):
        raise ConfigError(f"{title} does not run each of {len(lengths)} samples once")


def measure(
    run: Run, layout: str, planners: dict[str, Planner], args: argparse.Namespace
) -> list[Row]:
    p, cap = run.parallelism, args.cap
    replica, simulator = replica_of(run.costs, p, MOST * cap), Simulator(run.costs, p)
    steps_us: dict[str, list[float]] = {name: [] for name in planners}
    tokens: dict[str, list[int]] = {name: [] for name in planners}
    seconds: dict[str, list[float]] = {name: [] for name in planners}
    for distribution in LENGTHS:
        for seed in args.seeds:
            drawn = sample_lengths(distribution, 400, seed=seed, window=WINDOW).tolist()
            lengths = [n for n in drawn if n <= WINDOW][: args.samples]
            for name, planner in planners.items():
                start_s = time.process_time()
                plan = planner(lengths)
                seconds[name].append(time.process_time() - start_s)
                if not isinstance(plan, StepPlan):
                    check(name, plan, lengths)
                    own = [
                        [[whole(sample(n, lengths[n])) for n in one] for one in rank]
                        for rank in plan
                    ]
                    plan = plan_of(name, own, replica)
                steps_us[name].append(simulator.step(plan).step_us)
                tokens[name] += [m.length for m in plan]
    base = np.array(steps_us["ours, whole"])
    rows = []
    for name in planners:
        ratios = np.array(steps_us[name]) / base
        rows.append(
            Row(
                layout, name, float(np.exp(np.log(ratios).mean())), ratios.min(), ratios.max(),
                sum(n > cap for n in tokens[name]), max(tokens[name]) / cap,
                1e3 * float(np.median(seconds[name])),
            )
        )  # fmt: skip
    return rows


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--slime", type=Path, metavar="FOLDER", help="a checkout of slime")
    parser.add_argument("--verl", type=Path, metavar="FOLDER", help="a checkout of verl")
    parser.add_argument("--nemo-rl", type=Path, metavar="FOLDER", help="a checkout of NeMo-RL")
    flag(parser, "--samples N", "of a step", 512)
    flag(parser, "--cap TOKENS", "of a micro-batch", WINDOW)
    flag(
        parser,
        "--kernel-us US",
        "what a kernel takes besides its work (default: the machine's)",
        of=float,
    )
    add_seeds(parser)
    parser.add_argument("--json", action="store_true", help='print {"rows": […]} to stdout')
    args = parser.parse_args()
    rows = []
    for title, layout in LAYOUTS.items():
        shape, hardware = (
            padded_vocabulary(load_model("7b"), layout.tp_size),
            load_hardware("h100-sxm"),
        )
        if args.kernel_us:
            hardware = replace(hardware, kernel_us=args.kernel_us[0])
        number = layout.dp_size * layout.pp_size
        run = Run(shape, Execution(layout), hardware, args.cap, number)
        planners = ours(run, args.cap)
        if args.slime:
            planners["slime"] = slime(args.slime, layout, args.cap, shape, balance_by_flops=False)
            planners["slime, by FLOPs"] = slime(
                args.slime, layout, args.cap, shape, balance_by_flops=True
            )
        if args.verl:
            planners["verl"] = verl(args.verl, layout, args.cap)
        if args.nemo_rl:
            planners["NeMo-RL"] = nemo_rl(args.nemo_rl, layout, args.cap)
        rows += measure(run, title, planners, args)
    table = Table(
        caption=f"{args.samples} samples; time is simulated, over ours with whole samples"
    )
    for head in ("layout", "planner", "time", "range", "above the cap", "plan ms"):
        table.add_column(head, justify="left" if head in ("layout", "planner") else "right")
    for row in rows:
        above = [f"{row.over_cap} (up to {row.most_of_cap:.2f} ×)"] if row.over_cap else []
        table.add_row(
            row.layout, row.planner, f"{row.ratio:.3f}", f"{row.lowest:.2f}-{row.highest:.2f}",
            verdict(above) if above else "0", f"{row.plan_ms:.1f}",
        )  # fmt: skip
    output.console(stderr=True).print(table)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
