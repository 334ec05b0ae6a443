"""One replica: how it is divided, and what it costs in times of stages, transfers and memory."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_wlb.cost.memory import MemoryModel
from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.cost.shape import Parallelism
from megatron_wlb.cost.step_costs import StepCosts
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan import Document, Span, Units
from megatron_wlb.plan.sharding.layout import length_multiple
from megatron_wlb.reading import MOST_DEVICES, shown, whole_number

LEAST_TOKENS = 1024
"""Tokens of a micro-batch on each TP × CP rank below which kernels are too small (UtilLen of
Appendix C). Assumed, where no cost was measured: the paper prints a picture alone."""
SLICED = "sliced"
SIZES = "tp", "cp", "pp", "vpp"
_SIZE = re.compile(r"(tp|cp|vpp|pp)(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one replica is divided over its ranks. Raises :class:`ConfigError` for a size below 1,
    or virtual stages or slices without a pipeline.
    """

    tp_size: int = 1
    cp_size: int = 1
    pp_size: int = 1
    vpp_size: int = 1
    sliced: bool = False
    """Whether its documents run in slices where they are long, and not whole."""

    def __post_init__(self) -> None:
        for name, size in zip(SIZES, self.sizes, strict=True):
            whole_number(f"scheme: {name}_size", size, 1, MOST_DEVICES)
        alone = {f"VPP {self.vpp_size}": self.vpp_size > 1, SLICED: self.sliced}
        for what, is_given in alone.items():
            if is_given and self.pp_size == 1:
                raise ConfigError(
                    f"scheme {self}: {what} is for a pipeline, but PP is 1; use more or none"
                )

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.cp_size * self.pp_size

    @property
    def parallelism(self) -> Parallelism:
        """The layout of one such replica alone."""
        sizes = self.tp_size, self.cp_size, self.pp_size, self.vpp_size
        return Parallelism(*sizes, sequence_parallel=self.tp_size > 1)

    def expert_sizes(self, ep_size: int, etp_size: int | None) -> tuple[int, int]:
        """EP and expert TP: no more than asked for, and what divides the ranks of a stage, so that
        tokens stay in the replica. ``etp_size`` is that of TP if not given.
        """
        ranks = self.tp_size * self.cp_size
        etp = self.tp_size if etp_size is None else math.gcd(etp_size, ranks)
        return math.gcd(ep_size, ranks // etp), etp

    @property
    def length_multiple(self) -> int:
        """What a micro-batch's padded length is a multiple of."""
        return length_multiple(self.tp_size, self.cp_size, self.tp_size > 1)

    def __str__(self) -> str:
        sizes = zip(SIZES, self.sizes, strict=True)
        said = "".join(f"{name}{size}" for name, size in sizes if size > 1) or "tp1"
        return said + SLICED * self.sliced

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.tp_size, self.cp_size, self.pp_size, self.vpp_size

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Reads what ``str`` writes. Raises :class:`ConfigError` for anything else."""
        sizes = text.removesuffix(SLICED)
        pairs = _SIZE.findall(sizes)
        given = {f"{name}_size": int(size) for name, size in pairs}
        if not pairs or len(given) < len(pairs) or "".join(map("".join, pairs)) != sizes:
            raise ConfigError(
                f"{shown(text)} is not a layout; give each size once, such as tp4cp2pp2"
            )
        return cls(**given, sliced=sizes != text)


@dataclass(frozen=True, eq=False)
class ReplicaCosts:
    """Costs of a replica; compared by identity, as one is made for each scheme of a run."""

    scheme: Scheme
    max_tokens: int
    """S_max, by memory; a multiple of the scheme's ``length_multiple``."""
    costs: StepCosts
    """Times of stages and transfers; exchange and update are the strategy's."""
    least_tokens: int = 1
    """Tokens of a micro-batch in the mean, at least, where documents are enough."""
    memory: MemoryModel | None = None
    limit_bytes: float = math.inf
    """What tensors may take of a rank's memory."""
    group_size: int | None = None
    """Micro-batches that a chunk runs one after another, with virtual stages; PP if not given."""

    @property
    def kind(self) -> tuple[Scheme, int]:
        return self.scheme, self.max_tokens

    @property
    def number_multiple(self) -> int:
        """What its number of micro-batches is a multiple of."""
        scheme = self.scheme
        return (self.group_size or scheme.pp_size) if scheme.vpp_size > 1 else 1

    @property
    def warm_up(self) -> float:
        """How often the longest document counts besides the sum: (PP - 1) / VPP."""
        return (self.scheme.pp_size - 1) / self.scheme.vpp_size

    def units(self, given: Sequence[Sequence[Document]]) -> Units:
        """What it runs of documents that are ``given`` in micro-batches."""
        return Units([[Span(document, 0, document.length) for document in one] for one in given])

    @property
    def filling(self) -> float:
        """What filling and draining the pipeline takes besides, as a share of all documents."""
        return 0.0

    def rank_us(self, lengths: Sequence[int], *, least: bool = False) -> Floats:
        """Forward plus backward of documents on each pipeline rank, ``[PP, documents]``, without
        what every micro-batch costs; each as if it were launched alone, or the ``least`` that it
        takes among others.
        """
        stages = replace(self.costs.stages, launches_us=()) if least else self.costs.stages
        times_us = stages.times_us([*([length] for length in lengths), []]).sum(axis=0)
        by_rank = times_us.reshape(self.scheme.vpp_size, self.scheme.pp_size, -1).sum(axis=0)
        result: Floats = by_rank[:, :-1] - by_rank[:, -1:]
        return result

    @property
    def num_parts(self) -> int:
        """Layers of a pipeline rank: the parts in which its parameters are exchanged."""
        if self.memory is None:
            return 1
        return max(1, self.memory.shape.num_layers // self.scheme.pp_size)

    def waits_us(self, exchange_us: Floats, passes_us: Floats) -> Floats:
        """What is waited for of an exchange beside a pass: one part, or what is longer."""
        share = 1 / self.num_parts
        waits: Floats = np.maximum(share * exchange_us, exchange_us - (1 - share) * passes_us)
        return waits

    def room_bytes(self, pp_rank: int | None) -> float:
        """What parameters leave of a rank's memory, or of one that runs no replica."""
        if self.memory is None:
            return math.inf
        state = self.memory.state_bytes(pp_rank or 0)
        return self.limit_bytes - (state.optimizer if pp_rank is None else state.total)

    def held(self, pp_rank: int, given: int, element_bytes: int) -> float:
        """The share of a rank's exchange that its memory holds at once, where so many elements of
        others are ``given``, too.
        """
        if self.memory is None:
            return 1.0
        num_bytes = element_bytes * (given + self.memory.num_parameters(pp_rank))
        return min(1.0, self.room_bytes(pp_rank) / num_bytes)

    @cached_property
    def micro_batch_us(self) -> float:
        """What a micro-batch takes on a pipeline rank besides its documents, at most."""
        times_us = self.costs.stages.times_us([[]]).sum(axis=0)
        by_rank = times_us.reshape(self.scheme.vpp_size, self.scheme.pp_size).sum(axis=0)
        return float(by_rank.max())
