from __future__ import annotations

import json

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


def test_statistics_count_documents_and_tokens(statistics: LengthStatistics) -> None:
    assert (statistics.documents, statistics.num_empty, statistics.longest) == (8, 2, 1024)
    assert statistics.tokens == 3 + 3 + 7 + 40 + 64 + 500 + 900 + 1024
    assert statistics.lengths.tolist() == [3, 7, 40, 64, 500, 900, 1024]
    assert statistics.counts.tolist() == [2, 1, 1, 1, 1, 1, 1]


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


def test_dict_is_json_and_says_what_is_long(statistics: LengthStatistics) -> None:
    values = json.loads(json.dumps(statistics.as_dict(window=512)))
    assert [(row["windows"], row["documents"]) for row in values["at_least"]] == [
        (0.125, 4), (0.25, 3), (0.5, 3), (1.0, 2),
    ]  # fmt: skip
    assert values["longer_than_window"] == 2 and values["mean"] == 2541 / 8
    assert values["percentiles"].keys() == {"p50", "p90", "p99", "p99.9"}
    exact = LengthStatistics.of(np.array([512, 512])).as_dict(window=512)
    assert exact["longer_than_window"] == 0 and exact["at_least"][3]["documents"] == 2


def test_long_documents_do_not_overflow() -> None:
    statistics = LengthStatistics.of(np.array([2**31 - 1] * 5 + [1]))
    assert statistics.tokens == 5 * (2**31 - 1) + 1
    assert statistics.part(2**30).attention_share == pytest.approx(1)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_statistics_of_nothing_are_refused(lengths: list[int]) -> None:
    with pytest.raises(CorpusError, match="no document has tokens"):
        LengthStatistics.of(np.array(lengths, np.int64))
