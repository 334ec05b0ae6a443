"""What the executor of slices asks of NCCL ends under all of its rules.

Its real loop, links and transfers run for each rank without peers (:mod:`helpers.nccl.executor`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from unittest import mock

import pytest
from helpers.nccl.executor import programs
from helpers.nccl.rules import RULES, hangs

from megatron_wlb import Parallelism, model_cost, plan_steps, sample_lengths
from megatron_wlb.cost.schedule.messages import departures
from megatron_wlb.runtime.stepping import executor

Chains = tuple[int, ...]
TWO_CHUNKS = 4, 2, (1, 1, 3, 5, 1, 1, 1, 8, 1, 2)


def some_chains(seed: int, number: int) -> Iterator[tuple[int, int, Chains]]:
    """Layouts and chains, of at most 400 passes."""
    drawn = random.Random(seed)
    while number:
        pp_size, vpp_size = drawn.choice((2, 2, 3, 4, 5, 8)), drawn.choice((1, 2, 2, 3, 4))
        num = drawn.randint(1, 10)
        chains = tuple(drawn.choice((1, 1, 1, 2, 3, 5, 8, 13)) for _ in range(num))
        if sum(chains) * pp_size * vpp_size <= 400:
            number -= 1
            yield pp_size, vpp_size, chains


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 82))]
)
def test_slices_end_with_any_chains(seed: int) -> None:
    for pp_size, vpp_size, chains in some_chains(seed, 25):
        assert hangs(programs(pp_size, vpp_size, chains)) == {}, (pp_size, vpp_size, chains)


@pytest.mark.parametrize("options", [{"forward_only": True}, {"verify": True}], ids=str)
def test_evaluation_and_verified_runs_end(options: dict[str, bool]) -> None:
    for layout in (*some_chains(99, 8), TWO_CHUNKS, (2, 3, (5, 1, 2)), (3, 1, (1, 4, 1))):
        assert hangs(programs(*layout, **options)) == {}, layout


@pytest.mark.parametrize(
    ("pp_size", "vpp_size", "num_micro_batches"),
    [
        *((4, 8, 16), (4, 2, 16), (8, 2, 32), (2, 8, 16), (4, 4, 4), (4, 1, 16)),
        pytest.param(16, 1, 32, marks=pytest.mark.long),
    ],
)
def test_documented_layouts_end(pp_size: int, vpp_size: int, num_micro_batches: int) -> None:
    """Real plans; before outputs were sent by a timeline, each step of the first three hung."""
    layout = Parallelism(
        tp_size=2, cp_size=2, pp_size=pp_size, vpp_size=vpp_size, dp_size=2, sequence_parallel=True
    )
    plans = plan_steps(
        sample_lengths("reference", 3 * num_micro_batches, seed=3),
        window=131072,
        num_micro_batches=num_micro_batches,
        packing="slim",
        cost=model_cost("7b", layout),
        layout=layout,
    )
    chains = {own for plan in plans for own in plan.chains}
    assert chains
    for own in sorted(chains)[:2]:
        assert hangs(programs(pp_size, vpp_size, own)) == {}


def test_outputs_sent_at_once_are_seen_to_hang() -> None:
    def at_once(order, rank, ahead):
        sent = {one for behind in departures(order, rank, ahead) for one in behind}
        return [[at] if at in sent else [] for at in range(len(order[rank]))]

    with mock.patch.object(executor, "departures", at_once):
        found = hangs(programs(*TWO_CHUNKS))
    assert {str(rules) for rules in RULES if rules.one_queue} <= found.keys()
    assert "behind it in the one queue" in found["lazy+one_queue"]


def test_messages_of_one_kind_in_one_stream_are_seen_to_hang() -> None:
    with mock.patch.object(executor, "colour", lambda *_: 0):
        found = hangs(programs(3, 2, (1,)))
        assert hangs(programs(3, 1, (2, 1))) == {}
    assert "eager" in found and "lazy" not in found


def test_passes_have_no_timers() -> None:
    """They wait for the device, which may have a receive posted that needs this host."""
    timers = mock.Mock()
    programs(2, 2, (1, 2), timers=timers)
    assert {call.args for call in timers.call_args_list} == {("forward-backward",)}
