"""What must not pass: faults in layouts that equal one process differ from it, or are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from helpers.faults import (
    a_place_further,
    add_gradients_to_other_rows,
    by_one,
    count_on_each_replica,
    count_shared_labels_once,
    drop_a_micro_batch,
    first_to_last_unguarded,
    forget_to_reduce_norms,
    forget_to_tie,
    hand_back_last_alone,
    hand_back_nothing,
    hand_on_nothing,
    in_megatrons_order,
    leak_one_boundary,
    leave_out_a_childs_gradients,
    leave_out_states_gradients,
    let_siblings_see_each_other,
    mean_of_means,
    megatron_s_own_recomputation,
    megatron_s_own_routers,
    reach_one_key_further,
    reduce_nothing,
    rotate_by_rows,
    scan_over_documents,
    see_nothing_that_is_shared,
    share_no_states,
    shift_across_documents,
    shift_each_document,
    shift_half_of_each_document,
    take_a_siblings_label,
    take_another_documents_keys,
    take_one_key_of_another_document,
    take_ranks_in_another_order,
    take_slices_for_documents,
    without_what_others_give,
)
from helpers.gloo import GlooPool
from helpers.layouts import (
    FULL,
    GATHER,
    HEAD_GROUPS,
    LATENT_WORKLOAD,
    LONGER,
    OVERLAP,
    OWN_LOSS,
    SHARDED,
    TREES,
    WORKLOAD,
    Differences,
    Layout,
)  # fmt: skip
from helpers.plans import (
    Changed,
    PlanFor,
    all_hosted,
    divided_for,
    merged_for,
    mlps_recomputed,
    scatter_for,
    shared_for,
    sliced_for,
    trees_for,
)
from helpers.ranks import build_runner
from helpers.within import with_wrong_bytes

from megatron_wlb.errors import PlanError
from megatron_wlb.plan import StepPlan

ONE = Layout("llama", 5)
CP = Layout("llama", 5, cp=2, sharding="per-document")
TP2_SP, PP2 = Layout("gpt2", 3, tp="2sp"), Layout("gpt2", 5, pp=2)
SLICED = Layout("llama", 1)
SLICED_CP = Layout("llama", 1, cp=2, sharding="per-document", extra=HEAD_GROUPS)
MERGED = Layout("gpt2", 1, dp=2, extra=f"{OVERLAP} {SHARDED}")
WINDOWS = Layout("sliding", 4, cp=2, sharding="per-document", extra=HEAD_GROUPS)
LATENTS = Layout("latent-yarn", 3, cp=2, sharding="per-document", extra=f"--num-layers 2 {GATHER}")
EP2 = Layout("moe-seq", 3, dp=2, ep=2)
EXPERTS_PP2 = Layout("moe-seq", 4, pp=2, dp=2, ep=2)
AHEAD = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.7"
# A layout, a fault, and where it is seen at first; plans and a workload if they are others.
FAULTS: list[tuple[Any, ...]] = [
    (ONE, leak_one_boundary, "loss"),
    (ONE, shift_half_of_each_document, "loss"),
    (Layout("gpt2", 3, dp=2), mean_of_means, "gradient"),
    (PP2, drop_a_micro_batch, "loss"),
    (PP2, forget_to_tie, "gradient"),
    (TP2_SP, forget_to_reduce_norms, "gradient"),
    (CP, take_one_key_of_another_document, "loss"),
    (CP, add_gradients_to_other_rows, "gradient"),
    (SLICED, first_to_last_unguarded, "gradient", sliced_for, LONGER),
    (SLICED, with_wrong_bytes, "gradient", Changed(sliced_for, (all_hosted,))),
    (SLICED_CP, without_what_others_give, "gradient", divided_for),
    (MERGED, reduce_nothing, "gradient", merged_for),
    (WINDOWS, reach_one_key_further, "loss"),
    (LATENTS, take_ranks_in_another_order, "loss", scatter_for, LATENT_WORKLOAD),
    (Layout("llama", 5, extra=AHEAD), shift_across_documents, "loss ahead"),
    (Layout("mixed", 4, extra=AHEAD), by_one, "loss", scatter_for, WORKLOAD.masked(seed=3)),
    (Layout("llama", 3), a_place_further, "loss", sliced_for, OWN_LOSS),
    *((Layout(model, 3), *fault) for model in ("delta", "mamba") for fault in (
        (hand_on_nothing, "loss", sliced_for),
        (hand_back_nothing, "gradient", sliced_for),
        (scan_over_documents, "loss"),
    )),
    *((Layout("llama", 3), fault, seen, shared_for, TREES) for fault, seen in (
        (see_nothing_that_is_shared, "loss"),
        (let_siblings_see_each_other, "loss"),
        (rotate_by_rows, "loss"),
        (leave_out_a_childs_gradients, "gradient"),
        (count_shared_labels_once, "loss"),
        (take_a_siblings_label, "loss"),
    )),
    (Layout("llama", 1), leave_out_a_childs_gradients, "gradient", trees_for, TREES),
    (Layout("delta", 3), share_no_states, "loss", shared_for, TREES),
    (Layout("mamba", 3), share_no_states, "loss", shared_for, TREES),
    (Layout("delta", 3), leave_out_states_gradients, "gradient", shared_for, TREES),
    (Layout("delta", 1), hand_on_nothing, "loss", trees_for, TREES),
    (Layout("mamba", 1), hand_back_last_alone, "gradient", trees_for, TREES),
    (EP2, megatron_s_own_routers, "router"),
    (Layout("moe-seq", 1, dp=2), count_on_each_replica, "router", merged_for),
    (dataclasses.replace(EXPERTS_PP2, extra=FULL), take_slices_for_documents, "router", sliced_for),
]  # fmt: skip


@pytest.mark.parametrize("given", FAULTS, ids=lambda given: f"{given[0]} {given[1].__name__}")
def test_fault_differs_from_the_oracle(wrong: Differences, given: tuple[Any, ...]) -> None:
    layout, fault, seen, *others = given
    plan_for, workload = [*others, *(scatter_for, WORKLOAD)[len(others) :]]
    found = wrong(layout, fault, plan_for, workload)
    gradients = [line for line in found if ": gradient of" in line]
    assert gradients
    if seen == "router":
        assert any("router" in line for line in gradients)
    if seen.startswith("loss"):
        assert any(line.startswith(f"step 0: {seen}") for line in found)
    else:
        assert not any(line.startswith("step 0: loss") for line in found)


def test_constant_shift_of_rotary_positions_is_invisible(wrong: Differences) -> None:
    """RoPE is relative: why the faults above shift parts of documents."""
    assert wrong(ONE, shift_each_document) == []


def half_divided(plan: StepPlan) -> StepPlan:
    """The first slice of each document is not divided."""
    ranks = [
        tuple(dataclasses.replace(m, divided=bool(m.slice and m.slice.start)) for m in own)
        for own in plan.micro_batches
    ]
    return dataclasses.replace(plan, micro_batches=tuple(ranks))


ORDER = "slices run forward first to last"
REFUSED = [
    (SLICED, in_megatrons_order, sliced_for, ORDER),
    (SLICED, take_another_documents_keys, sliced_for, ORDER),
    (Layout("gpt2", 1), None, Changed(sliced_for, (mlps_recomputed,)),
     r"MLPs, which have biases.*recompute its layers"),
    (SLICED_CP, None, Changed(divided_for, (half_divided,)),
     "are to be divided over 2 ranks, those before over 1"),
    (EXPERTS_PP2, megatron_s_own_recomputation, scatter_for,
     r"a router got .* tokens where the plan has"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "fault", "plan_for", "said"), REFUSED)
def test_fault_is_refused(
    wrong: Differences, layout: Layout, fault: Any, plan_for: Any, said: str
) -> None:
    given = {} if fault is None else {"fault": fault}
    with pytest.raises(PlanError, match=said):
        wrong(layout, plan_for=plan_for, **given)


def test_trees_in_another_order_are_refused(wrong: Differences) -> None:
    with pytest.raises(PlanError, match=ORDER):
        wrong(SLICED, in_megatrons_order, trees_for, TREES)


def lacking_on_the_last_rank(plan: StepPlan) -> StepPlan:
    own = tuple(m for m in plan.micro_batches[1] if not m.replicas)
    chains = (plan.chains[0], plan.chains[1][1:])
    return dataclasses.replace(plan, micro_batches=(plan.micro_batches[0], own), chains=chains)


def padded_for_one_rank(plan: StepPlan) -> StepPlan:
    first = dataclasses.replace(plan.micro_batches[0][0], padded_length=6)
    ranks = tuple((first, *own[1:]) for own in plan.micro_batches)
    return dataclasses.replace(plan, micro_batches=ranks)


def of_unequal_numbers(plan: StepPlan) -> StepPlan:
    fewer = (plan.micro_batches[0], plan.micro_batches[1][1:])
    return dataclasses.replace(plan, micro_batches=fewer)


def of_other_chains(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, chains=((1, 1, 1), (1, 2)))


def of_others_recomputed(plan: StepPlan) -> StepPlan:
    first, second = plan.micro_batches
    first = (dataclasses.replace(first[0], recomputed=True), *first[1:])
    return dataclasses.replace(plan, micro_batches=(first, second))


def run_changed(layout: Layout, plan_for: PlanFor, change: Callable[[StepPlan], StepPlan]) -> None:
    """Runs a plan that ranks agree on, and that would keep one of them waiting for another."""
    runner = build_runner(layout.config, WORKLOAD)
    runner.run(change(plan_for(layout.config, WORKLOAD, layout.world_size, 0)))


@pytest.mark.parametrize(
    ("layout", "plan_for", "change", "said"),
    [
        (EP2, scatter_for, of_unequal_numbers, r"have numbers of micro-batches \[\(3,\), \(2,\)\]"),
        (EP2, scatter_for, of_other_chains, r"meet in each pass, but have chains of micro-batches"),
        (EP2, sliced_for, of_others_recomputed, r"but have recomputed ones of .* \[\(True, "),
        (
            MERGED,
            merged_for,
            lacking_on_the_last_rank,
            "rank 1: micro-batch 0 .* this one has none",
        ),
        (MERGED, merged_for, padded_for_one_rank, "is 6 tokens long; pad it to a .* multiple of 4"),
    ],
)
def test_plans_with_which_ranks_would_wait_are_refused(
    gloo: GlooPool, layout: Layout, plan_for: PlanFor, change: Any, said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        gloo.run(layout.world_size, run_changed, layout, plan_for, change)
