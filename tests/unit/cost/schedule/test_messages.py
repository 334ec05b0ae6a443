"""When outputs of passes are sent, and what replicas may run together."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_wlb import Parallelism, model_cost, plan_steps, sample_lengths
from megatron_wlb.cost.schedule.graph import Graph
from megatron_wlb.cost.schedule.messages import (
    departures,
    meet_in_order,
    messages,
    slice_graph,
    timeline,
)
from megatron_wlb.cost.schedule.order import sliced
from megatron_wlb.planning.slicing import cut

CHAINS = (1, 1, 3, 5, 1, 1, 8, 1, 2)


@pytest.mark.parametrize(("pp_size", "vpp_size"), [(2, 1), (4, 1), (2, 2), (4, 2), (3, 3)])
def test_every_output_is_sent_once_behind_its_pass(pp_size: int, vpp_size: int) -> None:
    order, num_late = sliced(pp_size, CHAINS, vpp_size), 0
    for rank, own in enumerate(order):
        places = departures(order, rank)
        sent = [(source, behind) for behind, sources in enumerate(places) for source in sources]
        assert all(source <= behind for source, behind in sent)
        num_late += sum(source < behind for source, behind in sent)
        ends = pp_size * vpp_size - 1, 0
        assert sorted(source for source, _ in sent) == [
            at for at, a in enumerate(own) if a.chunk * pp_size + rank != ends[a.kind == "B"]
        ]
    assert bool(num_late) == (vpp_size > 1)


def test_a_late_output_costs_time_in_simulation() -> None:
    """One unit takes five times as long as the timeline has it."""
    plain, placed = Graph(sliced(4, CHAINS, 2)), slice_graph(4, CHAINS, 2)
    num = sum(CHAINS)
    times = np.ones((2, 8, num))
    times[1] = 2
    free, gaps = np.zeros(num), np.full(num, 0.1)
    assert placed.step_us(times, free) == plain.step_us(times, free)
    times[..., 4] *= 5
    slower = float(placed.step_us(times, gaps) / plain.step_us(times, gaps))
    assert 1 < slower < 1.05


def test_receives_called_later_let_outputs_leave_later() -> None:
    graph = Graph(sliced(4, CHAINS, 2))
    assert (messages(graph, ahead=0).moment >= messages(graph, ahead=1).moment).all()
    assert (messages(graph, ahead=0).moment > messages(graph, ahead=1).moment).any()
    assert float(timeline(graph).stop_us.max()) > 3 * sum(CHAINS)


def orders_agree(plan, pp_size: int, vpp_size: int) -> bool:
    """Whether each two replicas come to what they share in one order, on every rank."""
    for rank in range(pp_size):
        runs = []
        for own, chains in zip(plan.micro_batches, plan.chains, strict=True):
            actions = sliced(pp_size, chains, vpp_size)[rank]
            shared = ((a.kind, a.chunk, own[a.micro_batch]) for a in actions)
            runs.append([(kind, c, m.index) for kind, c, m in shared if m.replicas])
        for one in runs:
            for other in runs:
                common = {*one} & {*other}
                if [x for x in one if x in common] != [x for x in other if x in common]:
                    return False
    return True


def test_replicas_meet_in_one_order_with_several_chunks(monkeypatch) -> None:
    """The plan of step 8 had a document on two replicas with 8 and 9 units, in unlike groups."""
    layout = Parallelism(tp_size=2, pp_size=2, vpp_size=4, dp_size=4, sequence_parallel=True)

    def plans():
        return plan_steps(
            sample_lengths("reference", 120, seed=2), window=131072, num_micro_batches=4,
            packing="slim", cost=model_cost("7b", layout, hardware="h100-sxm"), layout=layout,
        )  # fmt: skip

    found = [*plans()]
    assert all(orders_agree(plan, 2, 4) for plan in found)
    assert sum(any(m.replicas for m in plan) for plan in found) > len(found) / 3
    monkeypatch.setattr(cut, "meet_in_order", lambda *_: True)
    wrong = next(plan for plan in plans() if not orders_agree(plan, 2, 4))
    blocks = [[m.replicas for m in own] for own in wrong.micro_batches]
    assert not meet_in_order(2, 4, wrong.chains, blocks)
    assert meet_in_order(2, 1, wrong.chains, blocks)
