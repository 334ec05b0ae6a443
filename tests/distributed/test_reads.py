"""What one rank reads otherwise, or receives otherwise than it was sent, is named."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import WORKLOAD, Layout, further
from helpers.plans import scatter_for, sliced_for
from helpers.ranks import build_runner

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import StepPlan

SLICED = "slim"
PP2, TP2, CP2 = Layout("llama", 4, pp=2), Layout("llama", 2, tp="2sp"), Layout("llama", 4, cp=2)
DP2, PP2_CP2 = Layout("llama", 2, dp=2), Layout("llama", 2, pp=2, cp=2)
PP2_VPP2, PP2_TP2 = Layout("llama", 4, pp=2, vpp=2), Layout("llama", 2, pp=2, tp="2")
AHEAD = Layout("deepseek", 2, pp=2)


def plan_of(layout: Layout, step: int, packing: str) -> StepPlan:
    make = sliced_for if packing == SLICED else scatter_for
    return make(layout.config, WORKLOAD, layout.world_size, step)


def damaged(stored: Any, document: int) -> Any:
    """``BatchBuilder._stored`` of a copy of the corpus in which one document is another."""

    def read(span: Any, start: int, stop: int) -> Any:
        tokens = stored(span, start, stop)
        return tokens ^ 1 if span.document.number == document else tokens

    return read


def error_of_reads(
    layout: Layout, packing: str, odd_rank: int | None, num_steps: int = 2
) -> tuple[int, str] | None:
    """The step that raised, and its error; the last one is that of a checkpoint."""
    import torch.distributed as dist

    runner = build_runner(layout.config, WORKLOAD)
    if dist.get_rank() == odd_rank:
        runner.batches._stored = damaged(runner.batches._stored, 3)
    number = 0
    try:
        for number in range(num_steps):
            for chunk in runner.model.chunks:
                chunk.zero_grad_buffer()
            runner.run(plan_of(layout, number, packing))
        number += 1
        runner.compare_reads()
    except PlanError as error:
        return number, str(error)
    return None


def run_with_a_changed_message(layout: Layout, packing: str, sender: int, number: int) -> None:
    """A run in debug mode; one number of one tensor that ``sender`` sends is another underway."""
    import torch
    import torch.distributed as dist

    runner = build_runner(layout.config, WORKLOAD, verify_shapes=True)
    stock, sent = dist.ProcessGroup.send, []

    def send(group: Any, tensors: Any, peer: int, tag: int) -> Any:
        if tensors[0].is_floating_point() and tensors[0].dim() == 3:
            sent.append(tensors)
            if len(sent) == number and dist.get_rank() == sender:
                tensors = [tensors[0].detach().clone()]
                tensors[0][0, 0, 0] += 0.5
                sent.append(tensors)  # gloo takes it back with its last reference
        return stock(group, tensors, peer, tag)

    with mock.patch.object(dist.ProcessGroup, "send", send):
        for chunk in runner.model.chunks:
            chunk.zero_grad_buffer()
        runner.run(plan_of(layout, 0, packing))
    torch.distributed.barrier()


@pytest.mark.parametrize(
    ("layout", "packing", "odd_rank"),
    [
        (PP2, "", 1),
        (PP2, SLICED, 0),
        (TP2, "", 1),
        (PP2_CP2, "", 2),
        further(PP2_VPP2, "", 1),
        further(PP2_TP2, "", 3),
        further(PP2_CP2, SLICED, 1),
        further(AHEAD, "", 1),
    ],
    ids=str,
)
def test_token_that_one_rank_reads_otherwise_is_named(
    gloo: GlooPool, layout: Layout, packing: str, odd_rank: int
) -> None:
    found = gloo.run(layout.world_size, error_of_reads, layout, packing, odd_rank, timeout_s=60)
    named = (
        r"tokens \d+ to \d+ of document 3 of corpus 0, in micro-batch \d, with crc32 [0-9a-f]{8}"
    )
    for told in found:
        assert told is not None, "it trained on"
        number, error = told
        assert number == 1, "one step later"
        assert error == found[0][1]
        assert error.startswith("step 0: ranks that must read the same tokens read others: rank")
        assert re.search(named, error)
        assert f"rank {odd_rank} (host" in error


def test_ranks_that_read_the_same_go_on(gloo: GlooPool) -> None:
    for layout, packing in ((PP2_CP2, SLICED), (PP2_TP2, ""), (AHEAD, "")):
        assert gloo.run(layout.world_size, error_of_reads, layout, packing, None) == [None] * (
            layout.world_size
        )


@pytest.mark.parametrize("layout", [DP2, CP2], ids=str)
def test_token_that_one_rank_alone_reads_is_contradicted_by_nobody(
    gloo: GlooPool, layout: Layout
) -> None:
    """As the docs say."""
    assert gloo.run(2, error_of_reads, layout, "", 1) == [None, None]


def test_reads_are_compared_before_they_are_saved(gloo: GlooPool) -> None:
    for told in gloo.run(2, error_of_reads, PP2, "", 1, 1):
        assert told is not None and told[0] == 1
        assert told[1].startswith("step 0: ranks that must read the same tokens read others")


@pytest.mark.parametrize(
    ("layout", "packing", "sender", "what"),
    [
        (PP2, "", 0, "activation of micro-batch 1, chunk 0"),
        further(PP2, "", 1, "gradient of micro-batch 1, chunk 0"),
        (PP2, SLICED, 0, "activation of micro-batch 1, chunk 0"),
        further(PP2, SLICED, 1, r"gradient of micro-batch \d, chunk 0"),
        further(PP2_VPP2, "", 0, r"activation of micro-batch 1, chunk \d"),
        further(PP2_TP2, "", 1, "activation of micro-batch 1, chunk 0"),
    ],
    ids=str,
)
def test_message_that_changes_underway_is_named(
    gloo: GlooPool, layout: Layout, packing: str, sender: int, what: str
) -> None:
    with pytest.raises(PlanError) as caught:
        gloo.run(
            layout.world_size, run_with_a_changed_message, layout, packing, sender, 2, timeout_s=60
        )
    contents = r"\d+ numbers with sum \S+ and crc32 [0-9a-f]{8}"
    peer = (sender + layout.world_size // 2) % layout.world_size
    said = f"step 0: the {what}: rank {sender} sent {contents}, rank {peer} received {contents};"
    assert re.match(said, str(caught.value)), caught.value
