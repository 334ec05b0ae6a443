"""The public Python API: plan the steps of a corpus, evaluate a packing, simulate a step.

``import megatron_wlb`` offers these names and loads this module when one of them is used first.
Nothing here needs torch or a GPU. ``docs/python.md`` shows each function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost import (
    AnalyticModel,
    Cost,
    DocumentCost,
    Execution,
    Parallelism,
    load_hardware,
)
from megatron_wlb.cost.cost_files import read_cost
from megatron_wlb.cost.hardware import LEAST, MOST, hardware_names
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.cost.step_costs import StageCosts, StepCosts
from megatron_wlb.data.arrays import array_of
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.data.corpus import Corpus
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.data.lengths import sample_lengths
from megatron_wlb.data.targets import targets_of, write_targets
from megatron_wlb.errors import ConfigError, WLBError
from megatron_wlb.plan import Document, MicroBatchPlan, Span, StepPlan
from megatron_wlb.plan.sharding import length_multiple
from megatron_wlb.plan.sharding.select import Mode
from megatron_wlb.planning.balance.samples import plan_step
from megatron_wlb.planning.balance.trees import SharedPrefixes
from megatron_wlb.planning.from_config import Split
from megatron_wlb.planning.models import load_model, model_names
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.packing.metrics import PackingMetrics
from megatron_wlb.planning.packing.reference import REFERENCE_COST
from megatron_wlb.planning.run import Run, Workload
from megatron_wlb.reading import (
    MOST_MICRO_BATCHES,
    MOST_TOKENS,
    named_file,
    real_number,
    shown,
    whole_number,
)
from megatron_wlb.settings.config import DEFAULT_MACHINE
from megatron_wlb.simulator.step import Simulator
from megatron_wlb.simulator.step_timeline import StepTimeline
from megatron_wlb.simulator.trial import packed

__all__ = [
    "Document", "DocumentCost", "MicroBatchPlan", "PackingMetrics", "Parallelism", "Span",
    "StepPlan", "StepTimeline", "WLBError", "evaluate_packing", "model_cost", "plan_batch",
    "plan_steps", "sample_lengths", "simulate_step", "write_targets",
]  # fmt: skip

Documents: TypeAlias = str | Path | Sequence[int] | npt.NDArray[np.integer[Any]]
"""The prefix of a ``.bin/.idx`` corpus, or the documents' lengths in tokens."""

Stamp: TypeAlias = tuple[str, int, int]
"""A file's path, when it was changed (ns), and its size in bytes."""

ONE_DEVICE = Parallelism()
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "cost": (Cost, "a cost, such as model_cost makes"),
    "layout": (Parallelism, "a Parallelism"),
    "plan": (StepPlan, "a StepPlan, one that plan_steps yields"),
    "packing": (str, "a name, such as hold"),
    "model": ((str, Path), "a name, such as 7b, or a file"),
    "hardware": ((str, Path), "a name, such as h100-sxm, or a file"),
}
"""What an argument has to be, and how errors say it."""


def plan_steps(
    documents: Documents,
    *,
    window: int,
    num_micro_batches: int,
    packing: str = "hold",
    max_tokens: int | None = None,
    cost: Cost = REFERENCE_COST,
    layout: Parallelism = ONE_DEVICE,
    seed: int = 1,
    num_epochs: int | None = 1,
) -> Iterator[StepPlan]:
    """Plans one step after another until every document has run.

    Args:
        documents: the prefix of a corpus, or the documents' lengths in tokens.
        window: training's ``--seq-length`` in tokens; longer documents are split.
        num_micro_batches: N, the micro-batches of a step over all data-parallel ranks.
        packing: ``original``, ``fixed-greedy``, ``fixed-solver``, ``wlb``, ``hold`` or ``slim``;
            ``NAME:K`` sets the number of global batches, queues, steps to look ahead, or units.
        max_tokens: S_max, the most tokens of a micro-batch; two windows if not given.
        cost: what balance is measured by; :func:`model_cost` makes one for a model.
        layout: its ``dp_size`` ranks share a step; TP and CP decide what lengths are padded to.
            Slices run alike on ranks that exchange tokens with each other's experts (``ep_size``).
        seed: of the order in which documents arrive.
        num_epochs: passes over the documents; None never ends.

    Raises:
        WLBError: documents that cannot be read or placed, or settings that cannot work.
    """
    _check(layout=layout)
    layout.check_experts()
    source = _source(documents)
    multiple = length_multiple(layout.tp_size, layout.cp_size, layout.sequence_parallel)
    setting, workload = _workload(
        source, window, num_micro_batches, packing, max_tokens, cost, seed, multiple
    )
    corpus = Corpus(source.title, source.lengths(0, window=window, seed=seed), None, None)
    corpora = Corpora([corpus], 0, {"train": [(0, len(corpus.lengths))]})
    split = Split(corpora, "train", num_epochs)
    workload = replace(workload, source=split, layout=layout, alike=layout.expert_replicas)
    return iter(workload.planner(setting).next_plan, None)


