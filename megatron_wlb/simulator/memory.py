"""What each pipeline rank holds while a simulated step runs, action by action.

The bytes are those of :class:`~megatron_wlb.cost.memory.MemoryModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_wlb.cost.memory import GIB, ActivationBytes, MemoryModel, StateBytes
from megatron_wlb.cost.schedule.order import Action
from megatron_wlb.errors import PlanError


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one pipeline rank."""

    state: StateBytes
    actions: tuple[Action, ...]
    activations: ActivationBytes
    update: int
    """Bytes that the optimizer's update needs besides the state."""

    @cached_property
    def activation_peak_bytes(self) -> float:
        """The most that activations and what works on them take at once."""
        return max(self.activations.peak, default=0.0)

    @property
    def peak_bytes(self) -> float:
        return self.state.total + max(self.activation_peak_bytes, self.update)

    @cached_property
    def peak_at(self) -> str:
        """The action that reaches the peak (the first such), or ``update``."""
        peak = self.activation_peak_bytes
        if self.update > peak or not self.actions:
            return "update"
        return str(self.actions[self.activations.peak.index(peak)])

    def first_above(self, limit_bytes: float) -> str | None:
        """Names where memory runs out: ``weights and optimizer``, an action, ``update``."""
        if self.peak_bytes <= limit_bytes:
            return None
        if self.state.total > limit_bytes:
            return "weights and optimizer"
        for action, peak in zip(self.actions, self.activations.peak, strict=True):
            if self.state.total + peak > limit_bytes:
                return str(action)
        return "update" if self.state.total + self.update > limit_bytes else None


@dataclass(frozen=True)
class StepMemory:
    """Bytes on the pipeline ranks of one data-parallel rank."""

    ranks: tuple[RankMemory, ...]

    @property
    def peak_bytes(self) -> float:
        return max(rank.peak_bytes for rank in self.ranks)

    def check(self, limit_bytes: float, where: str = "") -> None:
        """Raises :class:`PlanError` for the first rank above ``limit_bytes``, with its action."""
        for number, rank in enumerate(self.ranks):
            at = rank.first_above(limit_bytes)
            if at is not None:
                raise PlanError(
                    f"out of memory: pipeline rank {number}{f' of {where}' if where else ''} at "
                    f"{at}, with a peak of {rank.peak_bytes / GIB:.2f} GiB in {rank.peak_at} above "
                    f"the limit of {limit_bytes / GIB:.2f} GiB; lower S_max, recompute activations "
                    "or use more TP, CP or PP"
                )


def step_memory(
    model: MemoryModel,
    order: Sequence[Sequence[Action]],
    uses: Callable[[int, Sequence[Action]], ActivationBytes],
) -> StepMemory:
    """What each pipeline rank holds; ``uses`` tells it of activations by rank and actions."""
    return StepMemory(
        tuple(
            RankMemory(
                model.state_bytes(rank),
                tuple(actions),
                uses(rank, actions),
                model.update_bytes(rank),
            )
            for rank, actions in enumerate(order)
        )
    )
