"""What a step is made of, in µs: each stage's forwards and backwards, and all that is between.

Collectives of tensor and context parallelism are inside a stage's time
(:mod:`megatron_wlb.cost.analytic`).

Legend: ``S`` virtual stages (chunk ``c`` of rank ``r`` is ``c · PP + r``), ``N`` micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.analytic import AnalyticModel
from megatron_wlb.cost.document import LEAST_US, DocumentCost, Work, unseen
from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.cost.hardware import Hardware
from megatron_wlb.cost.memory import MemoryModel
from megatron_wlb.cost.schedule.graph import Floats, Graph
from megatron_wlb.cost.schedule.hosting import Copies
from megatron_wlb.cost.shape import Parallelism
from megatron_wlb.cost.slices import HOST, LAYERS, MLPS, PrefixCosts, Unit, UnitTable
from megatron_wlb.cost.workspace import FP32
from megatron_wlb.errors import ConfigError

BACKWARD_OVERHEAD = 2 / 3
"""Backward's share of the time that a micro-batch takes besides its documents."""

BUCKET_PARAMETERS = 40_000_000
"""Megatron reduces the first stage's gradients in buckets of so many, or of a million a DP rank if
that is more; those of every other stage, whose reduction others hide, at once."""

UPDATE_BYTES = 38
"""A parameter's traffic in Adam's update: both moments and the master weight read and written
(24), the gradient read for its norm and for the update and set to zero (12), the weight (2)."""


class StageCost(Protocol):
    """What a stage's cost is asked; every :class:`~megatron_wlb.cost.Cost` answers it."""

    def work(self, lengths: Iterable[int]) -> Work:
        """The parts of a micro-batch's forward and backward."""
        ...


@dataclass(frozen=True)
class HostLink:
    """The way of activations to the host's memory, and back."""

    memory: MemoryModel
    """The run's: what goes of each stage."""
    gb_s: float
    """10⁹ B/s each way."""

    def times_us(self, units: Sequence[Unit]) -> Floats:
        """Time of the copy of each micro-batch, one way, in each virtual stage: ``[S, N]``."""
        tapes = {id(tape): tape for own in self.memory.tapes for tape in own}
        table = UnitTable.of(units)
        known = {name: self.memory.hosted_bytes(tape, table) for name, tape in tapes.items()}
        stages = [known[id(tape)] for own in zip(*self.memory.tapes, strict=True) for tape in own]
        times_us: Floats = np.array(stages) / (self.gb_s * 1e3)
        return times_us

    def copies(self, graph: Graph, units: Sequence[Unit], window_bytes: float) -> Copies | None:
        """The copies of a step of such micro-batches; None where none is hosted. ``window_bytes``
        are of each window for what is on its way.
        """
        hosted = [unit.recomputed == HOST for unit in units]
        if not any(hosted):
            return None
        return graph.copies(self.times_us(units), hosted, window_bytes / (self.gb_s * 1e3))


