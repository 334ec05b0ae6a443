"""Measures the memory of a training step on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from _quickstart.live_bytes import LiveBytes, step_bytes

from helpers.ranks import build_runner
from helpers.workload import make_workload
from megatron_wlb.plan import MicroBatchPlan, Span, StepPlan
from megatron_wlb.plan.sharding import Sharding
from megatron_wlb.settings.config import Config

VOCAB_SIZE = 500
"""Vocabulary of the documents in :func:`measure_step`."""


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes alive on one rank in a training step that is not the first."""

    num_parameters: int
    held: int
    """Bytes between steps: weights, gradient buffers, optimizer state."""
    activations: int
    """The most that forward and backward added."""
    update: int
    """The most that the optimizer's update added."""


def measure_step(config: Config, lengths: Sequence[Sequence[int]], pad: int) -> MeasuredMemory:
    """Measures a step of given micro-batches, the same ones on all data-parallel ranks.

    ``lengths`` are those of each micro-batch's documents; ``pad`` tokens of padding follow them.
    """
    from megatron_wlb.runtime.stepping.optimizer import build_optimizer

    workload = make_workload(
        [[n for documents in lengths for n in documents]], vocab_size=VOCAB_SIZE
    )
    documents = iter(workload.steps[0])
    micro_batches = []
    for index, own in enumerate(lengths):
        spans = tuple(Span(d, 0, d.length) for d in itertools.islice(documents, len(own)))
        micro_batches.append(
            MicroBatchPlan(index, spans, sum(own) + pad, 1.0, Sharding("per-document"))
        )
    with LiveBytes() as live:
        runner = build_runner(config, workload)
        dp_size = runner.model.groups.dp.size()
        plan = StepPlan(0, "given", (tuple(micro_batches),) * dp_size, 0, 0)
        chunks = runner.model.chunks
        optimizer, _ = build_optimizer(config, runner.model)
        parameters = [p for chunk in chunks for p in chunk.parameters()]
        live.watch(parameters)
        for _ in range(2):  # the first allocates what later ones find
            optimizer.zero_grad()
            held, activations = step_bytes(live, runner, plan)
            live.reset_peak()
            optimizer.step()
            update = live.peak - held
    return MeasuredMemory(sum(p.numel() for p in parameters), held, activations, update)
