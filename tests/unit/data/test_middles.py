"""Fill-in-the-middle: what is rewritten, how often, and that any reading gives the same."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_wlb.data.corpus import Corpus
from megatron_wlb.data.middles import IntArray, Middles, RewrittenCorpus

PREFIX, MIDDLE, SUFFIX, PADDING, SPLIT, EOD = 300, 301, 302, 303, 304, 0
WINDOW = 64


def encode(text: str) -> list[int]:
    """Letters, and "th" as one token, so that cut texts may have more tokens than whole ones."""
    return [200 if part == "th" else ord(part) for part in re.findall("th|.", text, re.DOTALL)]


def decode(ids: Sequence[int]) -> str:
    return "".join("th" if i == 200 else chr(i) for i in ids)


MIDDLES = Middles(
    PREFIX, MIDDLE, SUFFIX, PADDING, EOD, rate=1.0, spm_rate=0.0, seed=7, decode=decode,
    encode=encode,
)  # fmt: skip
TEXT = "the thing that the other thought of, with both hands"


def rewritten(middles: Middles, tokens: Sequence[int], *key: int) -> list[int]:
    found = middles.rewritten(np.array(tokens), key)
    assert len(found) == len(tokens)
    return list(found.tolist())


def restored(tokens: list[int]) -> str:
    """The text of one rewritten part, without what its suffix lost."""
    assert tokens[0] == PREFIX
    suffix, middle = tokens.index(SUFFIX), tokens.index(MIDDLE)
    after = [t for t in tokens[middle + 1 :] if t != PADDING]
    if suffix == 1:  # SPM, whose prefix and middle are one
        return decode(after) + decode(tokens[2:middle])
    return decode(tokens[1:suffix]) + decode(after) + decode(tokens[suffix + 1 : middle])


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_middles_move_and_lose_no_text_but_the_suffix_end(spm_rate: float) -> None:
    middles = dataclasses.replace(MIDDLES, spm_rate=spm_rate)
    tokens, found = [*encode(TEXT), EOD], set()
    for key in range(200):
        changed = rewritten(middles, tokens, key)
        assert changed[-1] == EOD
        if changed != tokens:
            text = restored(changed[:-1])
            assert TEXT.startswith(text) and len(TEXT) - len(text) <= 7  # 3, and 2 cut pairs
            assert (changed[1] == SUFFIX) == bool(spm_rate) or changed[0:2] == [PREFIX, SUFFIX]
            found.add(tuple(changed))
    assert len(found) > 50  # The others have no suffix to spare, or are the same by chance.


def test_rates_are_those_of_parts_that_change() -> None:
    tokens = encode(TEXT * 20)  # so long that nearly all have suffixes to spare
    middles = dataclasses.replace(MIDDLES, rate=0.4, spm_rate=0.25)
    found = [rewritten(middles, tokens, key) for key in range(800)]
    changed = [one for one in found if one != tokens]
    spm = [one for one in changed if one[1] == SUFFIX]
    # Three standard deviations of a binomial are 0.052 and 0.073.
    assert len(changed) / len(found) == pytest.approx(0.4, abs=0.055)
    assert len(spm) / len(changed) == pytest.approx(0.25, abs=0.075)
    assert rewritten(dataclasses.replace(MIDDLES, rate=0.0), tokens, 1) == tokens


def test_parts_between_ends_are_rewritten_alone() -> None:
    tokens = [*encode(TEXT), EOD, EOD, *encode(TEXT.upper()), EOD]
    ends = [number for number, token in enumerate(tokens) if token == EOD]
    changed = rewritten(MIDDLES, tokens, 3)
    assert [number for number, token in enumerate(changed) if token == EOD] == ends
    first, second = changed[: ends[0]], changed[ends[1] + 1 : -1]
    assert TEXT.startswith(restored(first)) and TEXT.upper().startswith(restored(second))


def test_fragments_are_rewritten_at_their_own_rate() -> None:
    fragments = [*encode(TEXT * 3), SPLIT, SPLIT, *encode(TEXT * 3)]
    middles = dataclasses.replace(MIDDLES, split=SPLIT, fragment_rate=0.5, rate=0.8)
    found = [rewritten(middles, fragments, key) for key in range(600)]
    at = fragments.index(SPLIT)
    assert all(one[at : at + 2] == [SPLIT, SPLIT] for one in found)
    numbers = [one.count(PREFIX) for one in found]
    # At 0.8 any, then each at 0.5; few have too short a suffix.
    assert {n: numbers.count(n) / 600 for n in (0, 1, 2)} == pytest.approx(
        {0: 0.4, 1: 0.4, 2: 0.2}, abs=0.07
    )
    without = encode(TEXT * 3)
    rate = np.mean([rewritten(middles, without, key) != without for key in range(600)])
    assert rate == pytest.approx(0.8, abs=0.06)


def test_what_must_stay_stays() -> None:
    keeps = dataclasses.replace(MIDDLES, keeps=lambda part: decode(part).startswith("the"))
    assert rewritten(keeps, encode(TEXT), 3) == encode(TEXT)
    assert rewritten(keeps, encode(TEXT[1:]), 3) != encode(TEXT[1:])
    for short in ([], [EOD], encode("a"), encode("the")):
        assert all(rewritten(MIDDLES, short, key) == short for key in range(20))


class Counting(Middles):
    """Notes what is rewritten."""

    seen: list[tuple[int, ...]] = []  # noqa: RUF012

    def rewritten(self, tokens: IntArray, key: Sequence[int]) -> IntArray:
        self.seen.append(tuple(key))
        return super().rewritten(tokens, key)


class Stored:
    """What Megatron's reader of the tokens does, in memory."""

    documents = tuple([*encode((TEXT * 9)[:length]), EOD] for length in (150, 64, 5, 300))

    def get(self, index: int, offset: int, length: int) -> list[int]:
        return self.documents[index][offset : offset + length]


