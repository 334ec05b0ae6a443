"""One description of a run: model, machine, layout and batch, and all that planning makes of them.

Training, dry runs, simulations and trials of packings are adapters of it: each fills in what it
knows, and gets the same cost, memory, S_max, packer and planner. What is not measured is
*modelled*: from the model's shape and the rates of a hardware file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import floor
from typing import Any, Protocol, cast

import numpy as np

from megatron_wlb.cost import (
    AnalyticModel,
    Cost,
    Hardware,
    MemoryModel,
    Parallelism,
    ProfiledCost,
)
from megatron_wlb.cost.analytic import BACKWARD_ATTENTION
from megatron_wlb.cost.attention_latency import (
    AnalyticAttention,
    AttentionLatency,
    AttentionProfile,
    SlidingAttention,
    nearest_profile,
)
from megatron_wlb.cost.document import unseen
from megatron_wlb.cost.execution import Executed
from megatron_wlb.cost.experts import ExpertGroups
from megatron_wlb.cost.hardware import LEAST, MOST
from megatron_wlb.cost.memory import GIB, overhead_gib
from megatron_wlb.cost.schedule.graph import Graph, graph_of
from megatron_wlb.cost.schedule.order import schedule
from megatron_wlb.cost.step_costs import StageCosts, StepCosts, analytic_costs
from megatron_wlb.data.documents import LongDocuments
from megatron_wlb.data.ramp import Ramp
from megatron_wlb.errors import ConfigError
from megatron_wlb.extensions import load
from megatron_wlb.plan.sharding.layout import length_multiple
from megatron_wlb.plan.sharding.select import MODES, Mode, Prediction, Selector, predict
from megatron_wlb.plan.sharding.shard import Kind, Sharding
from megatron_wlb.planning.packing import Packer, PackingSettings, kind_of
from megatron_wlb.planning.planner import Planner, Shaping, Stream, each_rank
from megatron_wlb.planning.slicing.cut import Slicer, numbers_of_units
from megatron_wlb.planning.slicing.pipeline import Pipeline
from megatron_wlb.planning.slicing.room import MemoryLimit, worst_steps
from megatron_wlb.planning.slicing.units import Cuts, check_units, slice_multiple
from megatron_wlb.reading import MOST_MICRO_BATCHES, MOST_TOKENS, real_number, whole_number
from megatron_wlb.settings import split

MEMORY_SHARE = 0.9
"""The share that tensors may take of the memory that CUDA context and communicators leave. The rest
is for the allocator's gaps. It is assumed; ``--wlb-memory-gib`` says it better."""


def tensors_gib(hardware: Hardware, parallelism: Parallelism, slices: bool = False) -> float:
    """GiB that tensors may take on a device: a share of the memory that is left for them, where
    documents run in ``slices`` or whole.
    """
    left_gib = hardware.memory_gib - overhead_gib(hardware, parallelism, slices)
    return max(LEAST, MEMORY_SHARE * left_gib)


@dataclass(frozen=True)
class Devices(Executed):
    """A model, and the devices on which layouts are searched for it.

    The layout of its execution is one that a search replaces.
    """

    hardware: Hardware
    num_devices: int
    memory_gib: float | None = None
    """Limit of a device's tensors; what the layout leaves them if not given."""
    headroom: float = 0.0
    """The share of that limit to leave free."""
    max_tp: int | None = None
    """The most TP; a node's devices if not given."""

    def limit_gib(self, layout: Parallelism, slices: bool = False) -> float:
        """What tensors may take in a layout, for ``slices`` or whole documents: as flags say it."""
        limit_gib = self.memory_gib
        if limit_gib is None:
            limit_gib = tensors_gib(self.hardware, layout, slices)
        hundredths = floor(100 * limit_gib * (1 - self.headroom) + 1e-6)
        return hundredths / 100 if hundredths > 0 else limit_gib


