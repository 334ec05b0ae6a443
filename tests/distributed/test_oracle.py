"""Every layout computes what one process computes with each document alone.

Loss, every element of every gradient, and the weights after several optimizer steps, against
:mod:`helpers.oracle`; and faults that must not pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import pytest
from helpers.layouts import (
    FULL,
    GATHER,
    GROUP,
    HEAD_GROUPS,
    KEEP,
    MODELS,
    NO_P2P_OVERLAP,
    OVERLAP,
    SELECTIVE,
    SHARDED,
    VERIFY_SHAPES,
    WORKLOAD,
    Differences,
    Layout,
    Oracle,
)
from helpers.ranks import scatter_for

CASES = [
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
    Layout("llama", 9, pp=4, vpp=2, extra=f"{NO_P2P_OVERLAP} {GROUP} 5"),
    Layout("mixed", 8, pp=4, vpp=2),
    Layout("gpt2", 5, pp=4, vpp=2, dp=2, extra=f"{SHARDED} {GROUP} 5"),
    Layout("mixed", 5, pp=4, tp="2"),
    Layout("llama", 4, pp=4, vpp=2, tp="2sp", extra=SELECTIVE),
    Layout("mixed", 5, pp=2, tp="2sp", dp=2, extra=f"{SHARDED} {FULL}"),
    # Context parallelism.
    Layout("llama", 5, cp=2, sharding="per-document", extra=HEAD_GROUPS),
    Layout("gpt2", 4, cp=2, dp=2, extra=f"{SHARDED} {OVERLAP} {KEEP} {HEAD_GROUPS}"),
    Layout("yarn", 3, cp=4, sharding="hybrid"),
    Layout("llama-3", 3, cp=2, tp="2", sharding="adaptive", extra=SELECTIVE),
    Layout("mixed", 4, pp=2, vpp=2, cp=2, dp=2, sharding="per-document", extra=SHARDED),
    Layout("llama", 4, pp=2, tp="2sp", cp=2, sharding="hybrid", extra=FULL),
    Layout("gpt2", 5, pp=4, cp=2, sharding="per-document", extra=f"{VERIFY_SHAPES} {HEAD_GROUPS}"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_computes_what_one_process_does(wrong: Differences, case: Layout) -> None:
    assert wrong(case) == []


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
            if not any(all(getattr(c, k) == v for k, v in wanted.items()) for c in CASES):
                missing.append(wanted)
    assert missing == []
    for flag in (OVERLAP, SHARDED, GATHER, NO_P2P_OVERLAP, FULL, SELECTIVE, GROUP):
        assert sum(flag in case.extra for case in CASES) >= 2, flag
    assert any(c.num_micro_batches < c.pp for c in CASES)
    assert any(c.num_micro_batches % c.pp for c in CASES if c.vpp == 1 and c.pp > 1)


@pytest.mark.parametrize("case", CASES, ids=str)
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


# What must not pass. Each breaks the run of a layout that is equal to the oracle above.


@contextlib.contextmanager
def broken_batches(runner, change) -> Iterator[None]:
    finish = runner.batches.finish

    def finish_broken(made):
        return change(finish(made))

    with mock.patch.object(runner.batches, "finish", finish_broken):
        yield


def leak_one_boundary(runner):
    """The first two documents of one micro-batch see each other; positions stay right."""
    from megatron_wlb.runtime.gpt.attention.document_attention import PlanSeqParams
    from megatron_wlb.runtime.gpt.attention.kernels import Segments

    def leak(batch):
        if batch.plan.index != 0:
            return batch
        assert len(batch.plan.spans) > 1
        lengths, positions = batch.plan.lengths, batch.packed_seq_params.positions
        merged = Segments.of((sum(lengths[:2]), *lengths[2:]))
        params = PlanSeqParams.of(merged, positions.numpy())
        return dataclasses.replace(batch, packed_seq_params=params)

    return broken_batches(runner, leak)


def take_one_key_of_another_document(runner):
    """One key of one chunk is a neighbour's, on each context-parallel rank."""

    def leak(batch):
        gather = batch.packed_seq_params.gather
        rows = gather.rows.clone()
        rows[-1] = rows[0]
        params = dataclasses.replace(
            batch.packed_seq_params, gather=dataclasses.replace(gather, rows=rows)
        )
        return dataclasses.replace(batch, packed_seq_params=params)

    return broken_batches(runner, leak)


def add_gradients_to_other_rows(runner):
    """Gradients of keys go to the token after the right one."""

    def shift(batch):
        gather = batch.packed_seq_params.gather
        params = dataclasses.replace(
            batch.packed_seq_params, gather=dataclasses.replace(gather, first=gather.first.roll(1))
        )
        return dataclasses.replace(batch, packed_seq_params=params)

    return broken_batches(runner, shift)


def count_targets_on_each_rank(runner):
    """Context-parallel ranks each count all of the micro-batch's tokens."""
    return dividing_by(lambda num_targets: num_targets * runner.batches.cp_size)


def dividing_by(divisor):
    """Gradients are divided by what ``divisor`` makes of the step's number of targets."""
    from megatron_wlb.runtime.stepping import step

    right = step._divided_by
    return mock.patch.object(step, "_divided_by", lambda n, config: right(divisor(n), config))


