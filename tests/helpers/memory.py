"""Measures the memory of a training step on one rank."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

from _quickstart.live_bytes import LiveBytes, step_bytes
from torch.utils._python_dispatch import _disable_current_modes

from helpers.plans import scatter_for
from helpers.ranks import build_runner, build_trainer
from helpers.workload import Workload, make_workload
from megatron_wlb.cost.slices import HOST, LAYERS, NOTHING, Recomputed
from megatron_wlb.plan import MicroBatchPlan, Span, StepPlan, TreePart
from megatron_wlb.plan.sharding import Sharding
from megatron_wlb.planning.balance.trees import SharedPrefixes, part_of
from megatron_wlb.settings.config import Config

WINDOW_BYTES = 300_000.0
"""Of each window, where micro-batches wait in the host's memory."""
PROMPT = 140
"""Tokens that samples share."""
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


@contextlib.contextmanager
def _without_slabs(live: LiveBytes) -> Iterator[None]:
    """What is the host's memory is not counted."""
    from megatron_wlb.runtime.stepping import offload

    reserve = offload.Slabs.reserve

    def hidden(slabs: offload.Slabs, number: int) -> None:
        with _disable_current_modes():
            reserve(slabs, number)
            slabs.give([live.leave_out(slab) for slab in slabs.take(slabs.free_bytes)])

    with mock.patch.object(offload.Slabs, "reserve", hidden):
        yield


def measure_step(
    config: Config,
    lengths: Sequence[Sequence[int]],
    pad: int,
    chains: Sequence[int] = (),
    recomputed: Collection[int] = (),
    divided: bool = False,
    what: Recomputed = LAYERS,
) -> MeasuredMemory:
    """Measures a step of given micro-batches, the same ones on all data-parallel ranks.

    ``lengths`` are those of each micro-batch's documents; ``pad`` tokens of padding follow them.
    The first ones of a chain of several are the slices of one document, whose keys and values are
    ``divided`` over context-parallel ranks or not. ``recomputed`` are numbers of micro-batches, and
    ``what`` of them is.
    """
    units = iter(lengths)
    parts = [[*itertools.islice(units, number)] for number in chains or [1] * len(lengths)]
    every: list[int] = []  # of each chain the document in slices, and then the others
    for chain in parts:
        every += [sum(own[0] for own in chain), *(n for own in chain for n in own[1:])]
    workload = make_workload([every], vocab_size=VOCAB_SIZE)
    documents = iter(workload.steps[0])
    micro_batches: list[MicroBatchPlan] = []
    for chain in parts:
        first, reached = next(documents), 0
        for own in chain:
            spans = [Span(first, reached, reached + own[0])]
            spans += (Span(d, 0, d.length) for d in itertools.islice(documents, len(own) - 1))
            index, reached = len(micro_batches), reached + own[0]
            micro_batches.append(
                MicroBatchPlan(
                    index,
                    tuple(spans),
                    sum(own) + pad,
                    1.0,
                    Sharding("per-document"),
                    recomputed=what if index in recomputed else NOTHING,
                    divided=divided and spans[0].is_slice,
                )
            )
    return measure(config, workload, micro_batches, chains, WINDOW_BYTES if what == HOST else 0.0)


def measure_shared(
    config: Config, answers: Sequence[int], cuts: Sequence[int], pad: int
) -> MeasuredMemory:
    """The same of samples that share a prompt, inside a micro-batch or cut at such rows."""
    micro_batches, chains, workload = sharing(answers, cuts, pad)
    return measure(config, workload, micro_batches, chains, 0.0)


def sharing(
    answers: Sequence[int], cuts: Sequence[int], pad: int
) -> tuple[list[MicroBatchPlan], tuple[int, ...], Workload]:
    """Micro-batches, chains, and samples that share a prompt of :data:`PROMPT` tokens."""
    workload = make_workload([[PROMPT + answer for answer in answers]], vocab_size=VOCAB_SIZE)
    stored = workload.corpus.stored
    for sample in stored[1:]:
        sample[:PROMPT] = stored[0][:PROMPT]
    lengths = list(map(len, stored))
    branches = [None, *[(0, PROMPT)] * (len(stored) - 1)]
    paths = SharedPrefixes.given(branches, lengths).paths(range(len(stored)), lengths, 0)
    num_rows = paths[-1].first + paths[-1].document.length
    made: list[MicroBatchPlan] = []
    for start, stop in itertools.pairwise([0, *cuts, num_rows]):
        spans, shared = part_of(paths, start, stop)
        tree = TreePart(0, start, num_rows) if cuts else None
        shared = shared._replace(tree=tree)
        plan = MicroBatchPlan(len(made), tuple(spans), stop - start + pad, 1.0, sharing=shared)
        made.append(plan)
    return made, (len(made),) if cuts else (), workload


def measure(
    config: Config,
    workload: Workload,
    micro_batches: Sequence[MicroBatchPlan],
    chains: Sequence[int],
    window_bytes: float,
) -> MeasuredMemory:
    """Measures the second of two steps, the same on all data-parallel ranks."""
    with LiveBytes() as live, _without_slabs(live):
        trainer = build_trainer(config, workload)
        runner = trainer.runner
        dp_size = runner.model.groups.dp.size()
        of_ranks = (tuple(chains),) * dp_size if chains else ()
        plan = StepPlan(0, "given", (tuple(micro_batches),) * dp_size, 0, 0, of_ranks)
        plan = dataclasses.replace(plan, window_bytes=window_bytes)
        chunks = runner.model.chunks
        optimizer = trainer.optimizer
        parameters = [p for chunk in chunks for p in chunk.parameters()]
        live.watch(parameters)
        for _ in range(2):  # the first allocates what later ones find
            optimizer.zero_grad()
            _, held, activations = step_bytes(live, runner.model, lambda: runner.run(plan))
            live.reset_peak()
            optimizer.step()
            update = live.peak - held
    return MeasuredMemory(sum(p.numel() for p in parameters), held, activations, update)


def built(configs: Sequence[Config]) -> list[tuple[int, float]]:
    """Parameters of models that one process builds, and FLOPs a token of their forwards' matrix
    products, as torch counts them.
    """
    from megatron.core import parallel_state
    from torch.utils.flop_counter import FlopCounterMode

    found = []
    for config in configs:
        workload = make_workload([[200, 70, 1]], vocab_size=VOCAB_SIZE)
        runner = build_runner(config, workload)
        plan = scatter_for(config, workload, 1, 0)
        with FlopCounterMode(display=False) as counter:
            runner.run(plan, forward_only=True)
        counts = counter.get_flop_counts()["Global"].items()
        flops = sum(num for operation, num in counts if str(operation) == "aten.mm")
        parameters = sum(p.numel() for gpt in runner.model.gpts for p in gpt.parameters())
        found.append((parameters, flops / sum(m.padded_length for m in plan)))
        parallel_state.destroy_model_parallel()
    return found