def plan_batch(
    lengths: Sequence[int] | npt.NDArray[np.integer[Any]],
    *,
    max_tokens: int,
    layout: Parallelism = ONE_DEVICE,
    cost: Cost | str | Path = REFERENCE_COST,
    hardware: str = DEFAULT_MACHINE,
    slices: bool = False,
    num_micro_batches: int | None = None,
    equal_numbers: bool = True,
    groups: npt.ArrayLike | None = None,
    weights: Sequence[npt.ArrayLike] | None = None,
    memory_gib: float | None = None,
    shared: Sequence[tuple[int, int] | None] | Sequence[npt.ArrayLike] | None = None,
) -> StepPlan:
    """Plans one step of given samples, of which none waits: for fine-tuning and RL.

    :attr:`MicroBatchPlan.samples` are the numbers in ``lengths`` of what a micro-batch runs. Equal
    arguments give equal plans on every rank.

    Args:
        lengths: tokens of each sample.
        max_tokens: S_max, the most tokens of a micro-batch, padding included; its TP × CP ranks
            share them.
        layout: its ``dp_size`` ranks share the step. Its pipeline decides how many micro-batches
            are fastest. Slices run alike on ranks that exchange tokens with each other's experts.
        cost: what balance is measured by: the name of a model, which knows its stages best, a cost,
            or the path of a file of costs.
        hardware: a name or a file, for a model's name.
        slices: cut heavy samples into slices of like work. :attr:`StepPlan.chains` are their order
            (``docs/slices.md``).
        num_micro_batches: of each data-parallel rank, some of which may be empty; with ``slices``
            about so many. Chosen by simulated time if not given.
        equal_numbers: whether all ranks have as many micro-batches, as those must that exchange
            tokens with experts; not read with ``slices``.
        groups: a number for each sample; those with one number run on one data-parallel rank.
        weights: what each token of each sample counts in the loss, ``[length]``, 0 where it is no
            target. Plans are the same; they count targets by it. None: each token counts 1.
        memory_gib: 2³⁰ bytes of a device that no step may exceed, as predicted for ``cost``, which
            must be a model's name. Of slices some micro-batches are recomputed for it
            (:attr:`MicroBatchPlan.recomputed`).
        shared: samples that begin alike share what they have in common inside a micro-batch, and
            with ``slices`` in trees over several (:attr:`MicroBatchPlan.sharing`), where that is
            faster. Of each an earlier sample and how many leading tokens both have, ``(0, 512)``,
            or None; or the token ids of all, ``[length]``, to find what is equal. Layers that
            predict further ahead are minded if ``cost`` names a model. None: nothing is shared.

    Raises:
        WLBError: a whole sample above ``max_tokens``, too few micro-batches, lengths that are none,
            groups of slices, weights of other lengths or below 0, a step that does not fit, unequal
            numbers where replicas exchange tokens, prefixes that are none, or shared by groups.
    """
    _check(layout=layout)
    layout.check_experts()
    if not (equal_numbers or slices) and layout.expert_replicas > 1:
        raise ConfigError(
            f"equal_numbers is False, but {layout.expert_replicas} data-parallel ranks exchange "
            "tokens with each other's experts in each micro-batch; leave it True"
        )
    stored = LengthSource.of_lengths("lengths", array_of(lengths)).stored
    assert stored is not None
    sizes: list[int] = stored.tolist()
    multiple = length_multiple(layout.tp_size, layout.cp_size, layout.sequence_parallel)
    max_tokens, number = whole_number("max_tokens", max_tokens, multiple, MOST_TOKENS), None
    if num_micro_batches is not None:
        number = whole_number("num_micro_batches", num_micro_batches, 1, MOST_MICRO_BATCHES)
    memory = None
    if memory_gib is not None:
        memory_gib = real_number("memory_gib", memory_gib, LEAST, MOST)
        if not isinstance(cost, str):
            raise ConfigError(
                f"memory_gib is {memory_gib:g}, and cost names no model; give a name, such as 7b"
            )
    model, prefixes = None, None if shared is None else SharedPrefixes.of(shared, sizes)
    if isinstance(cost, str):
        run = _run(cost, layout, hardware, max_tokens)
        if memory_gib is not None:
            memory = replace(run, memory_gib=memory_gib).memory_limit
        cost, costs, model = run.cost, run.costs, run.memory
    else:
        cost = read_cost(cost, "cost") if isinstance(cost, Path) else cost
        _check(cost=cost)
        costs = StepCosts(StageCosts.by_layers(cost, layout))
    targets = None if weights is None else targets_of("the batch", weights, stored)
    return plan_step(
        sizes, max_tokens, cost, costs, layout,
        slices=slices, number=number, equal=equal_numbers, groups=groups,
        targets=targets, memory=memory, alike=layout.expert_replicas,
        shared=prefixes, model=model,
    )  # fmt: skip


