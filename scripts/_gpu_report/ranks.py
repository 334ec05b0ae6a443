"""The distributed oracle on ranks that share one GPU over NCCL; over gloo where there is no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from helpers import ranks, shards, strategy_oracle, strategy_ranks
from helpers.gloo import GlooPool
from helpers.layouts import GATHER, Layout
from helpers.oracle import run_oracle
from helpers.plans import num_alike
from helpers.workload import MemoryCorpus, Workload, run_alike

from _gpu_report import sharing
from _gpu_report.drawing import Pictures, table
from _gpu_report.results import Results
from megatron_wlb.api import plan_steps
from megatron_wlb.data.lengths import sample_lengths
from megatron_wlb.errors import CompatibilityError
from megatron_wlb.plan import StepPlan
from megatron_wlb.plan.sharding import length_multiple
from megatron_wlb.planning.from_config import parallelism
from megatron_wlb.settings.config import Config

Pool: TypeAlias = GlooPool
Run: TypeAlias = Callable[[Pool, Pool, float], list[str]]
"""What differs from the oracle: of a pool of ranks, one for the oracle, and ``times``."""

NUM_STEPS, NUM_DOCUMENTS, VOCAB_SIZE, SEED = 2, 80, 59, 1
CASE_S = 90.0
FLAGS = "--transformer-impl local --wlb-attention-kernel sdpa"
"""Layers with the oracle's names; the kernel that takes such small heads in fp32 anywhere."""
TIMES, TIMES_ON_GPU = 2.0, 10.0
"""The tests' tolerances, so many times: of strategies with slices 1.2 was seen, of GPUs nothing."""
LAYOUTS = {
    "TP2 with SP": (Layout("llama", 3, tp="2sp"), ("hold", "slim")),
    "PP2": (Layout("gpt2", 4, pp=2), ("original", "hold", "slim")),
    "PP2 VPP2": (Layout("gpt2", 4, pp=2, vpp=2), ("original", "hold", "slim")),
    "CP2": (Layout("llama", 4, cp=2, sharding="per-document"), ("hold", "slim")),
    "DP2 with overlap": (Layout("gpt2", 3, dp=2, extra=GATHER), ("hold", "slim")),
    "PP4": (Layout("llama", 6, pp=4), ("original", "hold", "slim")),
    "EP2": (Layout("moe-seq", 3, dp=2, ep=2), ("hold", "slim")),
}
STRATEGIES = {
    "strategies": strategy_oracle.STRATEGIES[:4],
    "strategies with slices": strategy_oracle.STRATEGIES[8:],
}
DEFAULT = "8"
ONE_QUEUE = ("PP2, slim", "PP2 VPP2, slim", "PP4, slim", "strategies with slices")
"""What runs again with CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron wants it for TP and CP."""
TINY_CASES = ("TP2 with SP, hold", "PP2, slim")


def measure(results: Results) -> None:
    on_gpu = torch.cuda.is_available() and not results.tiny
    results.figures.pop("obstacle", None)
    if on_gpu:
        try:
            sharing.check_nccl()
        except CompatibilityError as error:
            results.put("obstacle", str(error))
            return
    else:
        results.put("how", "over gloo on the CPU, for no GPU is there")
    folder = results.out / "ranks"
    folder.mkdir(exist_ok=True)
    runs = _runs(folder)
    if results.tiny:
        runs = {name: runs[name] for name in TINY_CASES}
    cases = [(name, name, DEFAULT) for name in runs]
    if on_gpu:
        cases += [(f"{name}, 1 connection", name, "1") for name in ONE_QUEUE]
    times, open_with = TIMES_ON_GPU if on_gpu else TIMES, ""
    with GlooPool(1) as alone, contextlib.ExitStack() as opened:
        for title, name, connections in cases:
            if connections != open_with:
                opened.close()
                pool = opened.enter_context(_pool(results, connections, on_gpu=on_gpu))
                open_with = connections
            results.attempt(title, partial(_judged, runs[name], pool, alone, times), Exception)
            if "obstacle" in results.figures[title]:
                open_with = ""  # It may have damaged what ranks share.


@contextlib.contextmanager
def _pool(results: Results, connections: str, *, on_gpu: bool) -> Iterator[Pool]:
    """Ranks with so many ``CUDA_DEVICE_MAX_CONNECTIONS``; how they share the GPU is put."""
    with contextlib.ExitStack() as opened:
        made = GlooPool(6)
        if on_gpu:
            own = sharing.environment(4)
            own |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": connections}
            how = "over NCCL on one GPU, at once under MPS, 25 % of the SMs each"
            try:
                own |= opened.enter_context(sharing.mps(4))
            except CompatibilityError as error:
                how = f"over NCCL on one GPU, in turns ({error})"
            results.put("how", how)
            made = GlooPool(6, "nccl", own)
        yield opened.enter_context(made)


