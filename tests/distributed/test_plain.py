"""``original`` packing through our path is what plain Megatron computes on the same windows.

Plain: Megatron's schedules with its own communicator and fixed lengths, its stock attention under
the block-diagonal mask that its data set makes (``--reset-attention-mask``,
``--reset-position-ids``, ``--eod-mask-loss``), its stock RoPE over the whole window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.gloo import GlooPool
from helpers.oracle import State, initial_weights
from helpers.ranks import build_runner, load
from helpers.workload import MemoryCorpus, Workload

from megatron_wlb.plan import Document, StepPlan
from megatron_wlb.planning.packing.base import Limits
from megatron_wlb.planning.packing.original import OriginalPacker
from megatron_wlb.planning.packing.reference import REFERENCE_COST
from megatron_wlb.planning.planner import Planner
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config

WINDOW, NUM_MICRO_BATCHES, NUM_STEPS = 48, 5, 3
VOCAB_SIZE, EOD = 59, 58
LEARNING_RATE = 0.1
COMMON = (
    f"--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length {WINDOW} "
    f"--make-vocab-size-divisible-by 32 --global-batch-size {NUM_MICRO_BATCHES}"
)
MODELS = {
    "rope": "--normalization RMSNorm --swiglu --disable-bias-linear --group-query-attention "
    "--num-query-groups 2 --untie-embeddings-and-output-weights",
    "learned": "--position-embedding-type learned_absolute",
}


def make_corpus() -> MemoryCorpus:
    """Documents that end with EOD, of a few tokens to several windows; some fill a window."""
    random = np.random.RandomState(0)
    stored, num_tokens = [], 0
    lengths = [7, 1, 40, 48, 130, 2, 15, 1, 1, 61, 96]
    while num_tokens <= WINDOW * NUM_MICRO_BATCHES * NUM_STEPS:
        length = lengths[len(stored)] if len(stored) < len(lengths) else random.randint(1, 90)
        stored.append(np.append(random.randint(0, EOD, length - 1), EOD))
        num_tokens += length
    return MemoryCorpus(tuple(stored))


CORPUS = make_corpus()


class AllAtOnce:
    """A stream whose documents arrive all in the first step."""

    exhausted = False

    def next_step(self) -> list[Document]:
        self.exhausted = True
        return [
            Document(0, index, 0, len(tokens), True, 0, index, 0)
            for index, tokens in enumerate(CORPUS.stored)
        ]

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("these plans are not saved")

    load_state_dict: Any = state_dict


def plans() -> list[StepPlan]:
    limits = Limits(NUM_MICRO_BATCHES, WINDOW, WINDOW, NUM_MICRO_BATCHES * WINDOW)
    planner = Planner(AllAtOnce(), OriginalPacker(limits), REFERENCE_COST, dp_size=1)
    found = [planner.next_plan() for _ in range(NUM_STEPS)]
    return [plan for plan in found if plan is not None]


# Cases, run on every rank.


def descend(chunks: list[Any]) -> None:
    import torch

    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter -= LEARNING_RATE * parameter.main_grad


def train_ours(config: Config, initial: State) -> list[float]:
    runner = build_runner(config, Workload(CORPUS, (), VOCAB_SIZE))
    load(config, runner.model, initial)
    losses = []
    for plan in plans():
        for chunk in runner.model.chunks:
            chunk.zero_grad_buffer()
        losses.append(runner.run(plan).mean)
        descend(runner.model.chunks)
    return losses


def windows(reset: bool) -> Iterator[tuple[Any, ...]]:
    """Megatron's samples: each window and the token after it, with its masks and positions."""
    import torch
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    tokens = torch.from_numpy(np.concatenate(CORPUS.stored))
    for start in range(0, WINDOW * NUM_MICRO_BATCHES * NUM_STEPS, WINDOW):
        sample = tokens[start : start + WINDOW + 1]
        mask, loss_mask, position_ids = _get_ltor_masks_and_position_ids(
            sample[:-1], EOD, reset, reset, True, True
        )
        yield sample[None, :-1], sample[None, 1:], mask[None], loss_mask[None], position_ids[None]


