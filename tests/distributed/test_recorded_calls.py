"""What whole runs ask of torch.distributed, recorded on gloo, ends under all of NCCL's rules.

``--nccl-rules`` does the same with every case of the distributed tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import (
    FULL,
    GATHER,
    HEAD_GROUPS,
    KEEP,
    NO_P2P_OVERLAP,
    OVERLAP,
    SELECTIVE,
    SHARDED,
    VERIFY_SHAPES,
    WORKLOAD,
    Layout,
    further,
)
from helpers.nccl.record import recorded, recorded_programs
from helpers.nccl.rules import RULES, Call, Rules, Wait, communicators, hangs
from helpers.plans import divided_for, half_recomputed, merged_for, scatter_for, sliced_for
from helpers.ranks import build_trainer, logged
from test_strategies import config_of

from megatron_wlb.cost.memory import num_communicators
from megatron_wlb.cost.slices import HOST
from megatron_wlb.plan import StepPlan
from megatron_wlb.planning.from_config import parallelism
from megatron_wlb.settings.config import Config


def hosted_for(*args: Any) -> StepPlan:
    return half_recomputed(sliced_for(*args), HOST)


def run_steps(config: Config, plan_for: Callable[..., StepPlan]) -> None:
    """Trains two steps and evaluates each."""
    import torch

    trainer = build_trainer(config, WORKLOAD)
    runner, chunks, optimizer = trainer.runner, trainer.model.chunks, trainer.optimizer
    for number in range(2):
        plan = plan_for(config, WORKLOAD, torch.distributed.get_world_size(), number)
        trainer.gradients(plan)
        hooked = [chunk for chunk in chunks if chunk.use_forward_hook]
        for chunk in chunks:
            chunk.eval()  # or losses of layers that predict ahead stay in Megatron's globals
        for chunk in hooked:
            chunk.disable_forward_pre_hook(param_sync=False)
        with torch.no_grad():
            runner.run(plan, forward_only=True)
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
        optimizer.step()
        logged(1.0)  # takes losses of experts out of Megatron's globals
    runner.compare_reads()


def run_strategies(
    config: Config, room_bytes: float | None = None, *, pushes_early: bool = False
) -> None:
    from helpers.strategy_ranks import open_runner, plan_for, run_step

    limit = None if room_bytes is None else lambda *_: room_bytes
    run, runner = open_runner(config, WORKLOAD, limit)
    replicas = (links.replica for links in runner._links.values())
    for replica in filter(None, replicas if pushes_early else ()):
        replica._last_buckets = replica._buckets
    for number in range(2):
        plan = plan_for(run, WORKLOAD, number)
        run_step(runner, plan)
        run_step(runner, plan, forward_only=True)
    runner.compare_reads()


SLICED = [
    Layout("llama", 1, pp=2, dp=2, extra=GATHER),
    Layout("llama", 1, pp=4),
    Layout("gpt2", 2, pp=2, vpp=2, dp=2, extra=GATHER),
    Layout("mixed", 4, pp=4, vpp=2, extra=f"{FULL} {VERIFY_SHAPES}"),
    Layout("gpt2", 3, pp=3, vpp=2),
    further(Layout("moe-aux", 4, pp=2, vpp=2, dp=2, ep=2)),
    further(Layout("llama", 1, pp=2, extra=VERIFY_SHAPES)),
    Layout("deepseek", 4, pp=2, vpp=2, dp=2, ep=2),
    further(Layout("mixed", 1, cp=2, tp="2sp", sharding="adaptive", extra=SELECTIVE)),
    further(Layout("llama", 2, pp=2, vpp=3, tp="2sp", extra=OVERLAP)),
    further(Layout("gpt2", 2, pp=2, vpp=3, dp=2, extra=OVERLAP)),
]
MERGED = f"--wlb-packing slim {OVERLAP} {HEAD_GROUPS} {KEEP}"
WHOLE = [
    Layout("llama", 4, pp=2, vpp=2, dp=2, extra=GATHER),
    Layout("llama", 8, pp=4, vpp=2),
    Layout("llama", 3, tp="2sp", cp=2, sharding="hybrid"),
    further(Layout("gpt2", 5, pp=2, dp=2, extra=GATHER)),
    further(Layout("gpt2", 4, pp=2, vpp=2, extra=NO_P2P_OVERLAP)),
    further(Layout("deepseek", 4, pp=2, ep=2, dp=2)),
    further(Layout("gpt2", 4, pp=2, vpp=2, extra=VERIFY_SHAPES)),
]
CASES: Sequence[tuple[list[Any], Callable[..., StepPlan]]] = [
    (SLICED, sliced_for),
    (WHOLE, scatter_for),
    ([Layout("llama", 1, pp=2, dp=2, extra=f"{OVERLAP} {SHARDED}")], merged_for),
    ([Layout("gpt2", 2, pp=2, vpp=2, dp=2, extra=OVERLAP)], merged_for),
    (
        [further(Layout("gpt2", 2, pp=2, vpp=3, dp=2, extra=f"{OVERLAP} --num-layers 6"))],
        merged_for,
    ),
    (
        [
            further(
                Layout("gpt2", 1, dp=4, extra=f"--wlb-packing slim {OVERLAP} {HEAD_GROUPS} {KEEP}")
            )
        ],
        merged_for,
    ),
    ([Layout("llama", 2, pp=2, vpp=2, cp=2, extra=HEAD_GROUPS)], divided_for),
    ([Layout("gpt2", 2, pp=2, vpp=2, extra=GATHER)], hosted_for),
]


def cases() -> Any:
    for layouts, plan_for in CASES:
        for case in layouts:
            (layout,), marks = getattr(case, "values", (case,)), getattr(case, "marks", ())
            name = f"{plan_for.__name__}-{layout}"
            yield pytest.param(layout, plan_for, marks=marks, id=name)


@pytest.mark.parametrize(("layout", "plan_for"), [*cases()])
def test_layouts_end(gloo: GlooPool, layout: Layout, plan_for: Callable[..., StepPlan]) -> None:
    given = layout.world_size, recorded, run_steps, layout.config, plan_for
    programs = recorded_programs(gloo.run(*given))
    assert hangs(programs) == {}
    for own in programs.values():  # no wait is lost
        waited = {step.call for step in own if isinstance(step, Wait)}
        calls = ((at, step) for at, step in enumerate(own) if isinstance(step, Call))
        received = {at for at, call in calls if "recv" in {part.kind for part in call.parts}}
        assert received <= waited
    # Without tied weights and routers, which have groups of their own.
    if layout.model == "llama" and VERIFY_SHAPES not in layout.extra:
        counted = {len(communicators(own, rank, Rules())) for rank, own in programs.items()}
        p = parallelism(layout.config, layout.dp)
        merges_none = plan_for is sliced_for and layout.dp > 1
        assert max(counted) == num_communicators(p, plan_for is not scatter_for) - merges_none


STRATEGIES = [
    ("pp2vpp3:64+tp2:128", "tp2cp2:128"),
    ("pp2sliced:64+tp2:128", "tp2pp2sliced:64"),
    ("pp2vpp3sliced:64+pp2sliced:64", "cp2pp2sliced:64"),
    ("tp2:128+pp2:128", "tp1:64+pp3:64"),
]


@pytest.mark.parametrize("names", STRATEGIES, ids="/".join)
@pytest.mark.parametrize("room_bytes", [None, pytest.param(0.0, marks=pytest.mark.long)])
def test_strategies_end(
    gloo: GlooPool, tmp_path: Path, names: tuple[str, ...], room_bytes: float | None
) -> None:
    config = config_of("gpt2", tmp_path, names)
    programs = recorded_programs(gloo.run(4, recorded, run_strategies, config, room_bytes))
    assert hangs(programs) == {}


def test_gradients_pushed_ahead_of_messages_are_seen_to_hang(
    gloo: GlooPool, tmp_path: Path
) -> None:
    config = config_of("gpt2", tmp_path, STRATEGIES[1])
    early = functools.partial(run_strategies, pushes_early=True)
    found = hangs(recorded_programs(gloo.run(4, recorded, early, config)))
    assert {str(rules) for rules in RULES if rules.one_queue} <= found.keys()