class Documents(Protocol):
    """Where lengths come from: corpora that are trained on, or what is tried without them."""

    def longest(self, window: int) -> int:
        """Tells the length of the longest document."""
        ...

    def stream(
        self,
        num_steps: int,
        *,
        window: int,
        longest: int,
        windows_a_step: int,
        seed: int,
        long_documents: LongDocuments,
        ramp: Ramp | None = None,
    ) -> Stream:
        """Gives documents of at least ``num_steps`` steps, or all; none is above ``longest``.

        In the steps of a ``ramp`` fewer windows arrive.
        """
        ...


class _Batch:
    """What arrives in a step."""

    window: int
    num_micro_batches: int
    micro_batch_size: int

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens that a micro-batch stands for: its mean."""
        return self.micro_batch_size * self.window

    @property
    def step_tokens(self) -> int:
        """Tokens that arrive in a step, in the mean, once N has grown."""
        return self.num_micro_batches * self.micro_batch_tokens


@dataclass(frozen=True)
class Workload(_Batch):
    """What is to be packed, into what, and what it costs; the same for every packing."""

    source: Documents
    window: int
    num_micro_batches: int
    cost: Cost
    seed: int
    long_documents: LongDocuments = "split"
    length_multiple: int = 1
    layout: Parallelism | None = None
    """None: a step takes as long as its slowest micro-batch, as where each has its own devices."""
    memory: MemoryLimit | None = None
    """What a device may hold, for the number of units that slices are cut into; None: anything."""
    micro_batch_size: int = 1
    """Windows that a micro-batch stands for."""
    ramp: Ramp | None = None
    """How N grows to ``num_micro_batches``; None where all steps have as many."""
    experts: ExpertGroups | None = None
    """Groups of replicas that run micro-batches of the same place together."""
    alike: int = 1
    """How many neighbouring replicas meet in each pass, so that slices are to run alike there."""
    merges: bool = True
    """Whether several replicas may run one document together, in slices."""

    @property
    def dp_size(self) -> int:
        return 1 if self.layout is None else self.layout.dp_size

    @cached_property
    def graph(self) -> Graph:
        """Megatron's schedule of one pipeline.

        Raises :class:`ConfigError` where micro-batches do not divide as it asks.
        """
        p = self.layout or Parallelism()
        each = each_rank(self.num_micro_batches, p.dp_size)
        return graph_of(p.pp_size, p.vpp_size, each, p.group_size)

    def flags(self, packing: PackingSettings) -> tuple[str, ...]:
        """Lists what the training command needs to pack as here."""
        flags = packing.flags()
        if self.long_documents != "split":
            flags += ["--wlb-long-documents", self.long_documents]
        return tuple(flags)

    def packer(self, packing: PackingSettings) -> Packer:
        """Makes a new one. Raises :class:`ConfigError` for settings that cannot work."""
        made = packing.packer(
            num_micro_batches=self.num_micro_batches,
            window=self.window,
            cost=self.cost,
            length_multiple=self.length_multiple,
            micro_batch_size=self.micro_batch_size,
            ramp=self.ramp,
        )
        if isinstance(self.cost, ProfiledCost):  # now, not in the step that reaches so far
            longest = self.longest(packing) if packing.kind.slices else 0
            self.cost.check_reach(max(longest, packing.max_tokens))
        return made

    def longest(self, packing: PackingSettings) -> int:
        """Tells how long documents may be that reach the packing: longer ones are split before."""
        if packing.kind.windows:
            whole = self.long_documents in ("split", "slice")
        else:
            whole = packing.kind.slices and self.long_documents == "slice"
        return max(self.window, self.source.longest(self.window)) if whole else self.window

    def longest_segment(self, packing: PackingSettings) -> int:
        """Tells of how many tokens of a document a micro-batch has keys of its own."""
        return (
            min(self.longest(packing), packing.max_tokens) if packing.kind.slices else self.window
        )

    def stream(self, packing: PackingSettings, num_steps: int) -> Stream:
        """Gives the documents of at least so many steps, new from the start."""
        return self.source.stream(
            num_steps,
            window=self.window,
            longest=self.longest(packing),
            windows_a_step=self.num_micro_batches * self.micro_batch_size,
            seed=self.seed,
            long_documents=self.long_documents,
            ramp=self.ramp,
        )

    def planner(
        self,
        packing: PackingSettings,
        num_steps: int = 0,
        *,
        costs: StepCosts | None = None,
        selector: Selector | None = None,
    ) -> Planner:
        """Makes the planner of at least so many steps.

        Where there is a pipeline, settings may shape its steps, or choose the number of
        micro-batches or units, by ``costs``; by stages' layers and sends that take no time if these
        are not given.
        """
        made = self.packer(packing)
        slicer = self._slicer(packing, costs, made) if packing.kind.slices else None
        return Planner(
            self.stream(packing, num_steps + made.look_ahead + 1),
            made,
            self.cost,
            dp_size=self.dp_size if slicer is None else slicer.dp_size,
            length_multiple=self.length_multiple,
            shaping=self._shaping(packing, costs, made),
            slicing=slicer,
            selector=selector,
            experts=self.experts,
        )

    def _shaping(
        self, packing: PackingSettings, costs: StepCosts | None, packer: Packer
    ) -> Shaping | None:
        """Makes what deals packed steps anew, if there is a pipeline that gains by it."""
        p = self.layout
        if p is None or p.pp_size == 1:
            return None
        costs = costs or StepCosts(StageCosts.by_layers(self.cost, p))
        each, max_tokens = each_rank(self.num_micro_batches, p.dp_size), packer.limits.max_tokens
        made: Shaping | None = None
        if packing.shaped:
            made = load("shape")(
                costs, p, num_micro_batches=each, max_tokens=max_tokens, window=self.window
            )
        if packing.micro_batches == "auto":
            made = load("micro-batches")(
                costs,
                p,
                num_micro_batches=each,
                max_tokens=max_tokens,
                mean_tokens=self.micro_batch_tokens,
                length_multiple=self.length_multiple,
                memory=self.memory if self.memory and self.memory.given else None,
                in_stream_order=packer.in_stream_order,
                then=made,
                experts=self.experts,
            )
        return made

    def _slicer(self, packing: PackingSettings, costs: StepCosts | None, made: Packer) -> Slicer:
        """Makes what cuts steps. Where each micro-batch has its own devices, they are replicas."""
        p = self.layout or Parallelism(dp_size=self.num_micro_batches)
        each, longest = each_rank(self.num_micro_batches, p.dp_size), self.longest(packing)
        memory = self.memory
        if memory is not None and packing.recompute == "off":
            memory = memory._replace(recomputes=False)
        if costs and memory and memory.host_bytes and costs.stages.host is None:
            raise ConfigError(
                f"--wlb-host-gib is {memory.model.execution.host_gib:g}, but the file of "
                "--wlb-hardware lacks host_link_gb_s, the speed of copies to the host; add it, or "
                "leave the flag out"
            )
        multiple = slice_multiple(self.window, packing.slice_multiple)
        most, padded, alike = made.limits.max_tokens, self.length_multiple, self.alike
        costs = costs or StepCosts(StageCosts.by_layers(self.cost, p), experts=self.experts)
        return Slicer(
            Cuts(self.cost, most, padded, multiple, p.dp_size, alike),
            Pipeline(costs, p, padded, alike, memory),
            [packing.units] if packing.units else numbers_of_units(each, p.pp_size),
            merges=packing.dp_merge == "auto" and self.merges,
            cache=packing.slice_cache,
            worst=worst_steps(longest, each * self.micro_batch_tokens),
        )

    def check(self, packings: Sequence[PackingSettings]) -> None:
        """Raises :class:`ConfigError` where one of them cannot work, before any work is done."""
        for packing in packings:
            self.packer(packing)
            multiple = slice_multiple(self.window, packing.slice_multiple)
            check_units(packing.units, self.step_tokens // self.dp_size, multiple)
        if self.layout is not None:
            _ = self.graph


@dataclass(frozen=True)
class Run(Executed, _Batch):
    """A run, whether it trains or not: what its steps cost in time and memory.

    The vocabulary of its shape is padded, as
    :func:`~megatron_wlb.cost.shape.padded_vocabulary` does. Raises :class:`ConfigError` for a
    layout that the model or the batch does not divide over, or a schedule that Megatron refuses.
    """

    hardware: Hardware
    window: int
    num_micro_batches: int
    """N: of a step, over all data-parallel ranks."""
    memory_gib: float | None = None
    """Limit of a device's tensors; :data:`MEMORY_SHARE` of the memory that is left if not given."""
    measured: Cost | None = None
    """A cost of the whole model to use instead of the analytic one, in its shares of the stages."""
    extrapolate: bool = False
    """Whether to go beyond the end of the hardware's measured attention."""
    micro_batch_size: int = 1
    """Windows that a micro-batch stands for."""
    ramp: Ramp | None = None
    """How N grows to ``num_micro_batches``; None where all steps have as many."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Its fields alone: what is worked out of them has places in memory for names."""
        return type(self), tuple(getattr(self, f.name) for f in fields(self))

    def __post_init__(self) -> None:
        p = self.parallelism
        whole_number("window", self.window, 1, MOST_TOKENS)
        whole_number("num_micro_batches", self.num_micro_batches, 1, MOST_MICRO_BATCHES)
        whole_number("micro_batch_size", self.micro_batch_size, 1, MOST_MICRO_BATCHES)
        if self.memory_gib is not None:
            real_number("memory limit in GiB", self.memory_gib, LEAST, MOST)
        each = each_rank(self.num_micro_batches, p.dp_size)
        real_number("expert imbalance", self.execution.expert_imbalance, 1, MOST)
        p.layers_of_stages(self.shape)
        p.check_experts(self.shape)
        p.check_latents(self.shape)
        schedule(p.pp_size, p.vpp_size, each, p.group_size)

    @property
    def num_devices(self) -> int:
        p = self.parallelism
        return p.tp_size * p.cp_size * p.pp_size * p.dp_size

    @property
    def limit_gib(self) -> float:
        """What the tensors of a device may take, where documents run whole."""
        return self._limit_gib(slices=False)

    def _limit_gib(self, slices: bool) -> float:
        if self.memory_gib is not None:
            return self.memory_gib
        return tensors_gib(self.hardware, self.parallelism, slices)

    @property
    def length_multiple(self) -> int:
        """What a micro-batch's padded length is a multiple of."""
        p = self.parallelism
        spread = p.sequence_parallel and p.tp_size > 1
        rows = self.shape.row_multiple(spread=spread)
        return length_multiple(p.tp_size, p.cp_size, p.sequence_parallel, rows)

    @property
    def overlapped(self) -> Run:
        """The same with all communication overlapped that Megatron can overlap and plans cannot:
        tensor-parallel collectives, and the exchange with experts. Lengths that vary forbid both.

        Megatron overlaps the first only with sequence parallelism. The second hides behind another
        micro-batch: in a pipeline only with virtual stages, and it forbids full recomputation, fp32
        and more than one layer that predicts further ahead.
        """
        p, full = self.parallelism, self.recompute.granularity == "full"
        alternates = p.pp_size == 1 or p.vpp_size > 1
        plain = self.execution.bf16 and not full and self.shape.num_ahead <= 1
        return self.executed(
            tp_overlapped=p.tp_size > 1 and p.sequence_parallel,
            ep_overlapped=p.ep_size > 1 and alternates and plain,
        )

    @property
    def more_overlap(self) -> str:
        """The flags by which Megatron does that; empty where it has no more to overlap."""
        execution = self.overlapped.execution
        flags = {
            "--tp-comm-overlap": execution.tp_overlapped,
            "--overlap-moe-expert-parallel-comm": execution.ep_overlapped,
        }
        return " and ".join(flag for flag, has in flags.items() if has)

    @cached_property
    def model(self) -> AnalyticModel:
        return AnalyticModel(self.shape, self.execution, self.hardware)

    @cached_property
    def memory(self) -> MemoryModel:
        return MemoryModel(self.shape, self.execution)

    @cached_property
    def cost(self) -> Cost:
        """The time of a document in the whole model: what packings balance."""
        return self.model.cost() if self.measured is None else self.measured

    @cached_property
    def costs(self) -> StepCosts:
        """The times of all parts of a step."""
        analytic = analytic_costs(self.model, self.memory)
        if self.measured is None:
            return analytic
        stages = StageCosts.spread(self.measured, self.model)
        return replace(analytic, stages=stages, experts=self._experts)

    def planning_costs(self, transfers: bool) -> StepCosts:
        """The costs by which training chooses among plans: the run's cost, spread over the stages
        as the model's parts are. ``transfers`` take no time by a measured cost, which has none.
        """
        costs = replace(self, measured=self.cost).costs
        return costs if transfers else replace(costs, p2p_latency_us=0.0, p2p_us_per_token=0.0)

    @cached_property
    def _experts(self) -> ExpertGroups | None:
        return ExpertGroups.of(self.model, self.measured, self.window)

    def workload(
        self, source: Documents, *, seed: int, long_documents: LongDocuments = "split"
    ) -> Workload:
        """Puts documents to the run: what is planned from."""
        return Workload(
            source,
            self.window,
            self.num_micro_batches,
            self.cost,
            seed,
            long_documents,
            self.length_multiple,
            self.parallelism,
            self.memory_limit,
            self.micro_batch_size,
            self.ramp,
            self._experts,
            self.alike,
            self.execution.merges,
        )

    @property
    def memory_limit(self) -> MemoryLimit:
        """What a device may hold, for those who plan slices."""
        given = self.memory_gib is not None
        recomputes = self.recompute.granularity is None and self.execution.recomputes
        limit_bytes = self._limit_gib(slices=True) * GIB
        return MemoryLimit(self.memory, limit_bytes, self.length_multiple, given, recomputes)

    def check_reach(self, num_tokens: int | None = None) -> None:
        """Raises :class:`ConfigError` where measured attention ends before so many tokens, or
        before the window.
        """
        longest = np.array([num_tokens or self.window])
        self._latency.chunk_us(longest, longest)

    def max_tokens(self) -> int:
        """The longest micro-batch of which a whole pipeline fits the memory limit.

        Raises :class:`ConfigError` where the model or the shortest one does not.
        """
        return self.memory.max_tokens(
            self.limit_gib * GIB,
            self.num_micro_batches // self.parallelism.dp_size,
            multiple=self.length_multiple,
        )

    def s_max(self, packing: str, asked: int | None = None) -> int:
        """S_max of a packing: as ``asked``; else two windows for each that a micro-batch stands
        for, or what fits memory where that is less. Where memory was given, all that fits and that
        a step may have. A window at least, even if it does not fit.

        Units of slices are smaller, and memory decides on their number instead.
        """
        row = self.micro_batch_tokens
        if asked is not None or kind_of(packing).slices:
            return asked or 2 * row
        try:
            fits = self.max_tokens()
        except ConfigError:
            return row
        most = 2 * row if self.memory_gib is None else self.step_tokens
        return max(row, min(fits, most))

    @cached_property
    def fits_windows(self) -> bool:
        """Whether micro-batches of whole windows fit the memory limit, as `original` has them."""
        try:
            return self.max_tokens() >= self.micro_batch_tokens
        except ConfigError:
            return False

    def flops(self, lengths: Iterable[int]) -> float:
        """Model FLOPs of documents, forward and backward; nothing that is computed twice."""
        return self.shape.training_flops(lengths)

    def chooser(self, sharding: Mode | Kind) -> Callable[[Sequence[int]], Prediction]:
        """From the lengths of a micro-batch to its context-parallel sharding and what that takes.

        Raises :class:`WLBError` for an unknown sharding.
        """
        choose_each = self.choose_each(sharding)
        return lambda lengths: choose_each([lengths])[0]

    def choose_each(
        self, sharding: Mode | Kind
    ) -> Callable[[Sequence[Sequence[int]]], list[Prediction]]:
        """Does what :meth:`chooser` does, for many micro-batches at once."""
        if sharding in MODES:
            return self.selector(sharding).choose_each
        cp_size, latency = self.parallelism.cp_size, self._latency
        one = Sharding(cast(Kind, sharding))
        return lambda rows: [predict(lengths, cp_size, one, latency) for lengths in rows]

    def selector(self, mode: Mode) -> Selector:
        """Makes what chooses the sharding of each micro-batch."""
        return Selector(mode, self.parallelism.cp_size, self._latency)

    def attention_scale(self, lengths: Sequence[int], prediction: Prediction) -> float:
        """By how much the slowest rank's attention is above an even share of the plain cost.

        Imbalance, whole tiles and what chunks cost besides are all in it; with a measured cost,
        which has the kernel's efficiency in it already, only imbalance is.
        """
        if self.measured is not None:
            return prediction.forward_imbalance
        reach = self.shape.reach_tokens
        pairs: float = sum([n * n for n in lengths])
        if reach is not None:
            pairs -= self.shape.windowed_share * sum([unseen(n, reach) for n in lengths])
        even_us = self._attention_us * pairs * (1 + BACKWARD_ATTENTION)
        return prediction.latency_us / even_us if even_us else 1.0

    @cached_property
    def _attention_us(self) -> float:
        """Time of a layer's attention forward, a token²."""
        return self.model.layer().attention_us

    @property
    def dtype(self) -> str:
        """The format of activations."""
        return "bfloat16" if self.execution.bf16 else "float32"

    @cached_property
    def measured_attention(self) -> AttentionProfile | None:
        """The hardware's table of such heads; without one whole tiles are assumed."""
        shape, tp_size = self.shape, self.parallelism.tp_size
        return nearest_profile(
            self.hardware.attention,
            num_heads=shape.num_attention_heads // tp_size,
            num_groups=max(1, shape.num_query_groups // tp_size),
            head_dim=shape.kv_channels,
            dtype=self.dtype,
        )

    @cached_property
    def _latency(self) -> AttentionLatency:
        """A layer's, in the mean over all."""
        shape, known = self.shape, self.measured_attention
        latency: AttentionLatency
        if known is not None:
            latency = replace(known, extrapolate=True) if self.extrapolate else known
        else:
            heads = shape.num_attention_heads // self.parallelism.tp_size
            head_dim = shape.layer.query_size // shape.num_attention_heads
            latency = AnalyticAttention(heads, head_dim, self.hardware.attention_tflops)
        if shape.reach_tokens is None:
            return latency
        return SlidingAttention(latency, shape.reach_tokens, shape.windowed_share)


def title(p: Parallelism) -> str:
    """Only what is divided: ``TP 8 × PP 4``, and the layers of stages that are unlike."""
    sizes = (("TP", p.tp_size), ("CP", p.cp_size), ("PP", p.pp_size), ("VPP", p.vpp_size),
             ("DP", p.dp_size), ("EP", p.ep_size))  # fmt: skip
    said = " × ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one device"
    return said if p.stage_layers is None else f"{said} (layers {split.title(p.stage_layers)})"
