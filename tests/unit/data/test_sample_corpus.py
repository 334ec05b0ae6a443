"""Samples in memory: what a caller gives is checked."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_wlb.data.sample_corpus import SampleCorpus
from megatron_wlb.errors import CorpusError


@pytest.mark.parametrize(
    ("samples", "complaint"),
    [
        ([], "a batch has no samples"),
        ([[1], []], r"sample 1 holds float64 of shape \(0,\); give a list of token ids"),
        ([[1], [1.5]], "sample 1 holds float64"),
        ([np.ones((1, 3), dtype=int)], r"sample 0 holds int64 of shape \(1, 3\)"),
        (["abc"], "sample 0 holds <U3"),
        ([[1, [2, 3]]], "sample 0 holds object"),
    ],
)
def test_samples_that_are_no_token_ids_are_told(samples: list, complaint: str) -> None:
    with pytest.raises(CorpusError, match=complaint):
        SampleCorpus.of(samples)


def test_samples_are_taken_as_any_whole_numbers() -> None:
    corpus = SampleCorpus.of([[1, 2], np.array([3], dtype=np.uint16)])
    assert corpus.lengths.tolist() == [2, 1]
    assert [stored.dtype for stored in corpus.stored] == [np.int64, np.int64]