@dataclass(frozen=True)
class StageCosts:
    """The cost of documents in each virtual stage.

    Raises :class:`ConfigError` without stages.
    """

    stages: tuple[StageCost, ...]
    prefixes: PrefixCosts | None = None
    """What slices take for the rows before them, besides pairs of tokens."""
    launches_us: tuple[float, ...] = ()
    """What the host takes to launch a forward and a backward in each stage. All passes of a stage
    together take no less: the host runs ahead of the device, so that long ones hide short ones."""
    host: HostLink | None = None
    """How activations go to the host's memory, and come back. None where that is not known."""
    ends_us: tuple[float, ...] = ()
    """µs a token of each stage's forward that a recomputed micro-batch does not run once more: the
    embedding and the LM head. None if not given."""
    mlps_us: tuple[float, ...] = ()
    """µs a token of the dense MLPs in each stage's forward. All of it if not given."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("stage costs: there are none; give one for each virtual stage")

    @classmethod
    def even(cls, cost: StageCost, num_stages: int) -> StageCosts:
        """Gives every stage an equal share of a cost of the whole model.

        For a cost that was measured on the whole: where embedding and LM head weigh is not in it.
        """
        return cls.shared(cost, [1 / num_stages] * num_stages)

    @classmethod
    def by_layers(cls, cost: StageCost, layout: Parallelism) -> StageCosts:
        """Gives every stage its layers' share of such a cost."""
        if layout.stage_layers is None:
            return cls.even(cost, layout.num_stages)
        num_layers = sum(layout.stage_layers)
        return cls.shared(cost, [layers / num_layers for layers in layout.stage_layers])

    @classmethod
    def shared(cls, cost: StageCost, shares: Sequence[float]) -> StageCosts:
        """Divides a cost of the whole model in shares, such as layers of a stage ÷ all layers."""
        for share in shares:
            if not share >= 0:
                raise ConfigError(f"a stage's share of the model is {share}; give at least 0")
        number = len(fields(DocumentCost)) - 1
        parts = {share: _part(cost, *[share] * number) for share in shares}
        return cls(tuple(parts[share] for share in shares))

    @classmethod
    def spread(cls, cost: StageCost, model: AnalyticModel) -> StageCosts:
        """Spreads a cost of the whole model over the stages as ``model`` predicts its parts to be.

        Layers, embedding and LM head weigh as they do there, attention and all else apart; what a
        micro-batch takes besides its documents is spread evenly.
        """
        whole, stages = model.cost(), model.stage_costs()
        if whole.reach_tokens is not None and not isinstance(cost, DocumentCost):
            known = {stage: _Like(cost, stage, whole, 1 / len(stages)) for stage in set(stages)}
            return cls.of_model([known[stage] for stage in stages], model)
        names = [f.name for f in fields(DocumentCost)][:-1]
        parts: dict[tuple[float, ...], StageCost] = {}
        result = []
        for stage in stages:
            shares = tuple(
                1 / len(stages)
                if name == "micro_batch_us"
                else getattr(stage, name) / (getattr(whole, name) or 1.0)
                for name in names
            )
            if shares not in parts:
                parts[shares] = _part(cost, *shares)
            result.append(parts[shares])
        return cls.of_model(result, model)

    @classmethod
    def of_model(
        cls, stages: Sequence[StageCost], model: AnalyticModel, launches_us: tuple[float, ...] = ()
    ) -> StageCosts:
        """Costs of stages, and what ``model`` predicts of slices and of passes that run again."""
        gb_s = model.hardware.host_link_gb_s
        link = HostLink(MemoryModel(model.shape, model.execution), gb_s) if gb_s else None
        more = link, model.ends_us(), model.mlps_us()
        return cls(tuple(stages), model.prefix_costs(), launches_us, *more)

    def times_us(
        self,
        micro_batches: Sequence[Sequence[int]],
        attention_scale: npt.ArrayLike | None = None,
        units: UnitTable | None = None,
        branches: Sequence[Sequence[tuple[int, int]]] = (),
    ) -> Floats:
        """Times of forwards and backwards, ``[2, S, N]``.

        The pairs of a document's slices add up to the document's, exactly; :attr:`prefixes` says
        what the rows before a slice take besides. All else goes by the tokens that run, so that
        what a micro-batch takes besides them counts once a slice.

        Args:
            micro_batches: lengths of each micro-batch's attention segments.
            attention_scale: ``[N]``, or ``[2, N]`` for forward and backward: by how much the
                attention of the slowest context-parallel rank is more than an even share. Keys of
                slices that ran before are even shares: each rank has as many queries.
            units: the slice that is each micro-batch's first segment, what of it runs once more,
                and the data-parallel ranks that run it together: each has an even share of its
                tokens and pairs, and all of its keys and values, unless they divide these. Without
                them micro-batches are of whole documents, and run alone and once.
            branches: ``[N]`` lists of segments that attend to rows of others: how many these are,
                and the segment's own length. Where there are any, the start of ``units`` is how
                many rows other micro-batches have run of these. None if not given.
        """
        num = len(micro_batches)
        tokens = np.array([sum(lengths) for lengths in micro_batches], dtype=np.float64)
        scale = np.ones((2, num))
        if attention_scale is not None:
            scale = np.broadcast_to(np.asarray(attention_scale, dtype=np.float64), (2, num))
        of = UnitTable.starting(np.zeros(num)) if units is None else units
        merged, rows = of.num_ranks, of.start
        own_tokens, scale = tokens / merged, scale / merged
        idle = np.ones(num)
        if self.prefixes is not None:
            for at in np.flatnonzero(rows).tolist():
                lengths = micro_batches[at]
                queries = sum(lengths) if branches and branches[at] else lengths[0]
                idle[at] = self.prefixes.idle(queries / merged[at])
        starts = rows.astype(np.int64).tolist()
        keys: list[Sequence[tuple[int, int]]] = [
            (branches and branches[at]) or ([(start, micro_batches[at][0])] if start else [])
            for at, start in enumerate(starts)
        ]
        given = micro_batches, scale, keys, np.stack([idle, np.ones(num)]) / merged
        squares = _pairs(*given, lambda length: length * length)
        saved: dict[int | None, Floats] = {None: 0 * squares}  # by reach
        result = np.empty((2, len(self.stages), num))
        seen: dict[int, Floats] = {}  # stages with one and the same cost
        for stage, cost in enumerate(self.stages):
            if isinstance(cost, DocumentCost):
                overhead_us, reach = cost.micro_batch_us, cost.reach_tokens
                if reach not in saved:
                    beyond = partial(unseen, reach_tokens=reach)
                    saved[reach] = _pairs(*given, beyond)
                forward_us, _ = cost.attention_us(squares[0], saved[reach][0])
                _, backward_us = cost.attention_us(squares[1], saved[reach][1])
                result[0, stage] = (
                    cost.forward_linear_us * own_tokens
                    + forward_us
                    + (1 - BACKWARD_OVERHEAD) * overhead_us
                )
                result[1, stage] = (
                    cost.backward_linear_us * own_tokens
                    + backward_us
                    + BACKWARD_OVERHEAD * overhead_us
                )
                continue
            if id(cost) not in seen:
                seen[id(cost)] = _times(cost, *given)
            result[:, stage] = seen[id(cost)]
        if self.prefixes is not None:
            result[1] += np.outer(self.prefixes.gradient_us, rows)
            blocks = [int(ranks).bit_length() - 1 for ranks in merged.tolist()]
            if any(blocks):
                rates = [self.prefixes.merged_us[block] for block in blocks]
                result += np.array(rates).T * tokens
            if of.divided.any():
                shared = [self.prefixes.divided_us[block] for block in blocks]
                result += np.array(shared).transpose(1, 2, 0) * (rows * of.divided)
        if of.recomputed.any():
            result[1] += self.again_us(result[0], own_tokens, of.recomputed)
        if self.launches_us:
            taken_us = np.maximum(result.sum(axis=(0, 2)), LEAST_US)
            result *= np.maximum(1, num * np.array(self.launches_us) / taken_us)[:, None]
        return result

    def again_us(self, forward_us: Floats, tokens: Floats, recomputed: npt.ArrayLike) -> Floats:
        """What runs forward once more takes, ``[S, N]``, by the forwards and the tokens of a rank.

        ``recomputed`` is that of each unit, or the same of all.
        """
        again = np.asarray(recomputed)
        layers_us = np.maximum(0, forward_us - np.outer(self.ends_us or [0.0], tokens))
        mlps_us = np.outer(self.mlps_us, tokens) if self.mlps_us else layers_us
        taken_us: Floats = (again == LAYERS) * layers_us + (again == MLPS) * mlps_us
        return taken_us


