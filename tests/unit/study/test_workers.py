"""Work that processes share comes back as if one had done it."""

from __future__ import annotations

import gc
from operator import add

import pytest

from megatron_wlb.study.workers import Workers


@pytest.mark.parametrize("number", [1, 2])
def test_results_are_in_order_but_for_what_is_no_longer_wanted(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_wlb.study.workers.ALONE_S", 0.0)
    told, taken = [], []
    collects = gc.get_threshold()

    def wanted(item: int) -> bool:
        return item < 10 or len(taken) < 12

    with Workers(number, 100) as pool:
        every = pool.map(add, range(14), lambda *now: told.append(now), wanted)
        taken.extend(result for result in every)
    assert gc.get_threshold() == collects
    assert taken == [(item, item + 100) for item in range(12)]
    assert told == [(done, 14) for done in range(15)]
