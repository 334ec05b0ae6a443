"""What building batches leaves behind, and what batches of slices hold."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers.gloo import GlooPool

from megatron_wlb.plan import MicroBatchPlan, Span
from megatron_wlb.plan.sharding import Sharding
from megatron_wlb.settings.command_line import parse

FLAGS = (
    "--hidden-size 32 --num-attention-heads 4 --num-layers 4 --seq-length 64 --vocab-size 59 "
    "--make-vocab-size-divisible-by 32 --global-batch-size 3"
)


def kept_after_steps() -> list[int]:
    """Micro-batches whose tensors are alive after each of three steps of three.

    The steps' micro-batches have other numbers, as those of a data-parallel rank have.
    """
    from helpers.plans import scatter_for
    from helpers.ranks import build_runner
    from helpers.workload import make_workload

    from megatron_wlb.runtime.gpt.attention.document_attention import PlanSeqParams

    config = parse(FLAGS.split())
    workload = make_workload([[8, 30, 5, 9]] * 3, vocab_size=59)
    runner = build_runner(config, workload)
    kept = []
    for number in range(3):
        plan = scatter_for(config, workload, 1, number)
        ranks = [
            tuple(dataclasses.replace(m, index=3 * number + m.index) for m in rank)
            for rank in plan.micro_batches
        ]
        runner.run(dataclasses.replace(plan, micro_batches=tuple(ranks)))
        gc.collect()
        kept.append(sum(isinstance(found, PlanSeqParams) for found in gc.get_objects()))
    return kept


def sliced_rows(cp_size: int, cp_rank: int) -> dict[str, Any]:
    """Of the local tokens of slices and whole documents: token, label, position and document.

    ``-1`` where a token counts in no loss. The documents are a stored one of 30 tokens in two
    pieces, the first of which is cut, one of 25 that is cut, and a whole one of 7.
    """
    from helpers.workload import make_workload

    from megatron_wlb.runtime.gpt.attention.rope import DocumentRotaryEmbedding
    from megatron_wlb.runtime.stepping.batch import BatchBuilder

    workload = make_workload([[(20, 10), 25, 7]], vocab_size=59)
    first, second, other, short = workload.steps[0]
    units = [[Span(first, *cut)] for cut in pairwise((0, 1, 12, 20))]
    units += [[Span(other, *cut)] for cut in pairwise((0, 24, 25))]
    units[2] += [Span(second, 0, 10)]
    units[4] += [Span(short, 0, 7)]
    corpora: Any = [workload.corpus]
    builder = BatchBuilder(corpora, 59, "cpu", cp_rank=cp_rank, cp_size=cp_size)
    rows, rotary = [], []
    for index, spans in enumerate(units):
        length = -(-sum(span.length for span in spans) // 8) * 8
        plan = MicroBatchPlan(index, tuple(spans), length, 1.0, Sharding("per-document"))
        batch = builder.prepare(plan, first=True, last=True)
        assert batch.tokens is not None and batch.labels is not None
        assert batch.loss_mask is not None and batch.num_targets == batch.loss_mask.sum()
        params = batch.packed_seq_params
        assert params.num_tokens == batch.tokens.shape[1] == length // cp_size
        cut = params.slice
        assert cut is not None and cut.store is builder.slices
        assert (cut.document, cut.start, cut.stop, cut.length) == (
            spans[0].document.key, spans[0].start, spans[0].stop, spans[0].document.length
        )  # fmt: skip
        labels = batch.labels.where(batch.loss_mask == 1, -1)
        owner = np.repeat(
            [*(s.document.arrival for s in spans), -1],
            [*(s.length for s in spans), length - plan.length],
        )
        local, _ = builder._latest[index][1:]
        rows += zip(
            owner[local].tolist(),
            batch.position_ids[0].tolist(),
            batch.tokens[0].tolist(),
            labels[0].tolist(),
            strict=True,
        )
        embedding = DocumentRotaryEmbedding(mock_rotary())
        embedding(embedding.get_rotary_seq_len(None, None, None, None, params))
        rotary.append(embedding.inner.asked)
    expected = []
    for document, (tokens, labels) in zip(workload.steps[0], workload.examples(0), strict=True):
        at = range(document.length)
        expected += [(document.arrival, i, int(tokens[i]), int(labels[i])) for i in at]
    return {"rows": [row for row in rows if row[0] >= 0], "expected": expected, "rotary": rotary}


def mock_rotary() -> Any:
    import torch

    class Angles(torch.nn.Module):
        def forward(self, length: int, packed_seq: bool) -> Any:
            self.asked = length
            return torch.arange(length)

    return Angles()


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_slices_have_the_positions_and_labels_of_their_document(
    gloo: GlooPool, cp_size: int
) -> None:
    """A label may be the next slice's first token; positions go on where the last slice stops."""
    found, rotary = [], []
    for rank in range(cp_size):
        (of_rank,) = gloo.run(1, sliced_rows, cp_size, rank)
        found += of_rank["rows"]
        rotary.append(of_rank["rotary"])
    assert sorted(found) == sorted(of_rank["expected"]) and len(found) == 62
    # Angles of a whole document's positions, for any part of it.
    assert [max(lengths) for lengths in zip(*rotary, strict=True)] == [8, 16, 32, 32, 32]


def test_a_step_keeps_no_tensors_of_the_one_before(gloo: GlooPool) -> None:
    (kept,) = gloo.run(1, kept_after_steps)
    assert max(kept) <= 3