def _pairs(
    micro_batches: Sequence[Sequence[int]],
    scale: Floats,
    keys: Sequence[Sequence[tuple[int, int]]],
    keys_scale: Floats,
    of: Callable[[int], int],
) -> Floats:
    """Sums ``of(length)`` over the documents of each micro-batch, for both passes: ``[2, N]``.

    ``keys`` are those before a segment, and its length, of each that has any: of slices that ran
    before, or shared. ``keys_scale`` ``[2, N]`` is the scale of their part, and in backward a
    rank's share of the micro-batch.
    """
    pairs = [sum([of(length) for length in lengths]) for lengths in micro_batches]
    # What the document has up to here and had before, of which the length's own is counted.
    before = [sum([of(num + n) - of(num) - of(n) for num, n in own]) for own in keys]
    result: Floats = np.array(pairs, dtype=np.float64) * scale
    return result + np.array(before, dtype=np.float64) * keys_scale


def _times(
    cost: StageCost,
    micro_batches: Sequence[Sequence[int]],
    scale: Floats,
    keys: Sequence[Sequence[tuple[int, int]]],
    keys_scale: Floats,
) -> Floats:
    """As :meth:`StageCosts.times_us` of one stage: ``[2, N]``."""
    rows = []
    for at, lengths in enumerate(micro_batches):
        work = cost.work(lengths)
        forward_us = work.forward_attention_us * float(scale[0, at])
        backward_us = work.backward_attention_us * float(scale[1, at])
        forward_scale, share = keys_scale[:, at].tolist()
        for num, own in keys[at]:  # what it takes more than as a document of its own
            whole, *parts = (cost.work([n]) for n in (num + own, num, own))
            forward_us += forward_scale * (
                whole.forward_attention_us - sum(part.forward_attention_us for part in parts)
            )
            backward_us += share * (
                whole.backward_attention_us - sum(part.backward_attention_us for part in parts)
            )
        rows.append(
            (
                share * work.forward_linear_us
                + forward_us
                + work.overhead_us * (1 - BACKWARD_OVERHEAD),
                share * work.backward_linear_us
                + backward_us
                + work.overhead_us * BACKWARD_OVERHEAD,
            )
        )
    return np.array(rows, dtype=np.float64).T


