from __future__ import annotations

import pytest

from _papers import kernels, paper
from _papers.kernels import SlowShortRun
from _papers.paper import Effort, K

QUICK = Effort(10, (1,), warm_up=0)


def test_attention_is_quadratic_and_all_else_linear() -> None:
    found = kernels.figure_7(QUICK)
    assert found[4 * K].attention == pytest.approx(1)
    assert found[128 * K].attention == pytest.approx(4 * found[64 * K].attention, rel=0.01)
    assert found[128 * K].linear == pytest.approx(2 * found[64 * K].linear)
    # Short documents are linear work, long ones attention.
    assert found[8 * K].attention < 0.2 * found[8 * K].linear
    assert found[128 * K].attention > 1.5 * found[128 * K].linear
    assert all(own.hidden < 0.2 * own.collectives for own in found.values())


def test_kernel_takes_whole_tiles() -> None:
    found = kernels.figure_10(QUICK)
    assert found[16].latency == found[128].latency == 1
    assert found[16].tflops == pytest.approx(found[128].tflops / 8, rel=0.01)
    assert found[192].latency == pytest.approx(2, rel=0.02)
    assert 1.9 < found[256].latency < found[192].latency


def test_slow_short_chunks_bring_sharding_nearer_to_the_printed_gain() -> None:
    gains = []
    for rate in (1, 0.5, 0.25):
        times = paper.figure_15(64 * K, 4, QUICK, lambda run, rate=rate: SlowShortRun.of(run, rate))
        assert times["hybrid"][0] <= times["adaptive"][0] <= times["per-sequence"][0]
        gains.append(times["per-sequence"][0] / times["per-document-remainder"][0])
    usual = paper.figure_15(64 * K, 4, QUICK)
    assert gains[0] == usual["per-sequence"][0] / usual["per-document-remainder"][0]
    assert gains[0] > gains[1] > gains[2] > 1
