"""With sliding windows every layout computes what one process does, each document alone.

Loss, every element of every gradient and the weights after some steps, as in ``test_oracle.py``,
whose one process masks what is out of reach. And faults that must not pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
from helpers.gloo import GlooPool
from helpers.layouts import (
    FULL,
    HEAD_GROUPS,
    KEEP,
    SELECTIVE,
    WORKLOAD,
    Differences,
    Layout,
    further,
)
from helpers.ranks import build_runner, scatter_for, sliced_for

CP = Layout("sliding", 4, cp=2, sharding="per-document", extra=HEAD_GROUPS)
CASES = [
    Layout("sliding", 5),
    Layout("sliding-list", 4, pp=2, vpp=2, extra=FULL),
    CP,
    further(Layout("sliding-skip", 4, cp=2, sharding="per-sequence", extra=KEEP)),
    Layout("sliding-skip", 3, tp="2sp", cp=2, sharding="hybrid", extra=SELECTIVE),
    further(
        Layout("sliding", 3, pp=2, cp=2, sharding="per-document", extra="--wlb-cp-reduce-in-fp32")
    ),
]
IN_SLICES = [
    Layout("sliding", 1),
    Layout("sliding-list", 1, pp=2, cp=2, sharding="per-document", extra=f"{HEAD_GROUPS} {FULL}"),
    further(Layout("sliding-skip", 1, cp=2, sharding="per-sequence", extra=KEEP)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_windows_compute_what_one_process_does(wrong: Differences, case: Layout) -> None:
    assert wrong(case) == []


@pytest.mark.parametrize("case", IN_SLICES, ids=str)
def test_slices_with_windows_compute_what_one_process_does(
    wrong: Differences, case: Layout
) -> None:
    assert wrong(case, plan_for=sliced_for) == []


def test_ranks_together_with_windows_compute_what_one_process_does(wrong: Differences) -> None:
    from test_merge import merged_for

    case = Layout("sliding-skip", 1, dp=2)
    assert wrong(case, plan_for=merged_for) == []


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
    """As far as the cases above need it: in some micro-batches less, and in none more."""
    for found in gloo.run(2, exchanged_tokens, CP):
        assert all(num == full >= sent > 0 for num, full, sent in found)
        assert sum(sent for _, _, sent in found) < 0.7 * sum(num for num, _, _ in found)


# What must not pass. Each breaks the run of a layout that is equal to the oracle above.


@contextlib.contextmanager
def reach_one_key_further(runner) -> Iterator[None]:
    runner.batches.reach_tokens += 1
    yield


@contextlib.contextmanager
def slide_in_another_layer(runner) -> Iterator[None]:
    for gpt in runner.model.gpts:
        core = gpt.decoder.layers[2].self_attention.core_attention
        assert core.reach_tokens is None
        core.reach_tokens = 13
    yield


@contextlib.contextmanager
def send_the_tokens_beside(runner) -> Iterator[None]:
    from megatron_wlb.runtime.gpt.attention import context_parallel

    right = context_parallel.KeyGather.of

    def wrong(layout, *args, **options):
        gather = right(layout, *args, **options)
        if gather.sent is None:
            return gather
        return dataclasses.replace(gather, sent=(gather.sent + 1) % len(layout.tokens))

    with mock.patch.object(context_parallel.KeyGather, "of", wrong):
        yield


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (CASES[0], reach_one_key_further),
        (Layout("sliding-skip", 3), slide_in_another_layer),
        (CP, reach_one_key_further),
        (CP, send_the_tokens_beside),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_other_windows_differ_from_the_oracle(
    wrong: Differences, case: Layout, fault: Callable[..., object]
) -> None:
    found = wrong(case, fault)
    assert any(line.startswith("step 0: loss") for line in found)
    assert any(line.startswith("step 0: gradient of") for line in found)