def evaluate_packing(
    documents: Documents,
    *,
    window: int,
    num_micro_batches: int,
    packing: str = "hold",
    max_tokens: int | None = None,
    cost: Cost = REFERENCE_COST,
    seed: int = 1,
    num_steps: int = 200,
) -> PackingMetrics:
    """Measures the balance and the delay of a packing over ``num_steps`` steps after a warm-up.

    The arguments are those of :func:`plan_steps`. Documents repeat where there are too few.

    Raises:
        WLBError: documents that cannot be read or placed, or settings that cannot work.
    """
    setting, workload = _workload(
        _source(documents), window, num_micro_batches, packing, max_tokens, cost, seed
    )
    return packed(workload, setting, num_steps)


def simulate_step(
    plan: StepPlan,
    layout: Parallelism = ONE_DEVICE,
    *,
    model: str = "7b",
    hardware: str = DEFAULT_MACHINE,
    sharding: Mode = "adaptive",
) -> StepTimeline:
    """Simulates when each rank runs what in a planned step, what it waits for and what it holds.

    Args:
        plan: a step planned for this layout.
        layout: how the model is divided over devices.
        model: a name (``550m``, ``7b``, ``mixtral-8x7b``, …) or a YAML file of training settings.
        hardware: a name (``h100-sxm``, ``h200``, ``a100``, ``cpu``) or a hardware file.
        sharding: how context-parallel ranks share a micro-batch.

    Raises:
        WLBError: an unknown model or hardware, or a layout that does not divide them or the plan.
    """
    _check(plan=plan, layout=layout, model=model, hardware=hardware)
    scenario = _run(model, layout, hardware, max(m.padded_length for m in plan))
    choose_each = scenario.choose_each(sharding)
    scale = [
        list(map(scenario.attention_scale, rows, choose_each(rows)))
        for rows in ([m.lengths for m in rank] for rank in plan.micro_batches)
    ]
    return Simulator(scenario.costs, layout, memory=scenario.memory).step(plan, scale)


def model_cost(
    model: str, layout: Parallelism = ONE_DEVICE, *, hardware: str = DEFAULT_MACHINE
) -> Cost:
    """Predicts what a document takes in the whole model, from the rates of the hardware.

    The arguments are those of :func:`simulate_step`.
    """
    _check(layout=layout, model=model, hardware=hardware)
    sizes = padded_vocabulary(load_model(model), layout.tp_size)
    return AnalyticModel(sizes, Execution(layout), load_hardware(hardware)).cost()


def _run(model: str | Path, layout: Parallelism, hardware: str | Path, window: int) -> Run:
    files = (
        (named_file("model", str(model), model_names), model),
        (named_file("hardware", str(hardware), hardware_names), hardware),
    )
    return _run_of(*((str(name), _stamp(path)) for path, name in files), layout, window)


@lru_cache(maxsize=16)
def _run_of(
    model: tuple[str, Stamp], hardware: tuple[str, Stamp], layout: Parallelism, window: int
) -> Run:
    """A run of files that have not changed: reading them takes longer than most plans."""
    shape = padded_vocabulary(load_model(model[0]), layout.tp_size)
    number = layout.dp_size * layout.pp_size
    return Run(shape, Execution(layout), load_hardware(hardware[0]), window, number)


def _stamp(path: Path) -> Stamp:
    """A file's path, time and size; zeros for one that cannot be read, as a later error says."""
    try:
        found = path.resolve().stat()
    except OSError:
        return str(path), 0, 0
    return str(path.resolve()), found.st_mtime_ns, found.st_size


def _check(**given: object) -> None:
    """Raises :class:`ConfigError` for an argument of another kind than :data:`_KINDS` says."""
    for name, value in given.items():
        kinds, said = _KINDS[name]
        if not isinstance(value, kinds):
            raise ConfigError(f"{name} is {shown(value)}; give {said}")


def _source(documents: Documents) -> LengthSource:
    if isinstance(documents, str | Path):
        return LengthSource.of_corpora([str(documents)])
    return LengthSource.of_lengths("lengths", array_of(documents))


def _workload(
    source: LengthSource,
    window: int,
    num_micro_batches: int,
    packing: str,
    max_tokens: int | None,
    cost: Cost,
    seed: int,
    multiple: int = 1,
) -> tuple[PackingSettings, Workload]:
    _check(packing=packing, cost=cost)
    window = whole_number("window", window, 2, MOST_TOKENS)
    num_micro_batches = whole_number("num_micro_batches", num_micro_batches, 1)
    seed = whole_number("seed", seed, 0, 2**32 - 1)
    source.check(window=window, long_documents="split")
    setting = PackingSettings.parse(
        packing, window, 2 * window if max_tokens is None else max_tokens
    )
    workload = Workload(source, window, num_micro_batches, cost, seed, length_multiple=multiple)
    workload.check([setting])
    return setting, workload