def shift_one_token(runner):
    """One local token of each micro-batch is one position off."""

    def change(positions, lengths):
        positions = positions.clone()
        positions[len(positions) // 2] += 1
        return positions

    return with_positions(runner, change)


def with_positions(runner, change):
    """Gives RoPE and learned positions what ``change`` makes of ``(positions, lengths)``."""

    def shift(batch):
        params = batch.packed_seq_params
        positions = change(params.positions, batch.plan.lengths)
        params = dataclasses.replace(
            params,
            positions=positions,
            max_seqlen_q=int(positions.max()) + 1,  # so many angles are computed
        )
        return dataclasses.replace(batch, position_ids=positions[None], packed_seq_params=params)

    return broken_batches(runner, shift)


def shift_half_of_each_document(runner):
    def change(positions, lengths):
        positions, start = positions.clone(), 0
        for length in lengths:
            positions[start + length // 2 : start + length] += 1
            start += length
        return positions

    return with_positions(runner, change)


def shift_each_document(runner):
    return with_positions(runner, lambda positions, lengths: positions + 1)


def never_reset_positions(runner):
    # Modulo the rows of the learned table.
    return with_positions(runner, lambda p, lengths: (p * 0 + 1).cumsum(0).sub(1) % 64)


@contextlib.contextmanager
def mean_of_means(runner) -> Iterator[None]:
    """Each micro-batch is divided by its own tokens, and not all by those of the step."""
    import torch

    from megatron_wlb.runtime.stepping import step

    right = step.loss_function

    def own_mean(batch, losses):
        loss_sum, num_targets, report = right(batch, losses)
        own = torch.clamp(num_targets, min=1)
        return loss_sum / own, num_targets, report

    with dividing_by(lambda _: 1), mock.patch.object(step, "loss_function", own_mean):
        yield


def drop_a_micro_batch(runner):
    """The first micro-batch counts in the number of tokens, but its losses are masked."""

    def drop(batch):
        if batch.plan.index == 0 and batch.loss_mask is not None:
            return dataclasses.replace(batch, loss_mask=batch.loss_mask * 0)
        return batch

    return broken_batches(runner, drop)


def train_last_tokens(runner):
    """Tokens without a label count in the loss, padding too."""

    def unmask(batch):
        if batch.loss_mask is None:
            return batch
        return dataclasses.replace(batch, loss_mask=batch.loss_mask * 0 + 1)

    return broken_batches(runner, unmask)


@contextlib.contextmanager
def forget_to_reduce_norms(runner) -> Iterator[None]:
    """Norms are not marked as divided over TP by sequence parallelism."""
    for gpt in runner.model.gpts:
        for name, parameter in gpt.named_parameters():
            if "layernorm" in name:
                parameter.sequence_parallel = False
    yield


@contextlib.contextmanager
def forget_to_tie(runner) -> Iterator[None]:
    """First and last stage keep the gradients of the tied weights to themselves."""
    from megatron.core.distributed import finalize_model_grads

    names = finalize_model_grads.__globals__  # the package has the function under its module's name
    with mock.patch.dict(names, _allreduce_word_embedding_grads=lambda *args, **kwargs: None):
        yield


ONE = Layout("llama", 5)
CP = Layout("llama", 5, cp=2, sharding="per-document")
FAULTS = [
    (ONE, leak_one_boundary),
    (Layout("gpt2", 5, pp=2), leak_one_boundary),
    (ONE, shift_half_of_each_document),
    (Layout("mixed", 3, tp="2"), shift_half_of_each_document),
    (Layout("gpt2", 4), never_reset_positions),
    (Layout("gpt2", 4), shift_each_document),
    (ONE, mean_of_means),
    (Layout("gpt2", 3, dp=2), mean_of_means),
    (Layout("gpt2", 5, pp=2), drop_a_micro_batch),
    (ONE, train_last_tokens),
    (Layout("gpt2", 3, tp="2sp"), forget_to_reduce_norms),
    (Layout("gpt2", 5, pp=2), forget_to_tie),
    (CP, take_one_key_of_another_document),
    (CP, shift_one_token),
    (CP, add_gradients_to_other_rows),
    (CP, count_targets_on_each_rank),
]
IN_THE_GRADIENT_ONLY = (
    mean_of_means,
    forget_to_reduce_norms,
    forget_to_tie,
    add_gradients_to_other_rows,
    count_targets_on_each_rank,
)


@pytest.mark.parametrize(
    ("case", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_fault_differs_from_the_oracle(
    wrong: Differences, case: Layout, fault: Callable[..., object]
) -> None:
    found = wrong(case, fault)
    assert any(line.startswith("step 0: gradient of") for line in found)
    if fault in IN_THE_GRADIENT_ONLY:
        assert not any(line.startswith("step 0: loss") for line in found)
    else:
        assert any(line.startswith("step 0: loss") for line in found)


def test_constant_shift_of_rotary_positions_is_invisible(wrong: Differences) -> None:
    """RoPE is relative: why the faults above shift parts of documents."""
    assert wrong(ONE, shift_each_document) == []
