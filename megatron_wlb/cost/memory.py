"""Memory of a training step on each pipeline rank, and the longest micro-batch that fits: S_max.

A rank holds its weights, gradients and optimizer state, and the activations of the micro-batches
that are in flight: run forward, not yet backward. What one of them keeps is in
:mod:`megatron_wlb.cost.activations`.

What is counted are the bytes of tensors that are alive. An allocator needs more: blocks are
rounded, and free ones between live ones do not join. Leave room for that in the limit. What is no
tensor (CUDA context, libraries, communication buffers) is in :func:`overhead_gib`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, product
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.activations import ActivationModel
from megatron_wlb.cost.execution import Executed
from megatron_wlb.cost.hardware import Hardware
from megatron_wlb.cost.layers import Layer
from megatron_wlb.cost.schedule.graph import Bools, Floats
from megatron_wlb.cost.schedule.hosting import held_amounts
from megatron_wlb.cost.schedule.order import Action, Columns, columns_of, schedule
from megatron_wlb.cost.shape import Parallelism, Recompute, Stage
from megatron_wlb.cost.slices import HOST, LAYERS, MLPS, SliceTape, Unit, UnitTable
from megatron_wlb.cost.tape import Tape
from megatron_wlb.cost.workspace import FP32
from megatron_wlb.errors import ConfigError

GIB = 2**30
_RECOMPUTES = {MLPS: Recompute("mlp"), LAYERS: Recompute("full", "uniform", 1)}
"""What may be recomputed of single micro-batches."""
_KEPT = 1024
"""Chunks whose tapes are kept for other layouts: a search of layouts has the same ones often."""
MOST_DOUBLINGS = 32
"""S_max is looked for up to so many doublings of the shortest micro-batch."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What a rank holds from the first step to the last."""

    weights: int
    gradients: int
    """The gradient buffer, fp32."""
    optimizer: int
    """Moments, and with bf16 the fp32 master weights; of a parameter store all that it has."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def num_communicators(parallelism: Parallelism, slices: bool = False) -> int:
    """NCCL communicators of a rank between stages, where documents run in ``slices`` or whole: of
    each group in which it has company and that Megatron uses.

    The world, TP, CP, DP, DP × CP (gradients), TP × PP (their norm), PP (the loss; messages of one
    chunk). Messages of several chunks have a pair for each neighbour, those of slices one for each
    that they come from or go to, forward and backward. Replicas that run documents together have
    one for each number of them, of which one is counted. Some layouts need none of these; others
    (tied embeddings, losses of routers) have more.
    """
    p = parallelism
    groups = [p.tp_size, p.cp_size, p.dp_size * p.cp_size, p.tp_size * p.pp_size, p.pp_size]
    groups.append(p.tp_size * p.cp_size * p.pp_size * p.dp_size)
    if p.cp_size > 1:
        groups.append(p.dp_size)
    if p.ep_size > 1:  # experts, with TP, those of one weight, their gradients, and their norm
        tp_size = p.expert_tp_size
        groups += [p.ep_size, p.ep_size * tp_size, tp_size, p.expert_dp_size]
        groups.append(p.expert_ranks * p.pp_size)
    if slices:
        groups.append(p.dp_size)
    pairs = 0
    if p.pp_size > 1 and slices:
        pairs = 4 if p.num_stages > 2 else 2
    elif p.vpp_size > 1:
        pairs = 2
    return sum(size > 1 for size in groups) + pairs


def overhead_gib(hardware: Hardware, parallelism: Parallelism, slices: bool = False) -> float:
    """2³⁰ bytes of a device that are no tensors: CUDA context and communicators' buffers."""
    number = num_communicators(parallelism, slices)
    return (hardware.context_mib + number * hardware.communicator_mib) / 1024


@lru_cache(maxsize=_KEPT)
def _tape(activations: ActivationModel, stage: Stage) -> Tape:
    return activations.tape(first=stage.first, last=stage.last, layers=stage.layers)


_slice_tape = lru_cache(maxsize=_KEPT)(SliceTape)

