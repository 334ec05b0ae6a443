"""The printed Algorithm 1 with every departure is the package's own, plan by plan."""

from __future__ import annotations

import pytest

from _papers import paper
from _papers.algorithm_1 import DEPARTURES, with_departures
from megatron_wlb.data.lengths import sample_lengths
from megatron_wlb.plan import Document
from megatron_wlb.planning.packing.base import Limits
from megatron_wlb.planning.packing.wlb import WLBPacker

WINDOW = 8192
COST = paper.forward_cost(paper.scenario("7b", 128 * 1024, (8, 2, 4, 1)))


def steps_of(kind: type[WLBPacker], number: int, max_tokens: int, steps: int = 60):
    """The lengths of each micro-batch, step by step, with as many queues."""
    limits = Limits(number, WINDOW, max_tokens, number * WINDOW, max_age=10_000)
    thresholds = [WINDOW // 3, 2 * WINDOW // 3]
    packer = kind(limits, COST, thresholds)
    lengths = iter(sample_lengths("reference", 4000, seed=5, window=WINDOW).tolist())
    arrival, found = 0, []
    for step in range(steps):
        documents, tokens = [], 0
        while tokens < number * WINDOW:
            length = next(lengths)
            documents.append(Document(0, arrival, 0, length, True, 0, arrival, step))
            arrival, tokens = arrival + 1, tokens + length
        packed = packer.pack(documents, step)
        found.append([sorted((d.number, d.length) for d in own) for own in packed])
    return found


@pytest.mark.parametrize("number", [2, 4, 16])
@pytest.mark.parametrize("windows", [1.1, 1.5, 2])
def test_with_all_departures_it_is_the_packages_own(number: int, windows: float) -> None:
    most = int(windows * WINDOW)
    departed = steps_of(with_departures(*DEPARTURES), number, most)
    assert departed == steps_of(WLBPacker, number, most)


@pytest.mark.parametrize("name", DEPARTURES)
def test_each_departure_changes_something(name: str) -> None:
    others = with_departures(*(other for other in DEPARTURES if other != name))
    changes = [
        steps_of(others, number, int(windows * WINDOW))
        != steps_of(WLBPacker, number, int(windows * WINDOW))
        for number in (2, 4, 16)
        for windows in (1, 1.1, 1.5)
    ]
    assert any(changes)