@dataclass(frozen=True, slots=True)
class _Part:
    """Shares of a cost that cannot be scaled itself."""

    cost: StageCost
    shares: tuple[float, ...]
    """Shares of linear and attention forward, both backward, and of the overhead."""

    def work(self, lengths: Iterable[int]) -> Work:
        work = self.cost.work(lengths)
        parts = (getattr(work, f.name) for f in fields(Work))
        return Work(*(share * part for share, part in zip(self.shares, parts, strict=True)))


@dataclass(frozen=True, slots=True)
class _Like:
    """The part of a cost that a stage has by a model's, where that depends on the lengths: stages
    have unlike shares of layers with a sliding window.
    """

    cost: StageCost
    stage: DocumentCost
    whole: DocumentCost
    overhead: float

    def work(self, lengths: Iterable[int]) -> Work:
        lengths = list(lengths)
        work, stage, whole = (of.work(lengths) for of in (self.cost, self.stage, self.whole))
        parts = {"overhead_us": self.overhead * work.overhead_us}
        for name in [f.name for f in fields(Work)][:-1]:
            share = getattr(stage, name) / (getattr(whole, name) or 1.0)
            parts[name] = share * getattr(work, name)
        return Work(**parts)


def _part(cost: StageCost, *shares: float) -> StageCost:
    """``shares`` are of the coefficients of a :class:`DocumentCost`."""
    for share in shares:
        if not (math.isfinite(share) and share >= 0):
            raise ConfigError(f"a stage's share of the model is {share}; give a positive number")
    if isinstance(cost, DocumentCost):
        return cost.scaled(*shares)
    return _Part(cost, shares[: len(fields(Work))])


@dataclass(frozen=True)
class StepCosts:
    """All that a step's time is made of.

    Raises :class:`ConfigError` for times that are negative or not finite, or not one for each
    stage or rank.
    """

    stages: StageCosts
    p2p_latency_us: float = 0.0
    """Time of a message to the next or previous stage besides what its tokens take."""
    p2p_us_per_token: float = 0.0
    """Time to send a token of the micro-batch, padding included."""
    reduce_us: tuple[float, ...] = ()
    """Time to reduce each virtual stage's gradients over the data-parallel (and CP) ranks."""
    reduce_buckets: tuple[int, ...] = ()
    """Number of parts, each of which can start when its gradients are there; 1 if not given."""
    overlap_reduce: bool = False
    """Whether parts start during the last backward (``--overlap-grad-reduce``), or all together
    when the rank's last backward is done."""
    embedding_us: float = 0.0
    """Time to add up the gradients of an embedding that is on the first and the last rank."""
    update_us: tuple[float, ...] = ()
    """Time of the optimizer's update on each pipeline rank, gathering weights included."""
    fixed_us: float = 0.0
    """All other time once a step, on all ranks."""
    experts: ExpertGroups | None = None
    """Which replicas exchange tokens with experts; None where each has all of them."""

    def __post_init__(self) -> None:
        for f in fields(self)[1:-1]:
            for number in np.ravel(getattr(self, f.name)).tolist():
                if not (math.isfinite(number) and number >= 0):
                    raise ConfigError(
                        f"step costs: {f.name} is {number}; give a finite number, not negative"
                    )
        for name in ("reduce_us", "reduce_buckets"):
            if len(getattr(self, name)) not in (0, len(self.stages.stages)):
                raise ConfigError(
                    f"step costs: {name} has {len(getattr(self, name))} entries; give one for each "
                    f"of the {len(self.stages.stages)} virtual stages"
                )

    def p2p_us(self, num_tokens: Sequence[float]) -> Floats:
        """Time to bring each micro-batch's tensor to another stage."""
        tokens = np.asarray(num_tokens, dtype=np.float64)
        return self.p2p_latency_us + self.p2p_us_per_token * tokens


