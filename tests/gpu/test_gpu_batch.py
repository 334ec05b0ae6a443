"""Micro-batches are made for a GPU while it computes: the host never waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.workload import MemoryCorpus

from megatron_wlb.plan import Document, MicroBatchPlan, Span
from megatron_wlb.plan.sharding import Sharding

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron's, when it is imported
LENGTHS = (700, 1, 33, 290)
VOCAB_SIZE = 97


def plan() -> MicroBatchPlan:
    documents = [Document(0, i, 0, n, True, 0, i, 0) for i, n in enumerate(LENGTHS)]
    spans = tuple(Span(d, 0, d.length) for d in documents)
    return MicroBatchPlan(0, spans, 1032, 1.0, Sharding("per-document"))


def make(device: str, cp_size: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A rank's batch, and what the loss function says of losses that are all 1."""
    from megatron_wlb.runtime.stepping.batch import BatchBuilder
    from megatron_wlb.runtime.stepping.step import loss_function

    random = np.random.RandomState(0)
    corpus: Any = MemoryCorpus(tuple(random.randint(0, VOCAB_SIZE, n) for n in LENGTHS))
    builder = BatchBuilder([corpus], VOCAB_SIZE, device, cp_rank=cp_size - 1, cp_size=cp_size)
    losses = torch.ones(1, 1032 // cp_size, device=device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        batch = builder.finish(builder.prepare(plan(), first=True, last=True))
        return batch, loss_function(batch, losses)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("cp_size", [1, 4])
def test_a_micro_batch_is_made_without_waiting_for_the_gpu(cp_size: int) -> None:
    expected, expected_loss = make("cpu", cp_size)
    found, found_loss = make("cuda", cp_size)
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    params, other = found.packed_seq_params, expected.packed_seq_params
    assert torch.equal(params.segments.cu_seqlens_k.cpu(), other.segments.cu_seqlens_k)
    if cp_size > 1:
        assert torch.equal(params.gather.rows.cpu(), other.gather.rows)
    assert [x.item() for x in found_loss] == [x.item() for x in expected_loss]
    assert found_loss[1].dtype == torch.int and found_loss[1].device.type == "cuda"
