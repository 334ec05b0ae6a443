"""Whoever plans, plans keep their promises: :mod:`helpers.promises` says which.

Runs are drawn with all that may change a plan: the packing, the layout, blends and epochs, batches
that grow, how long documents are treated. Each is planned twice, once with a planner that is read
back from its state, as after a kill.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.promises import Promises
from helpers.soak import AUTO, PACKINGS, SOLVER, Soak, corpora_of, hold_to, layouts, soaks
from helpers.strategies import documents
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_wlb as wlb
from megatron_wlb.cost import DocumentCost
from megatron_wlb.cost.memory import GIB
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import padded_vocab_size, run_of
from megatron_wlb.settings.command_line import parse
from megatron_wlb.simulator.step import Simulator
from megatron_wlb.strategies.plan.strategy_run import StrategyRun

COST = DocumentCost(1, 0.1, 2, 0.25, micro_batch_us=5)


@pytest.mark.parametrize("packing", [*PACKINGS, *AUTO, *SOLVER])
@settings(max_examples=12)
@given(data=st.data())
def test_plans_of_any_run_keep_their_promises(packing: str, data: st.DataObject) -> None:
    if packing in SOLVER:
        pytest.importorskip("ortools", reason="the extra `solver` is not installed")
    data.draw(soaks(12, packing)).run()


def test_a_document_that_is_lost_or_runs_twice_is_noticed() -> None:
    """Negative control of all tests here."""
    plans = [*wlb.plan_steps([9, 40, 7, 25, 31, 3] * 9, window=40, num_micro_batches=2,
                             packing="original", cost=COST)]  # fmt: skip
    assert len(plans) > 4
    for wrong in (plans, plans[1:], [*plans[:-1], replace(plans[3], step=plans[-1].step)]):
        promises = Promises(80)
        promises.give(document for plan in plans for document in plan.documents)
        if wrong is not plans:
            with pytest.raises(AssertionError):
                _see(promises, wrong)
        else:
            _see(promises, wrong)


def _see(promises: Promises, plans: list[wlb.StepPlan]) -> None:
    for plan in plans:
        promises.see(plan)
    promises.end()


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 512), min_size=1, max_size=40), layouts(),
    st.sampled_from([0, 8, 64, 512]),
    st.sampled_from(["equal", "unequal", "groups", "slices"]),
)  # fmt: skip
def test_plans_of_samples_keep_their_promises(
    lengths: list[int], drawn: tuple[wlb.Parallelism, int, int], more: int, how: str
) -> None:
    layout, multiple, _ = drawn
    max_tokens = 64 if how == "slices" else -(-max(lengths) // multiple) * multiple + more
    groups = [n // 3 for n in range(len(lengths))]
    if layout.expert_replicas > 1 and how == "unequal":
        how = "equal"  # replicas exchange tokens
    plan = wlb.plan_batch(
        lengths, max_tokens=max_tokens, layout=layout, slices=how == "slices",
        equal_numbers=how != "unequal", groups=groups if how == "groups" else None,
    )  # fmt: skip
    promises = Promises(
        max_tokens, multiple, layout.dp_size, layout.expert_replicas if how == "slices" else 1
    )
    promises.give(documents(lengths))
    promises.see(plan)
    promises.end()
    if how in ("equal", "groups"):
        assert len({len(rank) for rank in plan.micro_batches}) == 1
    if how == "groups":
        owners = [{groups[n] for m in rank for n in m.samples} for rank in plan.micro_batches]
        assert sum(map(len, owners)) == len(set(groups))


@pytest.fixture(scope="module")
def planner_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[list[int]]], Any]:
    """Plans corpora for unlike replicas, some of which cut documents."""
    path = tmp_path_factory.mktemp("strategies") / "strategies.yaml"
    texts = ("tp2:512+pp2:256", "4*tp1:256", "pp2sliced:512+tp1cp2:256", "pp2vpp3:512+2*tp1:256")
    path.write_text("\n".join(["num_devices: 4", "devices_per_node: 4", "strategies:",
                               *(f"- {text}" for text in texts)]))  # fmt: skip
    flags = (
        "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 512 "
        f"--global-batch-size 4 --wlb-hardware cpu --wlb-strategies {path}"
    )
    run = StrategyRun.of(parse(flags.split()), corpora_of([[1]]), 4)
    return lambda lengths: run.planner(corpora_of(lengths))


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.integers(1, 512) | st.integers(1, 40), min_size=1, max_size=30),
        min_size=1, max_size=2,
    ),
    st.integers(1, 3),
)  # fmt: skip
def test_plans_with_strategies_keep_their_promises(
    planner_of: Callable[[list[list[int]]], Any], lengths: list[list[int]], steps_a_load: int
) -> None:
    hold_to(Promises(512), lambda: planner_of(lengths), 6, steps_a_load)


@settings(max_examples=10)
@given(soak=soaks(6, "slim"), share=st.floats(0.3, 0.9), host=st.booleans())
def test_steps_of_slices_fit_the_memory_they_are_planned_for(
    soak: Soak, share: float, host: bool
) -> None:
    """Of a pipeline that needs more, so that some is recomputed, or waits in the host's memory."""
    lengths = tuple(tuple(64 * n for n in own) for own in soak.lengths)
    large = replace(soak, lengths=lengths, window=64 * soak.window, max_tokens=64 * soak.max_tokens)
    run = run_of(large.config, padded_vocab_size(large.config, 1), large.dp_size)
    free = replace(large, flags=f"{large.flags} --wlb-memory-gib 1000").planner()
    weights = max(run.memory.alive_bytes(rank, 0.0) for rank in range(run.parallelism.pp_size))
    limit_bytes = weights + share * (free.slicing.peak_bytes - weights)  # type: ignore[union-attr]
    flags = f"{large.flags} --wlb-memory-gib {limit_bytes / GIB} --wlb-host-gib {float(host)}"
    tight = replace(large, flags=flags)
    try:
        promises = tight.promises()
    except ConfigError as error:
        assert "GiB that tensors may take" in str(error)
        return
    promises.simulator = Simulator(run.costs, run.parallelism, memory=run.memory)
    promises.limit_bytes = limit_bytes
    hold_to(promises, tight.planner, 4, 3)


DIGESTS = """
from unit.planning.test_plans import digests
print(*digests())
"""


def digests() -> list[str]:
    """Of some steps with each packing."""
    lengths = np.random.RandomState(2).randint(1, 900, 300).tolist()
    layout = wlb.Parallelism(pp_size=2, dp_size=2)
    found = []
    for packing in ("fixed-greedy:2", "hold:2", *(name for name in PACKINGS if "," not in name)):
        plans = wlb.plan_steps(
            lengths, window=512, num_micro_batches=4, packing=packing, layout=layout, cost=COST
        )
        found += [next(plans).digest for _ in range(4)]
    return found


def test_another_process_plans_the_same() -> None:
    """Whatever its order of sets and of hashed words."""
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    here = Path(__file__).parents[2]
    path = os.pathsep.join([str(here), *sys.path])
    said = subprocess.run(
        [sys.executable, "-c", DIGESTS], env=environment | {"PYTHONPATH": path}, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    assert said.stdout.split() == digests()