def analytic_costs(model: AnalyticModel, memory: MemoryModel) -> StepCosts:
    """Costs of a step from first principles: one model, its execution and a machine.

    ``memory`` says how large weights and optimizer state are; its execution is ``model``'s.
    Megatron's order of ranks is meant: TP, CP, DP, then PP outermost, so that neighbours in the
    pipeline are ``TP · CP · DP`` devices apart. Links are full in both directions and shared by
    nobody else.

    Raises :class:`ConfigError` for a layout that the model does not divide over.
    """
    p, machine = model.parallelism, model.hardware
    p.check_experts(model.shape)
    replicas = p.tp_size * p.cp_size * p.dp_size
    hidden_bytes = model.shape.hidden_size * model.element_bytes / p.cp_size / p.sequence_shards
    num_reduced = p.cp_size * p.dp_size
    parameters = [memory.stage_parameters(stage) for stage in range(p.num_stages)]
    experts = [memory.expert_parameters(stage) for stage in range(p.num_stages)]
    bucket = max(BUCKET_PARAMETERS, 1_000_000 * p.dp_size)
    passes = 1 if memory.execution.distributed_optimizer else 2

    def reduce_us(num: int, num_ranks: int) -> float:
        ring = (num_ranks - 1) / num_ranks * passes
        return _collective_us(machine, ring * num * FP32, num_ranks, replicas)

    # Layers that predict further ahead have a copy of the embedding, tied or not.
    tied = (model.shape.tied_embeddings or model.shape.num_ahead > 0) and p.pp_size > 1
    embedding = model.shape.head_linear_parameters // p.tp_size * FP32
    return StepCosts(
        StageCosts.of_model(model.stage_costs(), model, model.launches_us()),
        p2p_latency_us=machine.latency_us if p.pp_size > 1 else 0.0,
        p2p_us_per_token=machine.transfer_us(hidden_bytes, 2 * replicas) if p.pp_size > 1 else 0.0,
        reduce_us=tuple(
            reduce_us(num, num_reduced) + reduce_us(own, p.expert_dp_size)
            for num, own in zip(parameters, experts, strict=True)
        ),
        reduce_buckets=(max(1, -(-parameters[0] // bucket)), *[1] * (p.num_stages - 1)),
        overlap_reduce=model.execution.overlap_grad_reduce,
        embedding_us=_collective_us(machine, embedding, 2 if tied else 1, p.pp_size * replicas),
        update_us=tuple(
            _update_us(machine, memory, sum(parameters[rank :: p.pp_size]), num_reduced, replicas)
            + _update_us(
                machine, memory, sum(experts[rank :: p.pp_size]), p.expert_dp_size, replicas
            )
            for rank in range(p.pp_size)
        ),
        experts=ExpertGroups.of(model),
    )


def _collective_us(machine: Hardware, num_bytes: float, num_ranks: int, num_devices: int) -> float:
    if num_ranks == 1 or not num_bytes:  # such as a stage without weights
        return 0.0
    return machine.latency_us + machine.transfer_us(num_bytes, num_devices, num_ranks)


def _update_us(
    machine: Hardware, memory: MemoryModel, parameters: int, num_reduced: int, replicas: int
) -> float:
    num_shards = num_reduced if memory.execution.distributed_optimizer else 1
    update_us = machine.memory_us(UPDATE_BYTES * parameters / num_shards)
    if num_shards == 1:
        return update_us
    gathered = memory.element_bytes * parameters * (num_shards - 1) / num_shards
    return update_us + _collective_us(machine, gathered, num_shards, replicas)
