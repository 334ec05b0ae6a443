"""Every layout computes what one process computes with each document alone.

Loss, every element of every gradient, and the weights after several optimizer steps, against
:mod:`helpers.oracle`: of whole documents, of slices, of documents that ranks run together, with
each kind of layer, mask and loss. Faults that must not pass are in ``test_faults.py``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers.gloo import GlooPool
from helpers.layouts import (
    FULL,
    GATHER,
    GROUP,
    HEAD_GROUPS,
    KEEP,
    LATENT_WORKLOAD,
    MODELS,
    NO_P2P_OVERLAP,
    OVERLAP,
    OWN_LOSS,
    OWN_TREES,
    SELECTIVE,
    SHARDED,
    TREES,
    VERIFY_SHAPES,
    WORKLOAD,
    Differences,
    Layout,
    Oracle,
    further,
)  # fmt: skip
from helpers.plans import (
    Changed,
    PlanFor,
    all_hosted,
    divided,
    divided_for,
    half_hosted,
    half_recomputed,
    merged_for,
    mlps_recomputed,
    one_path_for,
    recomputed_for,
    scatter_for,
    shared_for,
    sliced_for,
    trees_for,
    varying_for,
)
from helpers.ranks import Fault, train
from helpers.within import (
    experts_again,
    meeting,
    projecting_again,
    that_waits_for_each_gather,
    with_few_slabs,
    with_first_micro_batches_told,
    with_head_start,
    with_nan_rows,
    with_small_slabs,
    with_some_mlps_recomputed,
    with_some_recomputed,
)
from helpers.workload import Workload, make_workload

from megatron_wlb.runtime.stepping.step import check_chains


class Case(NamedTuple):
    """A layout, the plans that it runs, and what is watched or done around them."""

    layout: Layout
    plan_for: PlanFor = scatter_for
    within: Fault = nullcontext
    workload: Workload = WORKLOAD

    def __str__(self) -> str:
        parts = [str(self.layout), self.plan_for.__name__, getattr(self.within, "__name__", "")]
        known = [name for name, given in WORKLOADS.items() if given is self.workload]
        return " ".join([*parts, *known]).strip()


BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
ONE_AHEAD = "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.5"
TWO_AHEAD = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.7"
ETP1, ETP2 = (f"--expert-tensor-parallel-size {size}" for size in (1, 2))
UNLIMITED = "--moe-aux-loss-coeff 0 0 --moe-z-loss-coeff 0"  # Losses of tokens are not of samples.
MERGES = "--wlb-packing slim"  # whose settings of attention over ranks count without CP, too
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
ACCOUNTS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
STAGES = "--pipeline-model-parallel-layout"
FEW = "--num-layers 2"
FOUR_HEADS = "--linear-num-key-heads 4"
MASKED, BY_SAMPLE = WORKLOAD.masked(seed=3), WORKLOAD.masked(seed=4, by_sample=True)
MASKED_TREES = TREES.masked(seed=8)
WORKLOADS = {
    "masked": MASKED, "by-sample": BY_SAMPLE, "own-loss": OWN_LOSS, "latents": LATENT_WORKLOAD,
    "trees": TREES, "own-loss-trees": OWN_TREES, "masked-trees": MASKED_TREES,
}  # fmt: skip
hosted_for, all_hosted_for = Changed(sliced_for, (half_hosted,)), Changed(sliced_for, (all_hosted,))

WHOLE = [
    Layout("llama", 5),
    Layout("gpt2", 4, extra=FULL),
    Layout("gpt2", 3, dp=2, extra=GATHER),
    Layout("mixed", 4, dp=2, extra=SHARDED),
    Layout("mixed", 3, tp="2", extra=SELECTIVE),
    Layout("gpt2", 3, tp="2sp"),
    Layout("llama", 5, pp=2),
    Layout("gpt2", 1, pp=2),
    Layout("mixed", 6, pp=2, vpp=2, extra=FULL),
    Layout("gpt2", 5, pp=2, vpp=2, extra=f"{NO_P2P_OVERLAP} {GROUP} 3"),
    Layout("gpt2", 2, tp="2", dp=2, extra=OVERLAP),
    Layout("llama", 3, tp="2sp", dp=2, extra=f"{SHARDED} {OVERLAP}"),
    Layout("gpt2", 5, pp=2, dp=2, extra=OVERLAP),
    Layout("llama", 4, pp=2, vpp=2, dp=2, extra=GATHER),
    Layout("llama", 3, pp=2, tp="2"),
    Layout("mixed", 5, pp=2, tp="2sp", extra=SELECTIVE),
    Layout("mixed", 4, pp=2, vpp=2, tp="2"),
    Layout("llama", 4, pp=2, vpp=2, tp="2sp", extra=NO_P2P_OVERLAP),
    Layout("gpt2", 6, pp=4),
    Layout("llama", 3, pp=4),
    Layout("mixed", 8, pp=4, vpp=2),
    Layout("llama", 4, pp=4, vpp=2, tp="2sp", extra=SELECTIVE),
    Layout("gpt2", 5, pp=4, vpp=2, dp=2, extra=f"{SHARDED} {GROUP} 5"),
    Layout("mixed", 5, pp=4, tp="2"),
    # Context parallelism.
    Layout("llama", 5, cp=2, sharding="per-document", extra=HEAD_GROUPS),
    Layout("yarn", 3, cp=4, sharding="hybrid"),
    Layout("llama-3", 3, cp=2, tp="2", sharding="adaptive", extra=SELECTIVE),
    Layout("mixed", 4, pp=2, vpp=2, cp=2, dp=2, sharding="per-document", extra=SHARDED),
    Layout("llama", 4, pp=2, tp="2sp", cp=2, sharding="hybrid", extra=FULL),
    Layout("gpt2", 5, pp=4, cp=2, sharding="per-document", extra=f"{VERIFY_SHAPES} {HEAD_GROUPS}"),
]
"""Dense models, of whole documents."""
SLICED = [
    Layout("llama", 1),
    # Megatron's recipes name a TP of experts where there are none.
    Layout("gpt2", 1, dp=2, extra=f"{OVERLAP} {ETP2}"),
    Layout("llama", 1, pp=2, extra=SELECTIVE),
    Layout("gpt2", 1, pp=2, extra=f"{BLOCK} {VERIFY_SHAPES}"),
    Layout("gpt2", 1, pp=2, dp=2, extra=GATHER),
    Layout("llama", 1, pp=4),
    # Several chunks; two ranks are each other's next and last.
    Layout("llama", 2, pp=2, vpp=2, extra=f"{FULL} {VERIFY_SHAPES}"),
    # Context parallelism.
    Layout("llama", 1, cp=2, sharding="per-document", extra=HEAD_GROUPS),
]
DP4 = Layout("gpt2", 1, dp=4, extra=f"{SELECTIVE} {OVERLAP} {MERGES} {HEAD_GROUPS} {KEEP}")
MERGED = [
    Layout("gpt2", 1, dp=2, extra=f"{OVERLAP} {SHARDED}"),
    DP4,
    Layout("gpt2", 1, dp=2, pp=2, extra=f"{OVERLAP} {SHARDED} {FULL}"),
    Layout("llama", 1, dp=2, cp=2, extra=HEAD_GROUPS),
    # In step 1 the first replica runs nothing else.
    Layout("gpt2", 2, dp=2, pp=2, vpp=2, extra=OVERLAP),
]
"""Of documents that several replicas run together, and of slices."""
SLIDING = Layout("sliding-skip", 1, cp=2, sharding="per-document", extra=HEAD_GROUPS)
EP4 = Layout("moe-aux", 3, dp=4, ep=4, extra=f"{SHARDED} {OVERLAP}")
DEEPSEEK = Layout("deepseek", 4, pp=2, vpp=2, dp=2, ep=2)
LATENTS = Layout("latent-yarn", 3, cp=2, sharding="per-document", extra=f"{FEW} {GATHER}")


def each(layouts: Iterable[Layout], *given: Any, **named: Any) -> list[Case]:
    return [Case(layout, *given, **named) for layout in layouts]


CASES = [
    *each(WHOLE),
    *each(SLICED[:-1], sliced_for),
    *each(MERGED, merged_for),
    # Of unlike numbers of micro-batches from step to step.
    *each([
        Layout("llama", 3, pp=2),
        Layout("gpt2", 4, pp=2, vpp=2, dp=2, extra=f"{SHARDED} {OVERLAP}"),
        Layout("mixed", 6, pp=2, vpp=2, extra=f"{GROUP} 3"),
        Layout("mixed", 2, pp=4, tp="2sp"),
    ], varying_for),
    # Stages of unlike numbers of layers, some without any.
    *each([
        Layout("llama", 5, pp=4, extra=f"--num-layers 6 {FIRST} 1 {LAST} 1"),
        Layout("mixed", 3, pp=2, dp=2, extra=f"{LAST} 1 {SHARDED} {OVERLAP}"),
        Layout("mixed", 4, pp=2, vpp=2, extra=f"--num-layers 6 {ACCOUNTS}"),
        Layout("llama", 4, pp=2, extra=f"{STAGES} Et|t|tt|L {FULL}"),
        Layout("gpt2", 4, pp=2, dp=2, extra=f"{STAGES} E|tt||ttL {GATHER}"),
        Layout("gpt2", 4, pp=4, extra=f"{STAGES} E|tt|tt|L"),
    ]),
    Case(Layout("gpt2", 4, pp=4, extra=f"{STAGES} E|tt|tt|L"), sliced_for),
    Case(Layout("llama", 4, pp=2, extra=f"{STAGES} Et|t|tt|L"), sliced_for),
    # Little is kept of some micro-batches.
    Case(Layout("llama", 2, pp=2, vpp=2, extra=GATHER), recomputed_for, with_some_recomputed),
    Case(Layout("llama", 2, pp=2, vpp=2, extra=GATHER), Changed(sliced_for, (mlps_recomputed,)),
         with_some_mlps_recomputed),
    Case(Layout("llama", 2, pp=2, vpp=2, extra=GATHER), hosted_for, with_small_slabs),
    Case(Layout("llama", 1, cp=2, tp="2sp", sharding="per-document"),
         Changed(sliced_for, (half_hosted, divided)), with_small_slabs),
    Case(Layout("llama", 1), all_hosted_for, with_few_slabs),
    # Context-parallel ranks divide keys and values of slices.
    Case(SLICED[-1], divided_for),
    Case(SLICED[-1], sliced_for, with_nan_rows),
    # Layers of a sliding window take fewer rows than the full one before them begins to gather.
    Case(SLIDING, divided_for, that_waits_for_each_gather),
    Case(Layout("llama", 1, pp=2, cp=2, sharding="hybrid", extra=HEAD_GROUPS), sliced_for,
         with_head_start),
    # Any flag that says so stands for FP8's delayed scales, which need a GPU.
    Case(Layout("llama", 4, pp=2, dp=2, extra=f"--use-torch-fsdp2 {FULL}"), sliced_for, meeting),
    Case(Layout("gpt2", 1, pp=2), sliced_for, with_first_micro_batches_told),
    # Sliding windows.
    *each([
        Layout("sliding", 5),
        Layout("sliding-list", 4, pp=2, vpp=2, extra=FULL),
        Layout("sliding", 4, cp=2, sharding="per-document", extra=HEAD_GROUPS),
        Layout("sliding-skip", 3, tp="2sp", cp=2, sharding="hybrid", extra=SELECTIVE),
    ]),
    Case(Layout("sliding", 1), sliced_for),
    Case(Layout("sliding-skip", 1, dp=2), merged_for),
    # Multi-latent attention.
    *each([
        Layout("latent-yarn", 2, tp="2", extra=f"{FEW} {FULL}"),
        Layout("latent", 3, pp=2, extra=FEW),
        Layout("latent-yarn", 3, tp="2sp", cp=2, sharding="per-document", extra=f"{FEW} {KEEP}"),
        Layout("latent", 3, tp="2", cp=2, sharding="hybrid", extra=f"{FEW} {SELECTIVE}"),
    ], workload=LATENT_WORKLOAD),
    Case(LATENTS, within=projecting_again, workload=LATENT_WORKLOAD),
    *each([
        Layout("latent", 1, pp=2, extra=FEW),
        Layout("latent-yarn", 1, tp="2sp", cp=2, extra=f"{FEW} {KEEP}"),
    ], sliced_for, workload=LATENT_WORKLOAD),
    # Layers that predict further ahead.
    *each([
        Layout("llama", 5, extra=TWO_AHEAD),  # untied
        Layout("mixed", 4, dp=2, extra=f"{ONE_AHEAD} {SHARDED}"),  # tied
        Layout("llama", 4, pp=2, vpp=2, extra=ONE_AHEAD),
        Layout("llama", 3, tp="2sp", extra=TWO_AHEAD),
        Layout("mixed", 3, tp="2", extra=f"{TWO_AHEAD} {FULL}"),
        Layout("mixed", 4, pp=2, cp=2, extra=TWO_AHEAD),
        Layout("sliding", 3, extra=TWO_AHEAD),
    ]),
    Case(Layout("mixed", 3, pp=2, extra=TWO_AHEAD), sliced_for),
    # Layers of experts.
    *each([
        EP4,
        Layout("moe-aux", 2, tp="2sp", cp=2, ep=4, extra=ETP1),
        Layout("moe-seq", 3, tp="2sp", dp=2, extra=f"{ETP1} {SHARDED}"),  # whole ones, on all ranks
        dataclasses.replace(DEEPSEEK, extra=FULL),
        Layout("deepseek", 3, tp="2sp", cp=2, ep=2, sharding="per-document"),
    ]),
    Case(Layout("moe-seq", 4, pp=2, dp=2, ep=2), within=experts_again),
    Case(Layout("moe-seq", 4, pp=2, dp=2, ep=2, extra=FULL), sliced_for),
    *each([
        Layout("moe-seq", 1, dp=2),  # all experts in each replica
        Layout("moe-seq", 1, pp=2, dp=2, ep=2, extra=FULL),
    ], merged_for),
    # Layers that carry a state.
    *each([
        Layout("delta", 3, tp="2sp", extra=FULL),
        Layout("states", 3, cp=2, ep=2, sharding="per-document"),
    ]),
    *each([
        Layout("delta", 3, pp=2, dp=2, extra=GATHER),
        Layout("delta", 3, tp="2sp", cp=2, extra=FOUR_HEADS),
        Layout("mamba", 3, pp=2, tp="2sp", extra=FULL),
        Layout("mamba", 3, cp=2, sharding="per-document"),
        Layout("states", 4, pp=2, vpp=2, dp=2, ep=2),
    ], sliced_for),
    Case(Layout("states", 4, pp=2, vpp=2), hosted_for),
    Case(Layout("mamba", 3, pp=4), recomputed_for),
    # Tokens that are no targets, or count differently; a loss of one's own.
    *each([
        Layout("mixed", 4, dp=2, extra=f"{TWO_AHEAD} {SHARDED}"),
        Layout("llama", 4, pp=2, vpp=2, cp=2, sharding="per-document"),
        Layout("moe-seq", 3, pp=2, tp="2sp"),
    ], workload=MASKED),
    *(Case(layout, sliced_for, workload=workload)
      for layout in (Layout("mixed", 3, pp=2, extra=TWO_AHEAD), Layout("llama", 3, dp=2, cp=2))
      for workload in (MASKED, OWN_LOSS)),
    Case(Layout("mixed", 3, pp=2, extra=TWO_AHEAD), sliced_for, workload=BY_SAMPLE),
    *each([
        Layout("mixed", 4, dp=2, extra=f"{TWO_AHEAD} {SHARDED}"),
        Layout("llama", 4, pp=2, vpp=2, cp=2, sharding="per-document"),
        Layout("moe-seq", 3, pp=2, tp="2sp"),
    ], workload=OWN_LOSS),
    # Samples that share prefixes.
    *each([
        Layout("llama", 3),
        Layout("llama", 4, pp=2, extra=FULL),
        Layout("gpt2", 4, pp=4),
        Layout("mixed", 4, pp=2, vpp=2, extra=SELECTIVE),
        Layout("llama", 2, tp="2sp", dp=2, extra=f"{SHARDED} {OVERLAP}"),
        Layout("llama", 3, cp=2, sharding="per-document", extra=HEAD_GROUPS),
        Layout("gpt2", 2, cp=2, tp="2sp", sharding="hybrid", extra=KEEP),
        Layout("sliding-list", 3), Layout("sliding-skip", 3, cp=2),
        Layout("moe-aux", 3, dp=2, ep=2, extra=UNLIMITED),
        Layout("latent-yarn", 3, extra=FEW), Layout("latent", 3, cp=2, extra=FEW),
        Layout("delta", 3, pp=2, extra=FULL),
        Layout("delta", 3, cp=2, sharding="per-document"),
        Layout("mamba", 3, cp=2),
        Layout("mamba", 2, tp="2sp", dp=2, extra=f"{SHARDED} {OVERLAP}"),
        Layout("mamba", 4, pp=2, vpp=2, extra=SELECTIVE),
    ], shared_for, workload=TREES),
    *(Case(layout, shared_for, workload=workload)
      for layout in (Layout("mixed", 3, pp=2, extra=TWO_AHEAD), Layout("llama", 3, cp=2))
      for workload in (MASKED_TREES, OWN_TREES)),
    # And run them in several micro-batches.
    *each([
        Layout("llama", 1),
        Layout("llama", 1, pp=2, extra=FULL),
        Layout("llama", 1, tp="2sp", dp=2, extra=f"{SHARDED} {OVERLAP}"),
        Layout("gpt2", 1, pp=2, cp=2, sharding="hybrid", extra=FULL),
        Layout("sliding-skip", 1, cp=2),
        Layout("latent", 1, cp=2, extra=FEW), Layout("sliding-list", 1, pp=2),
        Layout("moe-aux", 1, dp=2, ep=2, extra=UNLIMITED),
    ], trees_for, workload=TREES),
    *each([
        Layout("latent-yarn", 1, extra=FEW),
        Layout("delta", 1, pp=2, extra=FULL), Layout("delta", 1, cp=2, sharding="per-document"),
        Layout("mamba", 1, cp=2), Layout("mamba", 1, tp="2sp", dp=2, extra=f"{SHARDED} {OVERLAP}"),
        Layout("mamba", 2, pp=2, vpp=2, extra=SELECTIVE),
        Layout("gpt2", 1, pp=4),
        Layout("mixed", 2, pp=2, vpp=2, extra=SELECTIVE),
        Layout("llama", 1, cp=2, sharding="per-document", extra=HEAD_GROUPS),
    ], trees_for, with_nan_rows, TREES),
    *(Case(layout, trees_for, workload=workload)
      for layout in (Layout("mixed", 1, pp=2, extra=TWO_AHEAD), Layout("llama", 1, dp=2))
      for workload in (MASKED_TREES, OWN_TREES)),
    Case(Layout("llama", 2, pp=2, vpp=2), Changed(trees_for, (half_recomputed,)),
         workload=TREES),
    Case(Layout("llama", 1, pp=2), Changed(trees_for, (half_hosted,)), with_small_slabs, TREES),
]  # fmt: skip
FURTHER = [
    Case(Layout("llama", 3, dp=2, cp=2), sliced_for, workload=BY_SAMPLE),
    Case(Layout("llama", 2, pp=2, vpp=2, cp=2, extra=FULL), divided_for),
    Case(SLICED[-1], Changed(divided_for, (half_recomputed,))),
    Case(Layout("llama", 1, dp=2, cp=2, extra=HEAD_GROUPS), Changed(merged_for, (divided,))),
    Case(Layout("moe-aux", 4, pp=2, dp=2, ep=2), recomputed_for),
    Case(Layout("moe-seq", 4, pp=2, dp=2, ep=2), hosted_for, with_small_slabs),
    *each([
        Layout("mixed", 5, pp=2, tp="2sp", dp=2, extra=f"{SHARDED} {FULL}"),
        Layout("gpt2", 4, cp=2, dp=2, extra=f"{SHARDED} {OVERLAP} {KEEP} {HEAD_GROUPS}"),
        Layout("llama", 9, pp=4, vpp=2, extra=f"{NO_P2P_OVERLAP} {GROUP} 5"),
        Layout("sliding-skip", 4, cp=2, sharding="per-sequence", extra=KEEP),
        Layout("sliding", 3, pp=2, cp=2, sharding="per-document", extra="--wlb-cp-reduce-in-fp32"),
        Layout("mixed", 5, pp=2, extra=TWO_AHEAD),
        Layout("llama", 4, pp=2, extra=f"{ONE_AHEAD} {FULL}"),
        Layout("llama", 5, cp=2, sharding="per-document", extra=ONE_AHEAD),
        Layout("moe-seq", 3, tp="2sp", dp=2, ep=2),  # experts divided by TP, too
        Layout("moe-seq", 3, dp=2, ep=2),
        Layout("moe-seq", 3, dp=2, extra=ETP2),  # over data-parallel ranks
        Layout("moe-seq", 3, tp="2sp", extra=ETP1),
        Layout("moe-seq", 3, tp="2sp", ep=2, extra=ETP1),
        Layout("moe-aux", 3, dp=4, ep=2, extra=ETP2),
        Layout("moe-seq", 4, pp=2, dp=2, extra=f"{ETP2} {SHARDED}"),
        Layout("moe-seq", 4, pp=2, dp=2, ep=2, extra=FULL),
        Layout("moe-seq", 4, pp=2, vpp=2, dp=2, ep=2),
        Layout("moe-seq", 3, cp=2, ep=2, sharding="per-document", extra=SHARDED),
        Layout("deepseek", 4, pp=2, dp=2, ep=2, extra=FULL),
    ]),
    *each([
        Layout("sliding-list", 1, pp=2, cp=2, sharding="per-document",
               extra=f"{HEAD_GROUPS} {FULL}"),
        Layout("mixed", 1, cp=2, tp="2sp", sharding="adaptive", extra=SELECTIVE),
        Layout("gpt2", 1, cp=2, sharding="per-sequence", extra=f"{KEEP} {FULL}"),
        Layout("yarn", 1, cp=4, sharding="hybrid"),
        Layout("mixed", 1, tp="2sp", extra=FULL),
        Layout("gpt2", 1, pp=2, cp=2, sharding="hybrid", extra=FULL),
        Layout("gpt2", 2, pp=2, vpp=2, dp=2, extra=GATHER),
        Layout("mixed", 4, pp=4, vpp=2, extra=FULL),
        Layout("llama", 2, pp=2, vpp=3, tp="2sp", extra=OVERLAP),
        Layout("sliding-skip", 1, cp=2, sharding="per-sequence", extra=KEEP),
        Layout("llama", 3, cp=2, extra=ONE_AHEAD),
        Layout("moe-seq", 3, pp=2, tp="2sp", ep=2, extra=f"{ETP1} {FULL}"),
        Layout("moe-seq", 3, tp="2sp", ep=2, extra=ETP1),
        Layout("moe-seq", 3, pp=2, cp=2, ep=2, sharding="per-document", extra=FULL),
        Layout("moe-aux", 3, tp="2sp", cp=2, ep=4, extra=ETP1),
        Layout("moe-seq", 3, tp="2sp", dp=2, ep=2, extra=f"{ETP1} {SHARDED} {OVERLAP}"),
        Layout("deepseek", 3, pp=2, tp="2sp", ep=2, extra=ETP1),
        Layout("moe-aux", 4, dp=4, ep=2, extra=f"{SHARDED} {OVERLAP}"),
        EP4,
        Layout("moe-seq", 4, pp=2, dp=2, extra=f"{ETP2} {SHARDED}"),
        Layout("moe-seq", 3, cp=2, dp=2, ep=4, sharding="per-document"),
        Layout("deepseek", 4, pp=2, dp=2, ep=2),
        DEEPSEEK,
    ], sliced_for),
    *each([
        Layout("llama", 1, dp=2, tp="2sp"),
        Layout("latent-yarn", 1, dp=2, tp="2sp"),
        Layout("moe-seq", 1, dp=4, ep=2, extra=f"{SHARDED} {OVERLAP}"),
        Layout("moe-seq", 1, dp=4, ep=4),
        Layout("moe-seq", 1, tp="2sp", dp=2, ep=2, extra=f"{ETP1} {SHARDED} {OVERLAP}"),
        Layout("moe-seq", 1, tp="2sp", dp=2, ep=2),
        Layout("moe-aux", 1, cp=2, dp=2, ep=4, sharding="per-document"),
        Layout("moe-aux", 1, dp=4, extra=OVERLAP),
        Layout("deepseek", 2, pp=2, vpp=2, dp=2, ep=2),
    ], merged_for),
    *(Case(DP4, Changed(merged_for, (change,))) for change in (half_recomputed, half_hosted)),
    *each([
        Layout("mixed", 1, cp=2, sharding="per-document"),
        Layout("gpt2", 1, pp=2, dp=2, extra=OVERLAP),
        Layout("mixed", 4, pp=4, vpp=2, extra=VERIFY_SHAPES),
        Layout("llama", 1, pp=2, tp="2sp"),
    ], recomputed_for, with_some_recomputed),
    *each([
        Layout("moe-aux", 3, tp="2sp", cp=2, ep=4, extra=f"{ETP1} {FULL}"),
        Layout("moe-seq", 4, pp=2, dp=2, ep=2),
        DEEPSEEK,
    ], recomputed_for),
    *each([
        Layout("llama", 1, cp=2, tp="2sp", sharding="per-document"),
        Layout("llama", 1, pp=2, dp=2, extra=OVERLAP),
    ], Changed(sliced_for, (mlps_recomputed,)), with_some_mlps_recomputed),
    *each([
        Layout("gpt2", 1),
        Layout("gpt2", 1, pp=2, dp=2, extra=OVERLAP),
        Layout("mixed", 1, cp=2, sharding="per-document"),
        Layout("mixed", 4, pp=4, vpp=2, extra=VERIFY_SHAPES),
        Layout("moe-seq", 3, tp="2sp", ep=2, extra=ETP1),
        DEEPSEEK,
    ], all_hosted_for, with_small_slabs),
    *each([
        Layout("mixed", 1, cp=2, tp="2sp", sharding="adaptive", extra=SELECTIVE),
        Layout("gpt2", 1, pp=2, cp=2, sharding="hybrid"),
        Layout("yarn", 1, cp=4, sharding="hybrid"),
        Layout("gpt2", 1, cp=2, sharding="per-sequence", extra=f"{KEEP} {FULL}"),
        Layout("latent-yarn", 1, cp=2, sharding="per-document"),
        SLIDING,
        Layout("sliding", 1, cp=4, sharding="adaptive"),
        Layout("deepseek", 2, cp=2, ep=2, sharding="adaptive"),
    ], divided_for),
    Case(Layout("deepseek", 2, cp=2, ep=2, sharding="adaptive"),
         Changed(divided_for, (half_recomputed,))),
    Case(Layout("latent", 3, extra=FEW), within=projecting_again, workload=LATENT_WORKLOAD),
    *each([
        Layout("latent-yarn", 2, tp="2sp", extra=f"{FEW} {SELECTIVE}"),
        Layout("latent", 3, cp=2, extra=f"{FEW} {KEEP}"),
    ], workload=LATENT_WORKLOAD),
    Case(Layout("latent", 1, cp=2, sharding="per-document", extra=FEW), sliced_for,
         workload=LATENT_WORKLOAD),
    Case(Layout("moe-seq", 3, tp="2sp", ep=2, extra=ETP1), sliced_for, experts_again),
    *(Case(layout, workload=workload) for workload in (MASKED, BY_SAMPLE) for layout in (
        Layout("llama", 3, tp="2sp", cp=2, extra=TWO_AHEAD),
        Layout("deepseek", 4, pp=2, ep=2, dp=2),
    )),
    *(Case(layout, sliced_for, workload=workload)
      for workload in (MASKED, BY_SAMPLE, OWN_LOSS) for layout in (
        Layout("moe-aux", 4, pp=2, vpp=2),
        Layout("llama", 3, pp=2, tp="2", extra=TWO_AHEAD),
    )),
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *map(further, FURTHER)], ids=str)
def test_layout_computes_what_one_process_does(wrong: Differences, case: Case) -> None:
    assert wrong(case.layout, case.within, case.plan_for, case.workload) == []


def test_tree_of_one_path_is_a_document_in_slices(gloo: GlooPool, oracle: Oracle) -> None:
    """To the last bit."""
    layout, workload = Layout("llama", 1, pp=2), make_workload([[60, 7, 41]] * 2, 59)
    given = layout.config, workload, oracle(layout, sliced_for, workload).initial, nullcontext
    sliced, tree = (gloo.run(2, train, *given, each) for each in (sliced_for, one_path_for))
    for one, other in zip(sliced, tree, strict=True):
        assert one.losses == other.losses and one.evaluated == other.evaluated
        for a, b in ((one.gradients, other.gradients), ((one.final,), (other.final,))):
            pairs = zip(itertools.chain(*a), itertools.chain(*b), strict=True)
            assert all((x == y).all() for x, y in pairs)
    plan = one_path_for(layout.config, workload, 2, 0)
    assert any(m.sharing.tree for m in plan)


# That the cases are what they seem.


def test_cases_cover_every_pair_of_settings() -> None:
    axes = {
        "pp": (1, 2, 4),
        "vpp": (1, 2),
        "tp": ("1", "2", "2sp"),
        "dp": (1, 2),
        "cp": (1, 2),
        "model": ("llama", "gpt2", "mixed"),
    }
    missing = []
    for (a, a_values), (b, b_values) in itertools.combinations(axes.items(), 2):
        for pair in itertools.product(a_values, b_values):
            wanted = dict(zip((a, b), pair, strict=True))
            if wanted == {"pp": 1, "vpp": 2}:  # nothing to interleave
                continue
            if not any(all(getattr(c, k) == v for k, v in wanted.items()) for c in WHOLE):
                missing.append(wanted)
    assert missing == []
    for flag in (OVERLAP, SHARDED, GATHER, NO_P2P_OVERLAP, FULL, SELECTIVE, GROUP):
        assert sum(flag in case.extra for case in WHOLE) >= 2, flag
    assert any(c.num_micro_batches < c.pp for c in WHOLE)
    assert any(c.num_micro_batches % c.pp for c in WHOLE if c.vpp == 1 and c.pp > 1)


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_plans_are_awkward(case: Layout) -> None:
    multiple = (2 if case.tp == "2sp" else 1) * (2 * case.cp if case.cp > 1 else 1)
    for step, documents in enumerate(WORKLOAD.steps):
        plan = scatter_for(case.config, WORKLOAD, case.world_size, step)
        assert sorted(d.key for d in plan.documents) == sorted(d.key for d in documents)
        assert plan.num_targets == sum(int((t >= 0).sum()) for _, t in WORKLOAD.examples(step))
        micro_batches = list(plan)
        assert all(m.padded_length % multiple == 0 for m in micro_batches)
        assert any(d.length == 1 and d.ends for d in documents)
        assert any(d.length > 1 and not d.ends for d in documents)
        assert any(d.length == 1 and not d.ends for d in documents) or step != 1
        if case.num_micro_batches > 1:
            assert len({m.padded_length for m in micro_batches}) > 1
            assert len({len(m.spans) for m in micro_batches}) > 1
            assert any(m.length == 0 for m in micro_batches)
            assert any(0 < m.length < m.padded_length for m in micro_batches)
        if case.cp > 1:
            assert any(0 < length < 2 * case.cp for m in micro_batches for length in m.lengths)


def test_sliced_plans_are_awkward() -> None:
    """That the cases are what they seem."""
    for case in SLICED:
        for step, documents in enumerate(WORKLOAD.steps):
            plan = sliced_for(case.config, WORKLOAD, case.world_size, step)
            spans = [span for m in plan for span in m.spans]
            assert sorted(d.key for d in documents) == sorted(
                s.document.key for s in spans if not s.start
            )
            assert sum(s.num_targets for s in spans) == sum(d.num_targets for d in documents)
            chains = [length for own in plan.chains for length in own]
            assert len({length for length in chains if length > 1}) > 1
            assert 1 in chains
            slices = [m.slice for m in plan if m.slice is not None]
            assert any(s.length == 1 and s.start == 0 for s in slices)
            assert any(s.length == 1 and s.stop == s.document.length for s in slices)
            assert any(m.slice is not None and len(m.spans) > 1 for m in plan)
            assert any(m.padded_length > m.length for m in plan)
    plans = [sliced_for(SLICED[4].config, WORKLOAD, 4, step) for step in range(len(WORKLOAD.steps))]
    assert any(len({len(own) for own in plan.micro_batches}) > 1 for plan in plans)


def test_merged_plans_are_awkward() -> None:
    """That the cases are what they seem."""
    for case in MERGED:
        for step, documents in enumerate(WORKLOAD.steps):
            plan = merged_for(case.config, WORKLOAD, case.world_size, step)
            check_chains(plan)
            assert sorted(d.key for d in documents) == sorted(d.key for d in plan.documents)
            assert plan.num_targets == sum(d.num_targets for d in documents)
            merged = [m for m in plan if m.replicas]
            assert any(m.slice is None for m in merged)  # a whole document
            assert any(m.slice and m.length == 1 for m in merged)
            assert any(m.padded_length > m.length + 2 * len(m.replicas) for m in merged)
            assert len({own[0] for own in plan.chains}) == (2 if case.dp == 4 else 1)
            others = [len(own) - 1 for own in plan.chains]
            assert others[-1] and (all(others) or (step == 1 and not any(others[:-1])))
    plans = [merged_for(DP4.config, WORKLOAD, 4, step) for step in range(len(WORKLOAD.steps))]
    assert any(len({len(own) for own in plan.micro_batches}) > 2 for plan in plans)


@pytest.mark.parametrize("model", MODELS)
def test_oracle_runs_what_could_go_wrong(oracle: Oracle, model: str) -> None:
    """Steps are clipped, each parameter has a gradient, and all of them move."""
    layout = Layout(model, 4)
    run = oracle(layout)
    for step in run.steps:
        norm = np.sqrt(
            sum(float((g.astype(np.float64) ** 2).sum()) for g in step.gradients.values())
        )
        assert norm > 1.2 * layout.config.training.clip_grad
        assert all(np.abs(gradient).max() > 0 for gradient in step.gradients.values())
    assert all(np.abs(run.final[name] - w).max() > 1e-3 for name, w in run.initial.items())
    assert len({step.loss for step in run.steps}) == len(run.steps) >= 2


def test_scaled_rotations_are_other_models(oracle: Oracle) -> None:
    """From the same weights: so the scaling of frequencies is what the layouts above ran."""
    plain, llama_3, yarn = (oracle(Layout(m, 4)) for m in ("llama", "llama-3", "yarn"))
    assert all((plain.initial[name] == w).all() for name, w in yarn.initial.items())
    losses = [run.steps[0].loss for run in (plain, llama_3, yarn)]
    assert min(abs(a - b) for a, b in itertools.combinations(losses, 2)) > 1e-3


def test_plans_count_what_the_masks_do() -> None:
    layout = Layout("mixed", 3, pp=2, extra=TWO_AHEAD)
    for workload in (MASKED, BY_SAMPLE):
        for step in range(len(workload.steps)):
            plan = sliced_for(layout.config, workload, layout.world_size, step)
            assert any(not span.num_targets for m in plan for span in m.spans)
            counted = workload.counted(step)
            assert plan.num_targets == pytest.approx(sum(own.sum() for own in counted))
            assert plan.targets_ahead(2) == pytest.approx(sum(own[2:].sum() for own in counted))
