"""What slices of a document take: in all what the document takes, and more where they run later."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from megatron_wlb.cost import DocumentCost, Parallelism, load_hardware
from megatron_wlb.cost.analytic import AnalyticModel
from megatron_wlb.cost.attention_latency import filled, key_parts
from megatron_wlb.cost.execution import Execution
from megatron_wlb.cost.slices import PrefixCosts, UnitTable
from megatron_wlb.cost.step_costs import StageCosts
from megatron_wlb.cost.table import ProfiledCost, Row
from megatron_wlb.planning.models import load_model

COST = DocumentCost(3.0, 0.5, 6.0, 1.25, micro_batch_us=9.0)
POINTS = [(64, 90.0, 200.0), (512, 1500.0, 3900.0), (8192, 260_000.0, 610_000.0)]
TABLE = ProfiledCost(
    {}, 1, 1,
    attention=tuple(Row(*point) for point in POINTS),
    linear=(Row(1, 2.0, 4.0), Row(8192, 16384.0, 32768.0)),
)  # fmt: skip
CUTS = [0, 1, 700, 768, 2048, 3000]
"""Slices of a document of 3000 tokens, one of them a single token."""
LENGTHS = [[stop - start] for start, stop in pairwise(CUTS)]
STARTS = UnitTable.starting(CUTS[:-1])


class Opaque:
    """A cost that is no coefficients."""

    def __init__(self, cost: DocumentCost) -> None:
        self.work = cost.work


@pytest.mark.parametrize("cost", [COST, TABLE], ids=["document", "table"])
def test_slices_take_in_all_what_their_document_takes(cost):
    """Besides what each micro-batch takes by itself; the table's linear part is a line."""
    costs = StageCosts.shared(cost, [0.25, 0.75])
    overhead_us = np.array([3.0, 6.0]) if cost is COST else np.zeros(2)
    whole = costs.times_us([[3000]])[..., 0]
    slices = costs.times_us(LENGTHS, None, STARTS)
    more_us = np.outer(overhead_us, [0.25, 0.75]) * (len(LENGTHS) - 1)
    assert slices.sum(axis=2) == pytest.approx(whole + more_us, rel=1e-12)
    # As documents of their own they would take less.
    assert (slices[..., 1:] > costs.times_us(LENGTHS)[..., 1:]).all()


def test_slice_beside_documents_takes_its_pairs_by_hand():
    costs = StageCosts((COST,))
    begun = UnitTable.starting([300])
    ((forward,), (backward,)) = costs.times_us([[100, 20, 8]], None, begun)[..., 0]
    pairs = 100 * 100 + 2 * 300 * 100 + 20 * 20 + 8 * 8
    assert forward == pytest.approx(3 * 128 + 0.5 * pairs + 3)
    assert backward == pytest.approx(6 * 128 + 1.25 * pairs + 6)

    given = ([[100, 20, 8], [7]], [1.5, 2.0], UnitTable.starting([300, 0]))
    assert StageCosts((Opaque(COST),)).times_us(*given) == pytest.approx(costs.times_us(*given))
    # An uneven sharding of the tokens that run does not multiply the keys before them.
    scaled = costs.times_us([[100, 20, 8]], [1.5], begun)[0, 0, 0]
    assert scaled - forward == pytest.approx(0.5 * 0.5 * (100 * 100 + 20 * 20 + 8 * 8))


@pytest.mark.parametrize(
    ("blocks", "parts", "busy"),
    # Of 132 processors: one wave that is full enough, parts that fill three, two, or one of them.
    [(132, 1, 1.0), (131, 1, 131 / 132), (80, 3, 240 / 264), (66, 2, 1.0), (30, 4, 120 / 132)],
)
def test_few_blocks_attend_in_parts(blocks: int, parts: int, busy: float) -> None:
    assert key_parts(blocks, 132) == parts
    assert filled(blocks * parts, 132) == pytest.approx(busy)


def test_one_processor_is_always_busy() -> None:
    assert {key_parts(blocks, 1) for blocks in range(1, 100)} == {1}
    assert PrefixCosts(32, 2, 1, ()).idle(77) == 1