LENGTHS = np.array([len(one) for one in Stored.documents])
LONGEST = int(LENGTHS[3])


def opened(middles: Middles = MIDDLES, number: int = 0, window: int | None = WINDOW) -> Corpus:
    corpus = RewrittenCorpus.of(Corpus("memory", LENGTHS, None, None), middles, number, window)
    vars(corpus)["_dataset"] = Stored()
    return corpus


@given(document=st.integers(0, 3), cuts=st.lists(st.integers(0, LONGEST), max_size=6))
@pytest.mark.parametrize("window", [WINDOW, None])
def test_any_spans_give_the_same_tokens(window: int | None, document: int, cuts: list[int]) -> None:
    """As slices, context-parallel ranks, packings that cut documents, and resumed runs read."""
    length = int(LENGTHS[document])
    edges = [0, *sorted(min(cut, length) for cut in cuts), length]
    corpus = opened(window=window)
    parts = [corpus.tokens(document, a, b, 2) for a, b in itertools.pairwise(edges)]
    whole = opened(window=window).tokens(document, 0, length, 2)
    assert np.array_equal(np.concatenate(parts), whole)


def test_windows_are_rewritten_alone_and_ends_stay() -> None:
    for document, stored in enumerate(Stored.documents):
        found = opened().tokens(document, 0, len(stored)).tolist()
        assert found[-1] == EOD and EOD not in found[:-1] and len(found) == len(stored)
        for first in range(0, len(stored) - 1, WINDOW):
            window = found[first : first + WINDOW]
            window = window[:-1] if window[-1] == EOD else window
            if PREFIX in window:
                of_window = decode(stored[first : first + len(window)])
                assert of_window.startswith(restored(window))
    assert opened().tokens(3, 0, LONGEST).tolist().count(PREFIX) > 1
    assert opened(window=None).tokens(3, 0, LONGEST).tolist().count(PREFIX) == 1


def test_chance_differs_by_seed_corpus_document_window_and_epoch() -> None:
    def read(number: int = 0, epoch: int = 0, seed: int = 7) -> list[int]:
        corpus = opened(dataclasses.replace(MIDDLES, seed=seed), number)
        return list(corpus.tokens(3, 0, LONGEST, epoch).tolist())

    assert read() == read()
    assert len({tuple(one) for one in (read(), read(1), read(epoch=1), read(seed=8))}) == 4
    repeated = encode("ab" * 200)
    starts = {MIDDLES.rewritten(np.array(repeated), [0, 3, at, 0]).argmax() for at in (0, 64, 128)}
    assert len(starts) > 1


def test_a_window_read_in_parts_is_rewritten_once() -> None:
    counting = Counting(**{f.name: getattr(MIDDLES, f.name) for f in dataclasses.fields(MIDDLES)})
    corpus = opened(counting)
    Counting.seen.clear()
    for start in range(0, LONGEST - 10, 10):
        corpus.tokens(3, start, start + 10)
    assert Counting.seen == [(0, 3, first, 0) for first in range(0, LONGEST - 10, WINDOW)]