def _judged(run: Run, pool: Pool, alone: Pool, times: float) -> dict[str, Any]:
    start_s = time.monotonic()
    found = run(pool, alone, times)
    return {"differences": found, "seconds": round(time.monotonic() - start_s, 1)}


def _runs(folder: Path) -> dict[str, Run]:
    """All cases by name."""
    runs: dict[str, Run] = {}
    for name, (layout, packings) in LAYOUTS.items():
        case = dataclasses.replace(layout, extra=f"{layout.extra} {FLAGS}")
        for packing in packings:
            runs[f"{name}, {packing}"] = lambda pool, alone, times, c=case, p=packing: _compared(
                pool, alone, times, c, p
            )
    for name, strategies in STRATEGIES.items():
        own = folder / name.replace(" ", "-")
        own.mkdir(exist_ok=True)
        config = strategy_oracle.config_of(f"llama {FLAGS}", own, strategies)
        runs[name] = lambda pool, alone, times, c=config: _unlike(pool, alone, times, c)
    return runs


def _compared(pool: Pool, alone: Pool, times: float, case: Layout, packing: str) -> list[str]:
    workload, plans = packed(case, packing)
    (oracle,) = alone.run(1, run_oracle, case.config, workload, plans, timeout_s=CASE_S)
    given = case.config, workload, oracle.initial, contextlib.nullcontext, Planned(plans)
    found = pool.run(case.world_size, ranks.train, *given, timeout_s=CASE_S)
    return shards.differences(oracle, found, times)


def _unlike(pool: Pool, alone: Pool, times: float, config: Config) -> list[str]:
    steps = strategy_oracle.WORKLOAD.steps[: len(strategy_oracle.STRATEGIES[:4])]
    workload = dataclasses.replace(strategy_oracle.WORKLOAD, steps=steps)
    padded = strategy_ranks.padded(config, workload)
    (both,) = alone.run(1, strategy_oracle.oracles, padded, workload, timeout_s=CASE_S)
    given = config, workload, both[0].initial
    found = pool.run(4, strategy_ranks.train, *given, timeout_s=CASE_S)
    return strategy_oracle.differences(both, found, times)


@dataclasses.dataclass(frozen=True)
class Planned:
    """Plans that were made already, for :func:`helpers.ranks.train`."""

    plans: list[StepPlan]

    def __call__(self, config: Config, workload: Workload, world_size: int, step: int) -> StepPlan:
        return self.plans[step]


def packed(case: Layout, packing: str) -> tuple[Workload, list[StepPlan]]:
    """Steps as the project packs them, and their documents as what each step is to train."""
    config = case.config
    window = config.data.seq_length
    lengths = sample_lengths("reference", NUM_DOCUMENTS, seed=SEED, window=window).tolist()
    plans = [
        _alike(plan, config, case.dp)
        for plan in islice(
            plan_steps(
                lengths, window=window, num_micro_batches=config.training.global_batch_size,
                packing=packing, layout=parallelism(config, case.dp), seed=SEED,
            ),
            NUM_STEPS,
        )
    ]  # fmt: skip
    random = np.random.RandomState(SEED)
    stored = tuple(random.randint(0, VOCAB_SIZE, length) for length in lengths)
    steps = tuple(tuple(plan.documents) for plan in plans)
    return Workload(MemoryCorpus(stored), steps, VOCAB_SIZE), plans


def _alike(plan: StepPlan, config: Config, dp_size: int) -> StepPlan:
    """In slices, ranks that meet in each pass run it alike."""
    p = config.parallel
    multiple = length_multiple(
        p.tensor_model_parallel_size, p.context_parallel_size, p.sequence_parallel
    )
    if not plan.chains:
        return plan
    return run_alike(plan, num_alike(config, dp_size), multiple)


def wrong(figures: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {line}"
        for name, found in figures.items()
        if isinstance(found, dict)
        for line in found.get("differences", ())[:3]
    ]


def lines(figures: Mapping[str, Any], pictures: Pictures) -> list[str]:
    del pictures
    if "obstacle" in figures:
        return [f"Not run: {figures['obstacle']}."]
    rows = []
    for name, found in figures.items():
        if not isinstance(found, dict):
            continue
        said, differing = "as one process computes it", len(found.get("differences", ()))
        if "obstacle" in found:
            said = f"**no result**: {found['obstacle'].splitlines()[0]}"
        elif differing:
            said = f"**{differing} differences**"
        rows.append([name, said, f"{found['seconds']:.1f}" if "seconds" in found else ""])
    return [
        f"Loss, every gradient and the weights after {NUM_STEPS} steps of small models in fp32, "
        f"against one process on the CPU that runs each document alone, {figures.get('how', '')}.",
        "",
        *table(["layout, packing", "result", "seconds"], rows),
    ]
