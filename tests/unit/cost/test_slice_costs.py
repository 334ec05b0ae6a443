"""What slices of a document take: in all what the document takes, and more where they run later."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from megatron_wlb.cost import DocumentCost
from megatron_wlb.cost.step_costs import StageCosts
from megatron_wlb.cost.table import ProfiledCost, Row

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
PREFIXES = [[start] for start in CUTS[:-1]]


@pytest.mark.parametrize("cost", [COST, TABLE], ids=["document", "table"])
def test_slices_take_in_all_what_their_document_takes(cost):
    """Besides what each micro-batch takes by itself; the table's linear part is a line."""
    costs = StageCosts.shared(cost, [0.25, 0.75])
    overhead_us = np.array([3.0, 6.0]) if cost is COST else np.zeros(2)
    whole = costs.times_us([[3000]])[..., 0]
    slices = costs.times_us(LENGTHS, prefixes=PREFIXES)
    more_us = np.outer(overhead_us, [0.25, 0.75]) * (len(LENGTHS) - 1)
    assert slices.sum(axis=2) == pytest.approx(whole + more_us, rel=1e-12)
    # As documents of their own they would take less.
    assert (slices[..., 1:] > costs.times_us(LENGTHS)[..., 1:]).all()


def test_slice_beside_documents_takes_its_pairs_by_hand():
    costs = StageCosts((COST,))
    ((forward,), (backward,)) = costs.times_us([[100, 20, 8]], prefixes=[[300, 0, 0]])[..., 0]
    pairs = 100 * 100 + 2 * 300 * 100 + 20 * 20 + 8 * 8
    assert forward == pytest.approx(3 * 128 + 0.5 * pairs + 3)
    assert backward == pytest.approx(6 * 128 + 1.25 * pairs + 6)

    class Opaque:
        def work(self, lengths):
            return COST.work(lengths)

    given = ([[100, 20, 8], [7]], [1.5, 2.0], [[300, 0, 0], [0]])
    assert StageCosts((Opaque(),)).times_us(*given) == pytest.approx(costs.times_us(*given))
    # An uneven sharding of the tokens that run does not multiply the keys before them.
    scaled = costs.times_us([[100, 20, 8]], [1.5], [[300, 0, 0]])[0, 0, 0]
    assert scaled - forward == pytest.approx(0.5 * 0.5 * (100 * 100 + 20 * 20 + 8 * 8))


def test_prefixes_of_nothing_change_no_bit():
    costs = StageCosts((COST, DocumentCost(1.1, 0.3, 2.7, 0.9)))
    lengths, scale = [[40, 7], [5], [3, 3, 3]], [1.1, 1.3, 1.7]
    nothing = [[0] * len(own) for own in lengths]
    assert (costs.times_us(lengths, scale) == costs.times_us(lengths, scale, nothing)).all()