Integers: TypeAlias = npt.NDArray[np.int64]
BytesOfUnits: TypeAlias = Mapping[tuple[str, int], Floats]
"""By pass and the id of a chunk's tape, :meth:`MemoryModel.unit_bytes`."""


def around(rows: Floats, in_transit: Floats) -> tuple[Floats, Floats]:
    """The most alive while each action runs, and what is kept after it, ``[actions]`` each.

    ``rows`` ``[actions, 3]`` are what the actions let go of, their own peaks and what they keep.
    """
    let_go, peaks, keeps = rows.T
    # An action's peak contains what it keeps itself, and not what it lets go of.
    kept = np.cumsum(np.stack([-let_go, keeps], axis=1)).reshape(-1, 2)
    return kept[:, 0] + in_transit + peaks, kept[:, 1]


def _arriving(moved: Floats, of_kind: Bools) -> Floats:
    """What the next action of a kind receives, while each action runs."""
    places = np.flatnonzero(of_kind)
    following = np.searchsorted(places, np.arange(len(moved)), side="right")
    arriving: Floats = np.append(moved[places], 0.0)[following]
    return arriving


class ActivationBytes(NamedTuple):
    """Bytes of activations around each action of a rank."""

    peak: list[float]
    """The most alive while it runs."""
    kept: list[float]
    """Kept after it, by the micro-batches in flight."""


