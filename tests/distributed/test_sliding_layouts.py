"""With sliding windows ranks send only what others see."""

from __future__ import annotations

from helpers.gloo import GlooPool
from helpers.layouts import (
    HEAD_GROUPS,
    WORKLOAD,
    Layout,
)
from helpers.plans import scatter_for
from helpers.ranks import build_runner

CP = Layout("sliding", 4, cp=2, sharding="per-document", extra=HEAD_GROUPS)


def exchanged_tokens(case: Layout) -> list[tuple[int, int, int]]:
    """For each micro-batch of the first step: T/CP, tokens sent in layers without a window and with
    it; what the micro-batches hold is local.
    """
    import torch

    runner = build_runner(case.config, WORKLOAD)
    plan = scatter_for(case.config, WORKLOAD, torch.distributed.get_world_size(), 0)
    found = []
    for micro_batch in plan:
        params = runner.batches.prepare(micro_batch, first=False, last=False).packed_seq_params
        sliding = params.sliding
        cp_size = params.gather.layout.num_tokens // params.num_tokens
        assert sum(sliding.segments.lengths_k) <= sum(params.segments.lengths_k)
        sent = [p.gather.num_received // cp_size for p in (params, sliding)]
        found.append((params.num_tokens, *sent))
    return found


def test_ranks_send_only_what_others_see(gloo: GlooPool) -> None:
    """In some micro-batches less, and in none more."""
    for found in gloo.run(2, exchanged_tokens, CP):
        assert all(num == full >= sent > 0 for num, full, sent in found)
        assert sum(sent for _, _, sent in found) < 0.7 * sum(num for num, _, _ in found)
