from __future__ import annotations

import numpy as np
import pytest

from megatron_wlb.data import length_statistics
from megatron_wlb.data.length_statistics import LengthStatistics
from megatron_wlb.errors import CorpusError

LENGTHS = np.array([7, 0, 3, 900, 3, 40, 0, 64, 500, 1024])


@pytest.fixture(params=["by array", "by sorting"])
def statistics(request, monkeypatch) -> LengthStatistics:
    if request.param == "by sorting":
        monkeypatch.setattr(length_statistics, "_MOST_TO_COUNT", 100)
    return LengthStatistics.of(LENGTHS)


@pytest.mark.parametrize("percent", [0, 1, 37.5, 50, 90, 99, 99.9, 100])
def test_percentiles_are_numpys(statistics: LengthStatistics, percent: float) -> None:
    expected = np.percentile(LENGTHS[LENGTHS > 0], percent)
    assert statistics.percentile(percent) == pytest.approx(expected, rel=1e-12)


def test_part_is_counted_by_documents_tokens_and_squares(statistics: LengthStatistics) -> None:
    part = statistics.part(64, 1024)
    assert (part.documents, part.tokens) == (3, 64 + 500 + 900)
    assert part.documents_share == 3 / 8
    assert part.tokens_share == pytest.approx(1464 / 2541)
    squares = 2 * 9 + 49 + 1600 + 64**2 + 500**2 + 900**2 + 1024**2
    assert part.attention_share == pytest.approx((64**2 + 500**2 + 900**2) / squares)


def test_attention_of_long_documents_is_that_of_their_pieces() -> None:
    statistics = LengthStatistics.of(LENGTHS, window=512)
    pieces = {900: 512**2 + 388**2, 1024: 2 * 512**2}
    total = 2 * 9 + 49 + 1600 + 64**2 + 500**2 + sum(pieces.values())
    for length, work in pieces.items():
        assert statistics.part(length, length + 1).attention_share == pytest.approx(work / total)
    one = LengthStatistics.of(np.array([1 << 20] + [8192] * 1000), window=8192)
    assert one.part(8193).attention_share == pytest.approx(128 / 1128)
    assert one.part(8193).tokens == 1 << 20


def test_histogram_has_every_document_in_one_bin_of_a_power_of_two(statistics) -> None:
    bins = statistics.histogram()
    assert [(start, stop) for start, stop, _ in bins] == [
        (2**e, 2 ** (e + 1)) for e in range(1, 11)
    ]
    assert [part.documents for _, _, part in bins] == [2, 1, 0, 0, 1, 1, 0, 1, 1, 1]
    assert sum(part.attention_share for _, _, part in bins) == pytest.approx(1)
    assert sum(part.tokens for _, _, part in bins) == statistics.tokens


def test_long_documents_do_not_overflow() -> None:
    statistics = LengthStatistics.of(np.array([2**31 - 1] * 5 + [1]))
    assert statistics.tokens == 5 * (2**31 - 1) + 1
    assert statistics.part(2**30).attention_share == pytest.approx(1)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_statistics_of_nothing_are_refused(lengths: list[int]) -> None:
    with pytest.raises(CorpusError, match="no document has tokens"):
        LengthStatistics.of(np.array(lengths, np.int64))