@dataclass(frozen=True)
class MemoryModel(Executed):
    """Predicted bytes of tensors alive on each rank. Raises :class:`ConfigError` for a layout that
    the model does not divide over.
    """

    def __post_init__(self) -> None:
        _ = self._stages

    def num_parameters(self, pp_rank: int) -> int:
        """Parameters of all chunks of a pipeline rank, on one of its ranks, experts included."""
        p = self.parallelism
        return sum(
            self.stage_parameters(stage) + self.expert_parameters(stage)
            for stage in range(pp_rank, p.num_stages, p.pp_size)
        )

    @property
    def total_parameters(self) -> int:
        """Parameters of the whole model, each once whatever ranks have copies of it."""
        alone = self.executed(parallelism=Parallelism(), store_ranks=None)
        return alone.num_parameters(0)

    def expert_parameters(self, stage: int) -> int:
        """Parameters of the experts that a rank has of a virtual stage, shared ones left out."""
        has = self._stages[stage]
        return sum(
            num * part.routed_parameters(self)
            for num, layer in has.layers + (self.shape.predictors if has.last else ())
            for part in layer.parts
        )

    def _rank_experts(self, pp_rank: int) -> int:
        p = self.parallelism
        return sum(map(self.expert_parameters, range(pp_rank, p.num_stages, p.pp_size)))

    def stage_parameters(self, stage: int) -> int:
        """Parameters of a virtual stage, on one of its TP ranks, routed experts left out."""
        shape, p = self.shape, self.parallelism
        has = self._stages[stage]
        total = sum(num * self._layer_parameters(layer) for num, layer in has.layers)
        embedding = shape.head_linear_parameters // p.tp_size
        if has.first:
            total += embedding + shape.learned_positions * shape.hidden_size
        if has.last:
            # Tied weights are one tensor only where both ends are on one rank.
            shared = shape.tied_embeddings and p.pp_size == 1
            total += shape.norm_vectors * shape.hidden_size + (0 if shared else embedding)
            # Prediction further ahead has a copy of the embedding there, and three norms a layer.
            if shape.predictors and p.pp_size > 1 and not shape.tied_embeddings:
                total += embedding
            joining = shape.joining_parameters // p.tp_size
            norms = 3 * shape.norm_vectors * shape.hidden_size
            for num, layer in shape.predictors:
                total += num * (joining + norms + self._layer_parameters(layer))
        return total

    def _layer_parameters(self, layer: Layer) -> int:
        norms = len(layer.parts) * self.shape.norm_vectors * self.shape.hidden_size
        return norms + sum(part.parameters(self) for part in layer.parts)

    def state_bytes(self, pp_rank: int) -> StateBytes:
        """Weights, gradients and optimizer state of a pipeline rank."""
        return self._states[pp_rank]

    @cached_property
    def _states(self) -> list[StateBytes]:
        return [self._state(rank) for rank in range(self.parallelism.pp_size)]

    def _state(self, pp_rank: int) -> StateBytes:
        num, moments = self.num_parameters(pp_rank), 2 if self.execution.optimizer == "adam" else 1
        state = FP32 * (moments + self.execution.bf16)
        if self.execution.store_ranks is not None:
            # fp32 weights are in the store also where those of propagation are fp32.
            state = FP32 * (moments + 2)
            optimizer = self._store_shard * state
        else:
            experts = self._rank_experts(pp_rank)
            optimizer = -(-(num - experts) * state // self._state_shards)
            optimizer += -(-experts * state // self._expert_shards)
        weights = num * self.element_bytes + self._copies_bytes(pp_rank)
        return StateBytes(weights, gradients=num * FP32, optimizer=optimizer)

    def _copies_bytes(self, pp_rank: int) -> int:
        """What weights take besides, of layers whose products take another precision."""
        shape, p = self.shape, self.parallelism
        total = 0
        for stage in self._stages[pp_rank :: p.pp_size]:
            further = shape.predictors if stage.last else ()
            joining = [0] * len(stage.layers) + [shape.joining_parameters] * len(further)
            for (num, layer), more in zip(stage.layers + further, joining, strict=True):
                matrix = layer.precisions and layer.precisions.matrix
                if matrix and matrix.weight_bytes is not None:
                    numbers = sum(part.columns + part.rows for part in layer.parts)
                    divided = shape.hidden_size * numbers + layer.inner_weights + more
                    routed = sum(part.routed_parameters(self) for part in layer.parts)
                    own = divided // p.tp_size + routed
                    weights = num * own
                    total += weights * (matrix.weight_bytes - self.element_bytes)
        return total

    def activation_peak_bytes(self, pp_rank: int, lengths: Sequence[int]) -> float:
        """The most that activations and what works on them take at once in a step.

        ``lengths`` are the padded tokens of the rank's micro-batches, in running order.
        """
        actions = self._order(len(lengths))[pp_rank]
        uses = self.activation_bytes(pp_rank, actions, UnitTable.of(map(Unit, lengths)))
        return max(uses.peak, default=0.0)

    def peak_bytes(self, pp_rank: int, lengths: Sequence[int]) -> float:
        """The most bytes alive in a step, its optimizer update included."""
        return self.alive_bytes(pp_rank, self.activation_peak_bytes(pp_rank, lengths))

    def check_state(self, limit_bytes: float) -> None:
        """Raises :class:`ConfigError` where the model does not fit a rank, without activations."""
        for rank in range(self.parallelism.pp_size):
            state = self.state_bytes(rank).total + self.update_bytes(rank)
            if state > limit_bytes:
                raise ConfigError(
                    f"weights, gradients and optimizer of pipeline rank {rank} take "
                    f"{state / GIB:.2f} GiB, above the limit of {limit_bytes / GIB:.2f} GiB; "
                    "use more TP or PP, a distributed optimizer, or raise --wlb-memory-gib"
                )

    def max_tokens(self, limit_bytes: float, num_micro_batches: int, *, multiple: int = 1) -> int:
        """S_max: the longest micro-batch such that a step of ``num_micro_batches`` of that length
        fits ``limit_bytes`` on every rank; a multiple of ``multiple``, and at least that.

        Raises :class:`ConfigError` where the model does not fit, or no micro-batch of ``multiple``.
        """
        # Once the pipeline is full, a longer step only repeats what is in flight.
        group = self.parallelism.group_size or self.parallelism.pp_size
        enough = 4 * max(group, self.parallelism.pp_size)
        num = min(num_micro_batches, enough + (num_micro_batches - enough) % group)
        order = self._order(num)
        self.check_state(limit_bytes)
        left_bytes = [limit_bytes - self.state_bytes(rank).total for rank in range(len(order))]
        beside = [self._beside_per_token(rank, actions) for rank, actions in enumerate(order)]

        def num_fitting(units: npt.NDArray[np.int64]) -> int:
            """How many of these lengths fit, shortest first."""
            num_tokens = units * multiple
            fits = np.ones(len(units), dtype=bool)
            peaks: dict[tuple[str, int], Floats] = {}
            for tapes, own, left in zip(self.tapes, beside, left_bytes, strict=True):
                for (kind, chunk), per_token in own.items():
                    tape = tapes[chunk]
                    if (key := (kind, id(tape))) not in peaks:
                        peaks[key] = tape.peak_bytes(num_tokens, backward=kind == "B")
                    fits &= per_token * num_tokens + peaks[key] <= left
            return int(np.count_nonzero(fits))

        doublings = num_fitting(1 << np.arange(MOST_DOUBLINGS))
        if not doublings:
            raise ConfigError(
                f"not even micro-batches of {multiple} tokens fit {limit_bytes / GIB:.2f} GiB; "
                "recompute activations, use more TP or PP, or raise --wlb-memory-gib"
            )
        fitting, step = 1 << doublings - 1, 1 << doublings - 1
        while step > 1:  # 32 lengths at once take hardly longer than one
            step = max(step // 32, 1)
            fitting += step * num_fitting(fitting + step * np.arange(1, 33))
        return fitting * multiple

    def _beside_per_token(
        self, pp_rank: int, actions: Sequence[Action]
    ) -> dict[tuple[str, int], float]:
        """The most bytes a token that are alive beside a forward or backward of each chunk, where
        all micro-batches are as long.
        """
        saved = np.array([tape.saved_per_token for tape in self.tapes[pp_rank]])
        backward, chunks, _ = columns_of(actions)
        # A backward's own peak contains what it lets go of, and a forward's what it keeps.
        change = np.where(backward, -saved[chunks], saved[chunks])
        kept = np.cumsum(change) - np.where(backward, 0.0, change)
        beside = kept + self._in_transit_bytes(pp_rank, actions, np.ones(len(actions)))
        most = np.zeros((2, len(saved)))
        np.maximum.at(most, (backward, chunks), beside)
        return {("FB"[at], chunk): float(most[at, chunk]) for at, chunk in np.ndindex(most.shape)}

    @property
    def _state_shards(self) -> int:
        p = self.parallelism
        return p.dp_size * p.cp_size if self.execution.distributed_optimizer else 1

    @property
    def _expert_shards(self) -> int:
        return self.parallelism.expert_dp_size if self.execution.distributed_optimizer else 1

    def update_bytes(self, pp_rank: int) -> int:
        """Working memory of the update: torch's Adam takes a root of all second moments at once.

        With a store of parameters also what the exchange needs at least: fp32 gradients of the
        largest layer that go, and as many that come.
        """
        exchange = 0
        if self.execution.store_ranks is not None:
            exchange = 2 * FP32 * max(map(sum, zip(*self.layer_parameters, strict=True)))
        return max(exchange, self._root_bytes(pp_rank))

    @cached_property
    def layer_parameters(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Parameters of each layer of the whole model, routed experts left out, and of its routed
        experts. The first has the embedding, the last one the final norm and the LM head.
        """
        layers = range(self.shape.num_layers)
        alone = self.executed(parallelism=Parallelism(pp_size=len(layers)), store_ranks=None)
        dense, experts = alone.stage_parameters, alone.expert_parameters
        return tuple(map(dense, layers)), tuple(map(experts, layers))

    def _root_bytes(self, pp_rank: int) -> int:
        if self.execution.kernels == "fused" or self.execution.optimizer != "adam":
            return 0
        if self.execution.store_ranks is not None:
            return FP32 * self._store_shard
        experts = self._rank_experts(pp_rank)
        dense = self.num_parameters(pp_rank) - experts
        return FP32 * dense // self._state_shards + FP32 * experts // self._expert_shards

    @cached_property
    def _store_shard(self) -> int:
        """Parameters that a rank of the store has, at most."""
        assert self.execution.store_ranks is not None
        return -(-self.total_parameters // self.execution.store_ranks)

    @cached_property
    def _stages(self) -> tuple[Stage, ...]:
        return self.parallelism.stages(self.shape)

    @cached_property
    def tapes(self) -> list[list[Tape]]:
        """What each chunk of each rank keeps and needs, operation by operation."""
        p, pp_size = self.parallelism, self.parallelism.pp_size
        sizes = p.tp_size, p.cp_size, 1, 1, p.dp_size * pp_size  # the same in any pipeline
        alone = Parallelism(*sizes, p.sequence_parallel, ep_size=p.ep_size, etp_size=p.etp_size)
        activations = ActivationModel(self.shape, self.executed(parallelism=alone).execution)
        tapes = {stage: _tape(activations, stage) for stage in set(self._stages)}
        return [[tapes[stage] for stage in self._stages[r::pp_size]] for r in range(pp_size)]

    @cached_property
    def _again(self) -> dict[tuple[int, int], Tape]:
        """By the tape of a chunk and what is recomputed of a micro-batch, the tape of that."""
        again: dict[tuple[int, int], Tape] = {}
        for what, recompute in _RECOMPUTES.items():
            tapes = chain(*self.executed(recompute=recompute).tapes)
            again |= {(id(own), what): t for own, t in zip(chain(*self.tapes), tapes, strict=True)}
        return again

    def _order(self, num_micro_batches: int) -> Sequence[Sequence[Action]]:
        p = self.parallelism
        return schedule(p.pp_size, p.vpp_size, num_micro_batches, p.group_size)

    def activation_bytes(
        self,
        pp_rank: int,
        actions: Sequence[Action],
        units: UnitTable,
        known: BytesOfUnits | None = None,
    ) -> ActivationBytes:
        """What activations take while each of a rank's actions runs, and after it.

        ``units`` are the rank's micro-batches, ``known`` what :meth:`bytes_of_units` says of them.
        """
        beside = self._in_transit_bytes(pp_rank, actions, units.num_tokens)
        return self._uses(pp_rank, actions, known or self.bytes_of_units(units), beside)

    def program_bytes(
        self,
        pp_rank: int,
        actions: Sequence[Action],
        units: UnitTable,
        window_bytes: float = 0.0,
        known: BytesOfUnits | None = None,
    ) -> ActivationBytes:
        """What :meth:`activation_bytes` says, for micro-batches that may run slices of documents.

        ``actions`` are the rank's in :func:`megatron_wlb.cost.schedule.order.sliced`.
        ``window_bytes`` are those of each window of hosted ones.
        """
        beside = self.sent_ahead_bytes(pp_rank, columns_of(actions), units)
        if (hosted := units.recomputed == HOST).any():
            beside += self.windows_hold(pp_rank, actions, units, hosted, window_bytes)
        return self._uses(pp_rank, actions, known or self.bytes_of_units(units), beside)

    def alive_bytes(self, pp_rank: int, activations: float) -> float:
        """The most bytes alive in a step whose activations take so many, its update included."""
        return self.state_bytes(pp_rank).total + max(activations, self.update_bytes(pp_rank))

    def _uses(
        self, pp_rank: int, actions: Sequence[Action], known: BytesOfUnits, beside: Floats
    ) -> ActivationBytes:
        both = around(self.rows(pp_rank, known)[columns_of(actions)], beside)
        return ActivationBytes(*(each.tolist() for each in both))

    def rows(self, pp_rank: int, known: BytesOfUnits) -> Floats:
        """What is ``known`` of a rank's passes, chunks and units: ``[2, chunks, units, 3]``."""
        return np.array([[known[kind, id(tape)] for tape in self.tapes[pp_rank]] for kind in "FB"])

    def bytes_of_units(self, units: UnitTable) -> BytesOfUnits:
        """:meth:`unit_bytes` in each kind of chunk and pass."""
        tapes = {id(tape): tape for own in self.tapes for tape in own}
        both = product("FB", tapes.items())
        return {(kind, at): self.unit_bytes(tape, kind, units) for kind, (at, tape) in both}

    def windows_hold(
        self,
        pp_rank: int,
        actions: Sequence[Action],
        units: UnitTable,
        hosted: Bools,
        window_bytes: float,
    ) -> Floats:
        """What both windows hold while each action runs, if those units are ``hosted``."""
        amounts = [self.hosted_bytes(tape, units) for tape in self.tapes[pp_rank]]
        return held_amounts(actions, hosted.tolist(), np.array(amounts), window_bytes)

    def unit_bytes(self, tape: Tape, kind: str, units: UnitTable) -> Floats:
        """What forwards ("F") or backwards of units let go of, their own peaks and what they keep,
        slices' buffers too: ``[units, 3]``.
        """
        rows = np.empty((len(units.num_tokens), 3))
        for what in np.unique(units.recomputed).tolist():
            at = np.flatnonzero(units.recomputed == what)
            rows[at] = self._sliced(tape, what).action_bytes(kind, units.some(at), what == HOST)
        return rows

    def kept_bytes(self, pp_rank: int, units: UnitTable) -> float:
        """What a rank keeps of units behind forwards in all its chunks; all recompute the same."""
        tapes = (self._sliced(tape, int(units.recomputed[0])) for tape in self.tapes[pp_rank])
        kept = (tape.kept_bytes(units) for tape in tapes)
        return float(sum(each.sum() for each in kept))

    def hosted_bytes(self, tape: Tape, units: UnitTable) -> Floats:
        """What of units goes to the host, if they are hosted, ``[units]``."""
        return self._sliced(tape).hosted_bytes(units)

    def _sliced(self, tape: Tape, what: int = 0) -> SliceTape:
        """The tape of a chunk for micro-batches of which that is recomputed."""
        own = self._again[id(tape), what] if what in _RECOMPUTES else tape
        return _slice_tape(own, self.parallelism.cp_size, self.execution.reduce_in_fp32)

    def sent_ahead_bytes(self, pp_rank: int, columns: Columns, units: UnitTable) -> Floats:
        """Bytes on the way while each action of a program runs, ``[actions]``.

        The inputs that arrive for the next forward and the next backward, and what the last action
        sends.
        """
        p = self.parallelism
        per_token = self.element_bytes * self.shape.hidden_size / p.sequence_shards / p.cp_size
        backward, chunks, numbers = columns
        moved = per_token * units.num_tokens[numbers]
        # The first stage receives no activations, and sends no gradients; the last one likewise.
        first, last = (pp_rank == at for at in (0, p.pp_size - 1))
        at_first, at_last = first & (chunks == 0), last & (chunks == p.vpp_size - 1)
        comes = np.where(np.where(backward, at_last, at_first), 0.0, moved)
        goes = np.where(np.where(backward, at_first, at_last), 0.0, moved)
        result = _arriving(comes, backward == 0) + _arriving(comes, backward == 1)
        result[1:] += goes[:-1]
        return result

    def _in_transit_bytes(
        self, pp_rank: int, actions: Sequence[Action], num_tokens: Floats
    ) -> Floats:
        """Bytes on the way while each action runs; only the interleaved schedule has any.

        The input that arrives for the next forward, and what the last two backwards took and send.
        """
        p = self.parallelism
        if p.vpp_size == 1 or p.pp_size == 1:
            return np.zeros(len(actions))
        per_token = self.element_bytes * self.shape.hidden_size / p.sequence_shards / p.cp_size
        backward, chunks, numbers = columns_of(actions)
        received = (pp_rank > 0) | (chunks > 0)
        moved = np.where(received, per_token * num_tokens[numbers], 0.0)
        backwards = np.flatnonzero(backward)
        gone: Floats = np.concatenate([[0.0, 0.0], moved[backwards]])
        before = np.searchsorted(backwards, np.arange(len(actions)))
        return _arriving(moved, backward == 0) + 2 * (gone[before] + gone[before + 1])
