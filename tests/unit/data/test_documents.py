from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from helpers.slowness import slowness
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.errors import CheckpointError, ConfigError, CorpusError
from megatron_wlb.plan import Document

PROPERTY = settings(max_examples=120)

Lengths = list[list[int]]


def stream(lengths: Lengths, **kwargs: Any) -> DocumentStream:
    kwargs = {"window": 8, "step_tokens": 20, "seed": 1, "num_epochs": 2} | kwargs
    return DocumentStream([np.array(corpus, dtype=np.int32) for corpus in lengths], **kwargs)


def drain(documents: DocumentStream) -> list[list[Document]]:
    steps = []
    while not documents.exhausted:
        steps.append(documents.next_step())
    return steps


corpora = st.lists(
    st.lists(st.integers(0, 40) | st.integers(1, 3), max_size=30), min_size=1, max_size=3
).filter(lambda lengths: any(map(sum, lengths)))
streams = st.fixed_dictionaries(
    {
        "window": st.integers(2, 50),
        "step_tokens": st.integers(1, 120),
        "seed": st.integers(0, 2**32 - 1),
        "num_epochs": st.integers(1, 3),
        "shuffle": st.booleans(),
    }
)


@PROPERTY
@given(corpora, streams)
def test_split_gives_each_stored_token_once_an_epoch(
    lengths: Lengths, options: dict[str, Any]
) -> None:
    given_tokens: Counter[tuple[int, int, int, int]] = Counter()
    last_tokens = set()
    for document in (d for step in drain(stream(lengths, **options)) for d in step):
        assert 1 <= document.length <= options["window"]
        stop = document.offset + document.length
        place = (document.epoch, document.corpus, document.number)
        given_tokens.update((*place, token) for token in range(document.offset, stop))
        if document.ends:
            last_tokens.add((*place, stop - 1))
    stored = [
        (epoch, corpus, index, length)
        for epoch in range(options["num_epochs"])
        for corpus, in_corpus in enumerate(lengths)
        for index, length in enumerate(in_corpus)
    ]
    expected = {(e, c, i, token) for e, c, i, length in stored for token in range(length)}
    assert given_tokens == Counter(expected)
    assert last_tokens == {(e, c, i, length - 1) for e, c, i, length in stored if length}


@PROPERTY
@given(corpora, streams, st.sampled_from(["split", "truncate"]))
def test_step_k_holds_the_documents_whose_first_token_lies_in_it(
    lengths: Lengths, options: dict[str, Any], policy: str
) -> None:
    documents = stream(lengths, **options, long_documents=policy)
    position, arrivals = 0, []
    for k, step in enumerate(drain(documents)):
        for document in step:
            assert document.step == k == position // options["step_tokens"]
            position += document.length
            arrivals.append((document.epoch, document.arrival, document.offset))
    assert position == documents.position_tokens
    assert position == documents.tokens_per_epoch * options["num_epochs"]
    assert arrivals == sorted(set(arrivals)), "epochs, arrivals and pieces come in order"
    numbers = sorted({arrival for _, arrival, _ in arrivals})
    assert numbers == list(range(documents.num_documents * options["num_epochs"]))


@PROPERTY
@given(corpora, streams, st.sampled_from(["split", "truncate"]), st.data())
def test_state_through_json_at_any_step_changes_nothing(
    lengths: Lengths, options: dict[str, Any], policy: Any, data: st.DataObject
) -> None:
    options["long_documents"] = policy
    straight = stream(lengths, **options)
    steps = drain(straight)
    at = data.draw(st.integers(0, len(steps)))
    before = stream(lengths, **options)
    head = [before.next_step() for _ in range(at)]
    state = json.loads(json.dumps(before.state_dict()))
    after = stream(lengths, **options)
    after.load_state_dict(state)
    assert after.state_dict() == before.state_dict() == state
    assert head + drain(after) == steps
    assert after.state_dict() == straight.state_dict()
    assert after.next_step() == []


def test_order_depends_on_the_seed_and_the_epoch_alone() -> None:
    lengths = [list(range(1, 40)), list(range(3, 20))]

    def order(epoch: int, **options: Any) -> list[tuple[int, int]]:
        documents = (d for step in drain(stream(lengths, **options)) for d in step)
        return [(d.corpus, d.number) for d in documents if d.epoch == epoch and d.offset == 0]

    assert order(1) == order(1, window=13, step_tokens=7, num_epochs=3)
    assert order(0) != order(1)
    assert order(0) != order(0, seed=2)
    assert sorted(order(0)) == order(0, shuffle=False) == order(1, shuffle=False)


def test_truncate_keeps_the_first_window_and_counts_what_it_drops() -> None:
    documents = stream([[19, 8, 9, 2]], long_documents="truncate", num_epochs=1, shuffle=False)
    assert [(d.length, d.ends) for step in drain(documents) for d in step] == [
        (8, False), (8, True), (8, False), (2, True)
    ]  # fmt: skip
    assert (documents.dropped_tokens_per_epoch, documents.num_long) == (11 + 1, 2)
    assert documents.tokens_per_epoch == 26
    assert stream([[19]]).dropped_tokens_per_epoch == 0