class CountingCorpus:
    """A corpus in memory that notes how many tokens are read, and in which thread."""

    def __init__(self, corpus: Any) -> None:
        self.corpus, self.prefix = corpus, corpus.prefix
        self.num_read = 0
        self.threads: set[str] = set()

    def tokens(self, index: int, start: int, stop: int, epoch: int) -> Any:
        self.num_read += stop - start
        self.threads.add(threading.current_thread().name)
        return self.corpus.tokens(index, start, stop, epoch)


def alive() -> list[str]:
    """The threads that build batches."""
    return [t.name for t in threading.enumerate() if t.name.startswith("wlb-batches")]


LENGTHS = (96, 1, 40, 23)


def read_ahead(cp_size: int, cp_rank: int, first: bool, last: bool) -> dict[str, Any]:
    """What a rank reads of three micro-batches, and whether they are those built at once."""
    import torch
    from helpers.workload import make_workload

    from megatron_wlb.runtime.stepping.batch import BatchBuilder, Chunk

    workload = make_workload([LENGTHS] * 3, vocab_size=59)
    plans = [
        MicroBatchPlan(n, tuple(Span(d, 0, d.length) for d in step), 168, 1.0, Sharding(kind))
        for n, (step, kind) in enumerate(
            zip(workload.steps, ("per-document", "per-sequence", "per-document"), strict=True)
        )
    ]
    corpus: Any = CountingCorpus(workload.corpus)
    builder = BatchBuilder([corpus], 59, "cpu", cp_rank=cp_rank, cp_size=cp_size)
    with builder.ahead(plans, [Chunk(first, last)]) as (batches,):
        found = list(batches)
    num_read, threads = corpus.num_read, sorted(corpus.threads)
    same = []
    for plan, batch in zip(plans, found, strict=True):
        again = builder.prepare(plan, first=first, last=last)
        assert again.num_targets == batch.num_targets
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            one, other = getattr(batch, name), getattr(again, name)
            same.append(one is other is None or torch.equal(one, other))
    return {"read": num_read, "threads": threads, "same": all(same), "alive": alive()}


@pytest.mark.parametrize("cp_size", [1, 4])
def test_a_rank_reads_its_share_of_the_tokens_in_another_thread(
    gloo: GlooPool, cp_size: int
) -> None:
    whole = 3 * sum(LENGTHS)
    with_labels = without = 0
    for rank in range(cp_size):
        (found,) = gloo.run(1, read_ahead, cp_size, rank, True, True)
        assert found["threads"] == ["wlb-batches_0"] and found["alive"] == [] and found["same"]
        # A label may be the first token behind a run: at most two runs a document.
        assert found["read"] <= whole / cp_size + 3 * 2 * len(LENGTHS)
        with_labels += found["read"]
        (embeds,) = gloo.run(1, read_ahead, cp_size, rank, True, False)
        without += embeds["read"]
        (neither,) = gloo.run(1, read_ahead, cp_size, rank, False, False)
        assert neither["read"] == 0 and neither["same"]
    assert without == whole <= with_labels


def fail_ahead(at: int) -> dict[str, Any]:
    """Batches of six micro-batches, of which the ``at``-th has a token outside the vocabulary."""
    from helpers.workload import make_workload

    from megatron_wlb.errors import CorpusError
    from megatron_wlb.runtime.stepping.batch import LOOK_AHEAD, BatchBuilder, Chunk

    workload = make_workload([(8,)] * 6, vocab_size=59)
    workload.corpus.stored[at][3] = 59
    corpus: Any = CountingCorpus(workload.corpus)
    plans = [
        MicroBatchPlan(n, (Span(step[0], 0, 8),), 8, 1.0) for n, step in enumerate(workload.steps)
    ]
    builder = BatchBuilder([corpus], 59, "cpu")
    taken, most = 0, 0
    error = ""
    try:
        with builder.ahead(plans, [Chunk(True, False)]) as (batches,):
            for _ in batches:
                taken += 1
                time.sleep(0.05)
                most = max(most, corpus.num_read // 8 - taken)
    except CorpusError as caught:
        error = str(caught)
    assert most <= LOOK_AHEAD
    return {"taken": taken, "error": error, "alive": alive(), "ahead": most}


def test_an_error_ahead_is_raised_where_the_batch_is_taken(gloo: GlooPool) -> None:
    (found,) = gloo.run(1, fail_ahead, 3, timeout_s=30)
    assert found["taken"] == 3 and found["ahead"] == 2
    assert "has token 59, but the vocabulary has 59" in found["error"]
    assert found["alive"] == []


def leave_early() -> list[str]:
    """Threads that are left when the one who takes batches fails."""
    from helpers.workload import make_workload

    from megatron_wlb.runtime.stepping.batch import BatchBuilder, Chunk

    workload = make_workload([(8,)] * 6, vocab_size=59)
    plans = [
        MicroBatchPlan(n, (Span(step[0], 0, 8),), 8, 1.0) for n, step in enumerate(workload.steps)
    ]
    corpora: Any = [workload.corpus]
    builder = BatchBuilder(corpora, 59, "cpu")
    with pytest.raises(ZeroDivisionError), builder.ahead(plans, [Chunk(True, True)] * 2) as chunks:
        next(chunks[1])
        _ = 1 / 0
    return alive()


def test_the_thread_ends_with_a_step_that_fails(gloo: GlooPool) -> None:
    assert gloo.run(1, leave_early, timeout_s=30) == [[]]
