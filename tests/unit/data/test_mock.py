"""Random tokens that no file holds: the same for every reader, and shaped like a corpus."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_wlb.data.corpora import SPLITS, Corpora
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.mock import MockCorpus
from megatron_wlb.errors import CheckpointError, ConfigError, CorpusError
from megatron_wlb.planning.from_config import Split
from megatron_wlb.settings.config import Config, from_flat

WINDOW = 512


def mock(lengths: str = "reference", **others: Any) -> MockCorpus:
    settings: dict[str, Any] = {"window": WINDOW, "seed": 7, "vocab_size": 50}
    return MockCorpus.of(lengths, **settings | others)


MOCK = mock()
LONGEST = int(MOCK.lengths.argmax())


@given(st.lists(st.integers(0, WINDOW), min_size=1, max_size=6))
def test_mock_tokens_are_the_same_in_any_pieces(cuts: list[int]) -> None:
    """As slices, context-parallel ranks and resumed runs read them."""
    assert MOCK.lengths[LONGEST] == WINDOW
    edges = [0, *sorted(cuts), WINDOW]
    pieces = [MOCK.tokens(LONGEST, a, b) for a, b in itertools.pairwise(edges)]
    whole = mock().tokens(LONGEST, 0, WINDOW)
    assert np.array_equal(np.concatenate(pieces), whole)


def test_mock_tokens_are_those_of_every_release() -> None:
    """A run that resumes with another NumPy goes on with the same tokens."""
    assert mock().tokens(3, 0, 8).tolist() == [4, 2, 9, 42, 40, 33, 42, 3]


def test_mock_documents_end_with_their_only_eod() -> None:
    for eod in (0, 20, 49):
        corpus = mock(eod=eod)
        tokens = [corpus.tokens(i, 0, int(n)) for i, n in enumerate(corpus.lengths[:200])]
        assert all(part[-1] == eod and eod not in part[:-1] for part in tokens)
        assert {*np.concatenate(tokens).tolist()} == {*range(50)}
    assert mock().eod == 49


def test_mock_tokens_differ_by_seed_and_document() -> None:
    other = mock(seed=8)
    index = next(i for i in range(1000) if min(MOCK.lengths[i], other.lengths[i]) > 64)
    second = next(i for i in range(index + 1, 1000) if MOCK.lengths[i] > 64)
    found = [MOCK.tokens(index, 0, 64), other.tokens(index, 0, 64), MOCK.tokens(second, 0, 64)]
    equal = [np.mean(a == b) for a, b in ((found[0], found[1]), (found[0], found[2]))]
    assert max(equal) < 0.2  # 1 of 49 by chance


def test_mock_lengths_are_a_file_s_or_drawn(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("5\n900\n1\n")
    assert mock(str(path)).lengths.tolist() == [5, 900, 1]
    drawn = LengthSource.of_distribution("stdlib").lengths(1 << 15, window=WINDOW, seed=7)
    assert np.array_equal(mock("stdlib").lengths, drawn)
    assert len(mock(window=1 << 20).lengths) < 1_100_000


@pytest.mark.parametrize(
    ("lengths", "others", "error", "said"),
    [
        ("referense", {}, ConfigError, "did you mean reference?"),
        ("no/such.txt", {}, CorpusError, "cannot read no/such.txt"),
        ("reference", {"vocab_size": 1}, ConfigError, "a vocabulary of 1"),
    ],
)
def test_mock_data_that_cannot_be_made_is_refused(
    lengths: str, others: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        mock(lengths, **others)


def config(**flags: Any) -> Config:
    values = {"mock_data": True, "vocab_size": 50, "seq_length": WINDOW, "seed": 7}
    return from_flat(values | flags)


def test_mock_data_need_a_vocabulary() -> None:
    with pytest.raises(ConfigError, match="give --vocab-size"):
        Corpora.open(config(vocab_size=None))


def test_splits_of_mock_data_have_other_documents() -> None:
    corpora = Corpora.open(config(split="80,15,5"))
    bounds = [corpora.ranges[name][0] for name in SPLITS]
    assert bounds[0][0] == 0 and bounds[2][1] == len(corpora.corpora[0].lengths)
    assert all(a[0] < a[1] == b[0] < b[1] for a, b in itertools.pairwise(bounds))


def test_streams_of_mock_data_go_on_where_they_were_saved() -> None:
    def stream(**flags: Any) -> Any:
        settings = config(**flags)
        return Split(Corpora.open(settings), "train", None).stream(
            100, window=WINDOW, longest=WINDOW, windows_a_step=4, seed=settings.training.seed,
            long_documents="split",
        )  # fmt: skip

    first, second = stream(), stream()
    for _ in range(5):
        first.next_step()
    second.load_state_dict(first.state_dict())
    assert [second.next_step() for _ in range(5)] == [first.next_step() for _ in range(5)]
    for others in ({"wlb_mock_lengths": "stdlib"}, {"seq_length": 256}, {"split": "1"}):
        with pytest.raises(CheckpointError, match=r"mock data \(distribution"):
            stream(**others).load_state_dict(first.state_dict())
