"""``PREFIX.targets.npy``: what is written is read, what cannot be is refused, streams carry it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.index import write_index
from hypothesis import given
from hypothesis import strategies as st

from megatron_wlb.data.blend import BlendedStream
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.data.targets import RUN, SUFFIX, Targets, runs_of, write_targets
from megatron_wlb.errors import CheckpointError, CorpusError
from megatron_wlb.plan import Document, Span
from megatron_wlb.plan.target_runs import by_sample, weight_of

LENGTHS = [7, 1, 30, 12]
masks = st.lists(st.sampled_from([0, 1, 1, 0.5, 2]), max_size=40)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    write_index(tmp_path / "corpus", LENGTHS)
    return str(tmp_path / "corpus")


def masks_of(lengths: list[int], seed: int = 0) -> list[Any]:
    random = np.random.RandomState(seed)
    return [random.choice([0, 0, 1, 0.25], length) for length in lengths]


@given(masks, st.integers(0, 45), st.integers(0, 45))
def test_runs_weigh_as_their_mask(mask: list[float], first: int, last: int) -> None:
    runs = runs_of(np.array(mask))
    assert weight_of(runs, first, last) == sum(mask[first:last])
    assert all(weight for _, _, weight in runs)
    assert all(a[1] < b[0] or a[2] != b[2] for a, b in pairwise(runs))


@given(masks.filter(lambda mask: any(mask[1:])), st.integers(0, 3))
def test_sample_weighs_one_however_it_is_cut(mask: list[float], cut: int) -> None:
    document = Document(0, 0, 0, len(mask), True, 0, 0, 0, by_sample(runs_of(np.array(mask)), 40))
    at = min(1 + cut, len(mask) - 1)
    spans = [Span(document, 0, at), Span(document, at, len(mask))]
    assert document.num_targets == pytest.approx(1)
    assert sum(span.num_targets for span in spans) == pytest.approx(1)
    assert sum(part.num_targets for part in document.cut(at, 0)) == pytest.approx(1)


def test_written_masks_are_read(prefix: str) -> None:
    assert Corpus.open(prefix).targets is None
    written = masks_of(LENGTHS)
    write_targets(prefix, written)
    targets = Corpus.open(prefix).targets
    assert targets is not None
    for number, mask in enumerate(written):
        runs = targets.of(number)
        read = [weight_of(runs, at, at + 1) for at in range(len(mask))]
        assert read == mask.tolist()
    digest = targets.digest
    write_targets(prefix, masks_of(LENGTHS, seed=1))
    assert Corpus.open(prefix).targets.digest != digest  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([np.ones(7)], ["4 documents of 50 tokens", "masks are 1 of 7"]),
        ([np.ones(n + 1) for n in LENGTHS], ["50 tokens", "54", "as long as it"]),
        ([np.full(n, -1 if n == 30 else 1) for n in LENGTHS], ["document 2", "from 0 on"]),
        ([np.full(n, np.nan) for n in LENGTHS], ["document 0", "nan"]),
        ([np.full(n, 1e39) for n in LENGTHS], ["document 0", "1e+39", "float32"]),
        ([np.full(n, 1e-50 if n == 12 else 1) for n in LENGTHS], ["document 3", "1e-50"]),
    ],
)
def test_masks_that_do_not_fit_are_refused(prefix: str, wrong: Any, words: list[str]) -> None:
    with pytest.raises(CorpusError) as error:
        write_targets(prefix, wrong)
    assert all(word in str(error.value) for word in words)
    assert not Path(prefix + SUFFIX).exists()


@pytest.mark.parametrize(
    "rows",
    [
        [(4, 0, 1, 1)],  # no such document
        [(-1, 0, 1, 1)],
        [(0, 0, 8, 1)],  # beyond its end
        [(0, 3, 3, 1)],
        [(0, 3, 5, 1), (0, 4, 6, 1)],  # twice
        [(2, 0, 1, 1), (0, 0, 1, 1)],  # out of order
        [(0, 0, 1, 0)],
        [(0, 0, 1, np.inf)],
    ],
)
@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_impossible_runs_are_refused(
    prefix: str, rows: list[Any], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_wlb.data.targets._RUNS_AT_ONCE", at_once)
    np.save(prefix + SUFFIX, np.array(rows, dtype=RUN))
    with pytest.raises(CorpusError, match=r"targets\.npy has the run .* write it anew"):
        Corpus.open(prefix)


@pytest.mark.parametrize(
    "content",
    [b"", b"text", np.arange(3), Path("moved.npy")],
    ids=["empty", "text", "numbers", "broken link"],
)
def test_other_files_are_refused(prefix: str, content: Any) -> None:
    if isinstance(content, Path):
        Path(prefix + SUFFIX).symlink_to(content)
    elif isinstance(content, bytes):
        Path(prefix + SUFFIX).write_bytes(content)
    else:
        np.save(prefix + SUFFIX, content)
    with pytest.raises(CorpusError, match="write it anew, or remove it"):
        Corpus.open(prefix)


def stream(targets: list[Targets | None], is_blend: bool = False, **options: Any) -> Any:
    options = {"window": 10, "step_tokens": 25, "seed": 3} | options
    lengths = [np.array(LENGTHS), np.array([20, 3])]
    if is_blend:
        return BlendedStream(lengths, [2.0, 1.0], targets=targets, **options)
    return DocumentStream(lengths, targets=targets, **options)


@pytest.mark.parametrize("is_blend", [False, True], ids=["by size", "blend"])
@pytest.mark.parametrize("window", [10, 64])  # pieces of documents, and whole ones
def test_documents_carry_targets_of_their_corpus(prefix: str, window: int, is_blend: bool) -> None:
    write_targets(prefix, masks_of(LENGTHS))
    targets = Corpus.open(prefix).targets
    assert targets is not None
    given = stream([targets, None], is_blend, window=window)
    documents = [document for _ in range(6) for document in given.next_step()]
    assert {document.corpus for document in documents} == {0, 1}
    for document in documents:
        expected = None if document.corpus else targets.of(document.number)
        assert document.targets == expected


@pytest.mark.parametrize("is_blend", [False, True], ids=["by size", "blend"])
@pytest.mark.parametrize("long_documents", ["split", "truncate"])
def test_samples_count_the_same(prefix: str, long_documents: Any, is_blend: bool) -> None:
    write_targets(prefix, masks_of(LENGTHS, seed=4))  # what is truncated at 12 predicts a target
    targets = Corpus.open(prefix).targets
    assert targets is not None
    given = stream(
        [targets, None], is_blend, long_documents=long_documents, loss_mean="sample", window=12
    )
    totals: dict[tuple[int, int, int], float] = {}
    for _ in range(8):
        for d in given.next_step():
            key = d.corpus, d.number, d.epoch
            totals[key] = totals.get(key, 0) + d.num_targets
    complete = [total for key, total in totals.items() if key[2] == 0]
    kept = {0: 7, 1: 1, 2: 30 if long_documents == "split" else 13, 3: 12}
    silent = [n for n, stop in kept.items() if not weight_of(targets.of(n), 1, stop)]
    assert sorted(complete) == pytest.approx([0.0] * len(silent) + [1.0] * (6 - len(silent)))


def test_stream_resumes_with_the_same_targets_alone(prefix: str) -> None:
    write_targets(prefix, masks_of(LENGTHS))
    targets = Corpus.open(prefix).targets
    first = stream([targets, None], is_blend=True)
    first.next_step()
    state = first.state_dict()
    again = stream([targets, None], is_blend=True)
    again.load_state_dict(state)
    assert [again.next_step() for _ in range(3)] == [first.next_step() for _ in range(3)]
    write_targets(prefix, masks_of(LENGTHS, seed=1))
    other = Corpus.open(prefix).targets
    for said, kwargs in {
        r"corpus 0 has other masks there and here \(.targets.npy\); resume with the same": {
            "targets": [other, None]
        },
        "corpus 0 has masks there alone": {"targets": [None, None]},
        "corpus 1 has masks here alone": {"targets": [targets, other]},
        "--wlb-loss-mean .* sample here; resume with the same": {
            "targets": [targets, None], "loss_mean": "sample"
        },
    }.items():  # fmt: skip
        with pytest.raises(CheckpointError, match=said):
            stream(is_blend=True, **kwargs).load_state_dict(state)  # type: ignore[arg-type]