def plain_forward_step(batches: Iterator[tuple[Any, ...]], model: Any) -> tuple[Any, Any]:
    tokens, labels, mask, loss_mask, position_ids = next(batches)

    def loss_function(losses: Any) -> tuple[Any, Any, Any]:
        loss_sum = (losses * loss_mask).sum()
        num_tokens = loss_mask.sum().int()
        return loss_sum, num_tokens, (loss_sum.item(), num_tokens.item())

    return model(tokens, position_ids, mask, labels=labels), loss_function


def train_plain(config: Config, initial: State, reset: bool) -> list[float]:
    """Losses on the last stage; an empty list on the others."""
    import torch
    from helpers.stock_gpt import stock_gpt
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_wlb.runtime.gpt.build import Model
    from megatron_wlb.runtime.trainer import distributed

    distributed.initialize_groups(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    m = config.model
    of_gpt = {
        "share_embeddings_and_output_weights": not m.untie_embeddings_and_output_weights,
        "position_embedding_type": m.position_embedding_type,
        "max_sequence_length": WINDOW,
    }
    gpt = stock_gpt(
        of_gpt=of_gpt,
        num_query_groups=m.num_query_groups if m.group_query_attention else None,
        normalization=m.normalization,
        gated_linear_unit=m.swiglu,
        activation_func=torch.nn.functional.silu if m.swiglu else torch.nn.functional.gelu,
        add_bias_linear=not m.disable_bias_linear,
        calculate_per_token_loss=True,
        variable_seq_lengths=False,
    )
    core = gpt.config
    chunk = DistributedDataParallel(core, DistributedDataParallelConfig(), gpt)
    core.finalize_model_grads_func = finalize_model_grads
    load(config, Model(core, groups, [chunk], [gpt]), initial)
    schedule, batches, losses = get_forward_backward_func(), windows(reset), []
    for _ in range(NUM_STEPS):
        chunk.zero_grad_buffer()
        reports = schedule(
            forward_step_func=plain_forward_step,
            data_iterator=batches,
            model=[chunk],
            num_microbatches=NUM_MICRO_BATCHES,
            seq_length=WINDOW,
            micro_batch_size=1,
            forward_only=False,
        )
        if reports:
            losses.append(sum(loss for loss, _ in reports) / sum(number for _, number in reports))
        descend([chunk])
    return losses


def test_original_plans_are_whole_windows_of_pieces() -> None:
    assert len(plans()) == NUM_STEPS
    for plan in plans():
        (micro_batches,) = plan.micro_batches
        assert [m.padded_length for m in micro_batches] == [WINDOW] * NUM_MICRO_BATCHES
        assert [m.length for m in micro_batches] == [WINDOW] * NUM_MICRO_BATCHES
    documents = [document for plan in plans() for document in plan.documents]
    assert any(d.offset > 0 for d in documents)
    assert any(not d.ends for d in documents)
    assert any(d.length == WINDOW for d in documents)
    assert max(len(m.spans) for plan in plans() for m in plan) > 3


@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_original_packing_gives_the_losses_of_plain_megatron(
    gloo: GlooPool, model: str, pp_size: int
) -> None:
    flags = f"{COMMON} {MODELS[model]} --pipeline-model-parallel-size {pp_size}"
    config = parse(flags.split())
    (initial,) = gloo.run(1, initial_weights, config, VOCAB_SIZE)
    ours = gloo.run(pp_size, train_ours, config, initial)
    *others, plain = gloo.run(pp_size, train_plain, config, initial, True)
    assert others == [[]] * (pp_size - 1)
    assert len(plain) == NUM_STEPS
    for losses in ours:
        # fp32 sums of 200 token losses of order 4, added in another order.
        np.testing.assert_allclose(losses, plain, rtol=1e-6)
    assert np.abs(np.diff(plain)).min() > 1e-3  # the weights moved
    # Without its reset flags, Megatron's documents see each other: that is another loss.
    *_, leaking = gloo.run(pp_size, train_plain, config, initial, False)
    assert not np.isclose(leaking, plain, rtol=1e-4).any()