def test_error_policy_names_the_longest_document_and_the_ways_out() -> None:
    with pytest.raises(
        CorpusError,
        match=r"document 2 of corpus 1 has 30 tokens, above the window of 8 \(2 documents are\).*"
        r"'split' or 'truncate'",
    ):
        stream([[9, 8], [40, 4, 30]], ranges=[(0, 2), (1, 3)], long_documents="error")
    assert len(drain(stream([[8, 7]], long_documents="error", num_epochs=1))[0]) == 2


def test_ranges_bound_each_corpus_and_empty_documents_are_counted() -> None:
    lengths = [[1, 2, 0, 4], [], [5, 6, 7]]
    documents = stream(lengths, ranges=[(1, 4), (0, 0), (0, 2)], num_epochs=1)
    found = {(d.corpus, d.number, d.length) for step in drain(documents) for d in step}
    assert found == {(0, 1, 2), (0, 3, 4), (2, 0, 5), (2, 1, 6)}
    assert (documents.num_empty, documents.num_documents) == (1, 4)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"window": 1}, "window is 1; give at least 2"),
        ({"num_epochs": 0}, "num_epochs is 0; give at least 1"),
        ({"seed": -1}, "seed is -1; give at least 0"),
    ],
)
def test_stream_refuses_settings_out_of_their_limits(
    options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        stream([[3, 4]], **options)


def test_stream_refuses_ranges_without_documents() -> None:
    with pytest.raises(CorpusError, match=r"no documents in 1:1 of corpus 0 .*another --split"):
        stream([[3, 4]], ranges=[(1, 1)])
    with pytest.raises(CorpusError, match=r"\(2 empty\)"):
        stream([[0, 0]])


@pytest.mark.parametrize(
    ("lengths", "options", "complaint"),
    [
        ([[3, 4, 5]], {"seed": 2}, "seed 1 there and 2 here"),
        ([[3, 4, 5]], {"window": 9}, "window 8 there and 9 here"),
        ([[3, 4, 5]], {"step_tokens": 21}, "step_tokens 20 there and 21 here"),
        ([[3, 4, 5]], {"shuffle": False}, "shuffle True there and False here"),
        ([[3, 4, 5]], {"long_documents": "truncate"}, "long_documents split there and truncate"),
        ([[4, 3, 5]], {}, "corpus 0 has other documents 0:3 there and here"),
        ([[4, 3, 5]], {"names": ["web"]}, "web has other documents 0:3 there and here"),
        ([[3, 4, 5], [6]], {}, "1 corpora there and 2 here .corpus 0, corpus 1.;"),
        ([[3, 4, 5]], {"ranges": [(0, 2)]}, "documents 0:3 of corpus 0 there and 0:2 here"),
    ],
)
def test_state_of_another_stream_is_refused_naming_what_differs(
    lengths: Lengths, options: dict[str, Any], complaint: str
) -> None:
    saved = stream([[3, 4, 5]])
    saved.next_step()
    here = stream(lengths, **options)
    untouched = here.state_dict()
    with pytest.raises(CheckpointError, match=complaint) as caught:
        here.load_state_dict(saved.state_dict())
    assert str(caught.value).count(" there and ") == 1
    assert here.state_dict() == untouched


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 2}, "version 2, not 1"),
        ({"epoch": None}, "not the state of a document stream"),
        ({"document": 3}, "lies outside the 3 documents"),
        ({"offset": -1}, "offset is -1; give at least 0"),
        ({"epoch": float("inf")}, "epoch is inf; give a whole number"),
        ({"epoch": 2**40}, "lies outside the 3 documents"),
        ({"position_tokens": 2**40}, "lies outside the 3 documents"),
    ],
)
def test_damaged_state_is_refused(change: dict[str, Any], complaint: str) -> None:
    documents = stream([[3, 4, 5]])
    with pytest.raises(CheckpointError, match=complaint):
        documents.load_state_dict(documents.state_dict() | change)
    with pytest.raises(CheckpointError, match="not the state of a document stream"):
        documents.load_state_dict({})


def test_state_may_be_continued_for_more_epochs() -> None:
    short = stream([[3, 4, 5]], num_epochs=1)
    drain(short)
    longer = stream([[3, 4, 5]], num_epochs=2)
    longer.load_state_dict(short.state_dict())
    rest = [d for step in drain(longer) for d in step]
    assert [d.epoch for d in rest] == [1, 1, 1]


def test_next_step_gives_20k_documents_in_50_ms() -> None:
    lengths = np.random.RandomState(0).lognormal(6, 1, 200_000).astype(np.int32) + 1
    documents = DocumentStream(
        [lengths], window=4096, step_tokens=20_000 * int(lengths.mean()), seed=3
    )
    documents.next_step()  # This one makes the permutation.
    elapsed_ms = []
    for _ in range(8):
        start = time.process_time()
        step = documents.next_step()
        elapsed_ms.append(1e3 * (time.process_time() - start))
        assert len(step) > 15_000
    # The least: other programs run beside this.
    assert min(elapsed_ms) < 50 * slowness(), elapsed_ms
