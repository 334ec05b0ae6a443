"""A training run that nobody has to start: model, machine, layout and batch, and what follows.

Everything here is *modelled*: from the model's shape and the rates of a hardware file, or from
measured costs where they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np

from megatron_wlb.cost import (
    AnalyticModel,
    Cost,
    Hardware,
    MemoryModel,
    ModelShape,
    Parallelism,
    Recompute,
)
from megatron_wlb.cost.analytic import BACKWARD_ATTENTION
from megatron_wlb.cost.attention import (
    AnalyticAttention,
    AttentionLatency,
    AttentionProfile,
    nearest_profile,
)
from megatron_wlb.cost.hardware import LEAST, MOST
from megatron_wlb.cost.memory import GIB
from megatron_wlb.cost.step_costs import StageCosts, StepCosts, analytic_costs
from megatron_wlb.errors import ConfigError
from megatron_wlb.packing.base import MOST_MICRO_BATCHES, MOST_TOKENS
from megatron_wlb.reading import real_number, whole_number
from megatron_wlb.schedule.order import schedule
from megatron_wlb.sharding.select import MODES, Mode, Prediction, Selector, predict
from megatron_wlb.sharding.shard import Kind, Sharding

MEMORY_SHARE = 0.9
"""Of a device's memory that tensors may take: the rest is for the allocator's gaps, the CUDA
context, libraries and communication buffers. Assumed."""


@dataclass(frozen=True)
class Scenario:
    """What a run's steps cost in time and memory.

    Raises :class:`ConfigError` for a layout that the model or the batch does not divide over, or a
    schedule that Megatron refuses.
    """

    shape: ModelShape
    """Its vocabulary padded, as :func:`~megatron_wlb.cost.model_file.padded_vocabulary` does."""
    hardware: Hardware
    parallelism: Parallelism
    window: int
    num_micro_batches: int
    """N: of a step, over all data-parallel ranks."""
    recompute: Recompute = field(default_factory=Recompute)
    memory_gib: float | None = None
    """Limit of a device's tensors; :data:`MEMORY_SHARE` of its memory if not given."""
    overlap_grad_reduce: bool = True
    measured: Cost | None = None
    """A cost of the whole model to use instead of the analytic one, in its shares of the stages."""

    extrapolate: bool = False
    """Whether to go beyond the end of the hardware's measured attention."""

    def __post_init__(self) -> None:
        p = self.parallelism
        whole_number("window", self.window, 1, MOST_TOKENS)
        whole_number("num_micro_batches", self.num_micro_batches, 1, MOST_MICRO_BATCHES)
        if self.memory_gib is not None:
            real_number("memory limit in GiB", self.memory_gib, LEAST, MOST)
        if self.num_micro_batches % p.dp_size:
            raise ConfigError(
                f"{self.num_micro_batches} micro-batches a step do not divide over "
                f"{p.dp_size} data-parallel ranks; choose a multiple"
            )
        p.layers_of_stages(self.shape)
        schedule(p.pp_size, p.vpp_size, self.num_micro_batches // p.dp_size, p.group_size)

    @property
    def num_devices(self) -> int:
        p = self.parallelism
        return p.tp_size * p.cp_size * p.pp_size * p.dp_size

    @property
    def limit_gib(self) -> float:
        """What the tensors of a device may take."""
        if self.memory_gib is not None:
            return self.memory_gib
        return MEMORY_SHARE * self.hardware.memory_gib

    @property
    def length_multiple(self) -> int:
        """What a micro-batch's padded length is a multiple of."""
        p = self.parallelism
        shards = p.tp_size if p.sequence_parallel else 1
        return shards * (2 * p.cp_size if p.cp_size > 1 else 1)

    @cached_property
    def model(self) -> AnalyticModel:
        return AnalyticModel(self.shape, self.hardware, self.parallelism, self.recompute)

    @cached_property
    def memory(self) -> MemoryModel:
        """With the distributed optimizer, and norms and activations as single kernels."""
        return MemoryModel(
            self.shape,
            self.parallelism,
            self.recompute,
            distributed_optimizer=True,
            kernels="fused",
        )

    @cached_property
    def cost(self) -> Cost:
        """Of a document in the whole model: what packings balance."""
        return self.model.cost() if self.measured is None else self.measured

    @cached_property
    def costs(self) -> StepCosts:
        """Of all parts of a step."""
        analytic = analytic_costs(
            self.model, self.memory, overlap_grad_reduce=self.overlap_grad_reduce
        )
        if self.measured is None:
            return analytic
        stages = StageCosts.spread(self.measured, self.model)
        return replace(analytic, stages=stages)

    def check_reach(self) -> None:
        """Raises :class:`ConfigError` where measured attention ends before the window."""
        longest = np.array([self.window])
        self._latency.chunk_us(longest, longest)

    def max_tokens(self) -> int:
        """S_max: the longest micro-batch of which a whole pipeline fits the memory limit.

        Raises :class:`ConfigError` where the model or the shortest one does not.
        """
        return self.memory.max_tokens(
            self.limit_gib * GIB,
            self.num_micro_batches // self.parallelism.dp_size,
            multiple=self.length_multiple,
        )

    def flops(self, lengths: Iterable[int]) -> float:
        """Model FLOPs of documents, forward and backward; nothing that is computed twice."""
        return self.shape.training_flops(lengths)

    def chooser(self, sharding: Mode | Kind) -> Callable[[Sequence[int]], Prediction]:
        """From the lengths of a micro-batch to its context-parallel sharding and what that takes.

        Raises :class:`WLBError` for an unknown sharding.
        """
        cp_size, latency = self.parallelism.cp_size, self._latency
        if sharding in MODES:
            return Selector(sharding, cp_size, latency).choose
        one = Sharding(cast(Kind, sharding))
        return lambda lengths: predict(lengths, cp_size, one, latency)

    def attention_scale(self, lengths: Sequence[int], prediction: Prediction) -> float:
        """By how much the slowest rank's attention is above an even share of the plain cost.

        Imbalance, whole tiles and what chunks cost besides are all in it; with a measured cost,
        which has the kernel's efficiency in it already, only imbalance is.
        """
        if self.measured is not None:
            return prediction.forward_imbalance
        pairs = sum([n * n for n in lengths])
        even_us = self.model.layer().attention_us * pairs * (1 + BACKWARD_ATTENTION)
        return prediction.latency_us / even_us if even_us else 1.0

    @cached_property
    def measured_attention(self) -> AttentionProfile | None:
        """The hardware's table of such heads in bf16; without one whole tiles are assumed."""
        shape, tp_size = self.shape, self.parallelism.tp_size
        return nearest_profile(
            self.hardware.attention,
            num_heads=shape.num_attention_heads // tp_size,
            num_groups=shape.num_query_groups // tp_size,
            head_dim=shape.kv_channels,
            dtype="bfloat16",
        )

    @cached_property
    def _latency(self) -> AttentionLatency:
        if self.measured_attention is not None:
            return replace(self.measured_attention, extrapolate=self.extrapolate)
        heads = self.shape.num_attention_heads // self.parallelism.tp_size
        return AnalyticAttention(heads, self.shape.kv_channels, self.hardware.attention_tflops)


def title(p: Parallelism) -> str:
    """Only what is divided: ``TP 8 × PP 4``."""
    sizes = (("TP", p.tp_size), ("CP", p.cp_size), ("PP", p.pp_size), ("VPP", p.vpp_size),
             ("DP", p.dp_size))  # fmt: skip
    return " × ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one device"