def test_rows_before_a_slice_cost_by_hand() -> None:
    """2,500 tokens of each of 2 ranks are 20 tiles of 4 heads: 80 blocks, in 3 parts."""
    prefixes = PrefixCosts(4, 2, 132, (0.25, 0.0))
    assert prefixes.idle(5000) == pytest.approx(264 / 240)
    plain = StageCosts((COST, COST))
    costs = StageCosts((COST, COST), prefixes)
    lengths, begun = [[5000, 20], [600]], UnitTable.starting([300, 0])
    assert (costs.times_us(lengths) == plain.times_us(lengths)).all()
    more = costs.times_us(lengths, None, begun) - plain.times_us(lengths, None, begun)
    forward_us = (264 / 240 - 1) * 0.5 * 2 * 300 * 5000
    assert more[0] == pytest.approx(np.array([[forward_us, 0.0]] * 2))
    assert more[1] == pytest.approx(np.array([[0.25 * 300, 0.0], [0.0, 0.0]]))

    given = (lengths, None, begun)
    opaque = StageCosts((Opaque(COST), Opaque(COST)), prefixes).times_us(*given)
    assert opaque == pytest.approx(costs.times_us(*given))


def test_passes_last_as_long_as_their_launches_together() -> None:
    plain = StageCosts((COST, COST))
    launched = StageCosts((COST, COST), launches_us=(0.0, 2900.0))
    short, shorter = [[2], [4]], launched.times_us([[2], [4]])
    times = plain.times_us(short)
    assert times[:, 1].sum() < 2 * 2900
    assert (shorter[:, 0] == times[:, 0]).all()
    assert shorter[:, 1] == pytest.approx(times[:, 1] * 2 * 2900 / times[:, 1].sum())
    # A long pass hides the launches of the short one that follows.
    long = [[400], [2]]
    assert plain.times_us(long)[:, 1, 1].max() < 900
    assert (launched.times_us(long) == plain.times_us(long)).all()


def test_ranks_that_share_a_unit_exchange_its_keys_by_hand() -> None:
    """Two replicas of CP 2, TP 8: each rank receives the keys and values of 3 of 4 ranks from other
    nodes, where one of a replica's two receives 1 of 2; and each copies all of them."""
    layout = Parallelism(tp_size=8, cp_size=2, pp_size=4, dp_size=4, sequence_parallel=True)
    machine = load_hardware("h100-sxm")
    costs = AnalyticModel(load_model("7b"), Execution(layout), machine).prefix_costs()
    received = 8 * 1024 * 2 / (machine.network_gb_s * machine.link_share * 1e3)
    copied = machine.memory_us(8 * 2048 * 2)
    by_hand = (3 / 4 - 1 / 2 / 2) * received + copied / 2, (7 / 8 - 1 / 2 / 4) * received
    assert costs.merged_us[0] == (0.0,) * 4
    assert costs.merged_us[1] == pytest.approx((by_hand[0],) * 4)
    assert costs.merged_us[2] == pytest.approx((by_hand[1] + copied * 3 / 4,) * 4)


def test_shares_of_a_unit_by_hand() -> None:
    """Two ranks have half of the tokens and pairs each, all rows before, and what they exchange."""
    rows, merged = (0.25,), ((0.0,), (0.125,))
    prefixes = PrefixCosts(4, 1, 132, rows, merged)
    fixed = DocumentCost(3.0, 0.5, 5.0, 0.75, micro_batch_us=30.0)

    idle = prefixes.idle(2500)
    assert idle == prefixes.idle(5000 / 2) != prefixes.idle(5000)
    forward_us = (3.0 * 5000 + 0.5 * (5000**2 + idle * 2 * 300 * 5000)) / 2 + 10 + 0.125 * 5000
    backward_us = (5.0 * 5000 + 0.75 * (5000**2 + 2 * 300 * 5000)) / 2 + 20 + 0.125 * 5000
    for cost in (fixed, Opaque(fixed)):
        costs = StageCosts((cost,), prefixes)
        shared = UnitTable.starting([300, 0])._replace(num_ranks=np.array([2.0, 1.0]))
        times = costs.times_us([[5000], [7]], None, shared)
        assert times[:, 0, 0] == pytest.approx([forward_us, backward_us + 0.25 * 300])
        assert (times[:, 0, 1] == costs.times_us([[7]])[:, 0, 0]).all()
