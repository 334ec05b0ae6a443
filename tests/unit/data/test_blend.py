"""Blends of corpora: each gives its share, none of its documents is lost or doubled."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.data.blend import Blend, BlendedStream
from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.errors import CheckpointError, ConfigError, CorpusError
from megatron_wlb.plan import Document


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [
        (["a"], ("a",), None),
        (["a", "b"], ("a", "b"), None),
        (["0.3", "a", "0.7", "b"], ("a", "b"), (0.3, 0.7)),
        (["1", "a"], ("a",), (1.0,)),
        (["1", "2", "3"], ("1", "2", "3"), None),  # an odd number of words: prefixes
        (["a", "1", "b", "2"], ("a", "1", "b", "2"), None),
        (["0", "a", "2", "b"], ("a", "b"), (0.0, 2.0)),
    ],
)
def test_parse_reads_prefixes_and_weights_as_megatron_does(
    words: list[str], prefixes: tuple[str, ...], weights: tuple[float, ...] | None
) -> None:
    from megatron.core.datasets.utils import get_blend_from_list

    assert Blend.parse(words) == Blend(prefixes, weights)
    theirs_prefixes, theirs_weights = get_blend_from_list(words)
    assert (tuple(theirs_prefixes), theirs_weights and tuple(theirs_weights)) == (prefixes, weights)


@pytest.mark.parametrize("words", [["-1", "a"], ["nan", "a"], ["inf", "a"], ["0", "a", "0", "b"]])
def test_parse_refuses_weights_that_are_none(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="weight"):
        Blend.parse(words)


def blend(lengths: list[list[int]], weights: list[float], **options: Any) -> BlendedStream:
    arrays = [np.array(corpus, dtype=np.int32) for corpus in lengths]
    options = {"window": 16, "step_tokens": 100, "seed": 3} | options
    return BlendedStream(arrays, weights, **options)


LENGTHS = [[3, 40, 5, 7, 9, 1, 2, 16], [8, 8, 30], [11, 2, 2, 90, 4]]


def tokens_by_corpus(documents: list[Document]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for document in documents:
        counts[document.corpus] += document.length
    return counts


@settings(max_examples=50)
@given(
    st.lists(st.floats(0.001, 10), min_size=3, max_size=3),
    st.integers(1, 150),
    st.integers(1, 30),
)
def test_each_corpus_gives_its_share_of_every_step(
    weights: list[float], step_tokens: int, num_steps: int
) -> None:
    """Give or take a document of each: a share that drifts is a share that is not kept."""
    stream = blend(LENGTHS, weights, step_tokens=step_tokens)
    seen: list[Document] = []
    for step in range(num_steps):
        arrived = stream.next_step()
        assert {document.step for document in arrived} <= {step}
        seen += arrived
        counts = tokens_by_corpus(seen)
        assert 0 <= counts.total() - (step + 1) * step_tokens < 16
        for corpus, weight in enumerate(weights):
            share = counts.total() * weight / sum(weights)
            most_others_are_ahead = 16 * (len(weights) - 1) * weight / sum(weights)
            assert -most_others_are_ahead - 1e-6 <= counts[corpus] - share < 16


def test_order_does_not_depend_on_where_steps_end() -> None:
    def order(step_tokens: int) -> list[tuple[int, int, int, int]]:
        stream = blend(LENGTHS, [1, 2, 3], step_tokens=step_tokens)
        arrived = [d for _ in range(9000 // step_tokens) for d in stream.next_step()]
        return [(d.arrival, d.corpus, d.number, d.offset) for d in arrived][:500]

    assert order(90) == order(360) == order(16)


def test_documents_and_their_epochs_are_those_of_each_corpus_alone() -> None:
    weights = [1.0, 5.0, 2.0]
    stream = blend(LENGTHS, weights)
    arrived = [document for _ in range(40) for document in stream.next_step()]
    for corpus, lengths in enumerate(LENGTHS):
        alone = DocumentStream([np.array(lengths)], window=16, step_tokens=100, seed=3)
        ours = [d for d in arrived if d.corpus == corpus]
        expected: list[Document] = []
        while len(expected) < len(ours):
            expected += alone.next_step()
        for found, document in zip(ours, expected, strict=False):
            for name in ("number", "offset", "length", "ends", "epoch"):
                assert getattr(found, name) == getattr(document, name)
    assert max(d.epoch for d in arrived if d.corpus == 1) > 40
    assert max(d.epoch for d in arrived if d.corpus == 0) < 15


def test_keys_are_the_order_of_the_stream_also_where_pieces_interleave() -> None:
    """Packings restore their queues by it."""
    stream = blend(LENGTHS, [1, 2, 3])
    arrived = [document for _ in range(20) for document in stream.next_step()]
    keys = [document.key for document in arrived]
    assert keys == sorted(set(keys))
    assert [document.step for document in arrived] == sorted(document.step for document in arrived)
    pieces = [n for n, d in enumerate(arrived) if d.corpus == 2 and d.number == 3 and d.epoch == 0]
    assert pieces[-1] - pieces[0] >= len(pieces), "a document of another corpus comes between"


def test_corpora_alternate_inside_a_step() -> None:
    """Packings in stream order would otherwise train one corpus after another."""
    stream = blend([[5] * 100, [5] * 100], [1, 1], step_tokens=200)
    corpora = [document.corpus for document in stream.next_step()]
    assert len(corpora) == 40
    assert all(set(corpora[at : at + 4]) == {0, 1} for at in range(0, 40, 4))


@pytest.mark.parametrize("taken", [1, 5, 13])
def test_stream_goes_on_where_its_state_was_taken(taken: int) -> None:
    import json

    first, other = blend(LENGTHS, [0.2, 0.3, 0.5]), blend(LENGTHS, [0.2, 0.3, 0.5])
    for _ in range(taken):
        first.next_step()
    other.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(10):
        assert other.next_step() == first.next_step()


def test_state_of_shares_by_step_still_goes_on() -> None:
    """As releases before wrote it: weights as binary fractions, no step and nothing drawn."""
    stream = blend(LENGTHS, [0.3, 0.7, 0.0])
    old = stream.state_dict()
    del old["step"], old["drawn"]
    old["arrivals"] = {"0": -1, "1": -1}
    for corpus, weight in (("0", 0.3), ("1", 0.7)):
        share = Fraction(weight) / (Fraction(0.3) + Fraction(0.7)) * 100
        old["streams"][corpus]["settings"]["step_tokens"] = str(share)
    other = blend(LENGTHS, [0.3, 0.7, 0.0])
    other.load_state_dict(old)
    assert other.next_step() == stream.next_step()


@pytest.mark.parametrize(
    "other",
    [
        blend(LENGTHS, [0.2, 0.3, 0.6]),
        blend(LENGTHS, [0.2, 0.3, 0.0]),
        blend([*LENGTHS[:2], [11, 2, 2, 90, 5]], [0.2, 0.3, 0.5]),
        blend(LENGTHS, [0.2, 0.3, 0.5], seed=4),
    ],
)
def test_state_of_another_blend_is_refused(other: BlendedStream) -> None:
    stream = blend(LENGTHS, [0.2, 0.3, 0.5])
    with pytest.raises(CheckpointError, match="resume with"):
        stream.load_state_dict(other.state_dict())


def test_state_of_a_stream_without_weights_is_refused() -> None:
    single = DocumentStream([np.array([3, 4])], window=16, step_tokens=10, seed=3)
    with pytest.raises(CheckpointError, match="blend with weights"):
        blend(LENGTHS, [1, 1, 1]).load_state_dict(single.state_dict())


def test_corpus_of_weight_0_is_left_out_and_may_be_empty() -> None:
    stream = blend([[5, 6], [], [7]], [1, 0, 1])
    assert {d.corpus for _ in range(5) for d in stream.next_step()} == {0, 2}
    with pytest.raises(CorpusError, match="no documents"):
        blend([[5, 6], [], [7]], [1, 1, 1])
