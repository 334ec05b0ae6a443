"""The packing that this project adds: hold back the fewest heaviest documents."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from megatron_wlb.cost import CostModel
from megatron_wlb.errors import ConfigError
from megatron_wlb.packing.base import (
    Limits,
    Placement,
    Weighted,
    due_and_rest,
    load_state,
    place,
    save_state,
)
from megatron_wlb.plan import Document

SLACK = 1.05
"""An imbalance of ``max(1, τ) · SLACK`` is good enough not to hold back one document more. Where
S_max binds, tighter values delayed more without better balance; elsewhere they change little."""


class HoldPacker:
    """Runs every document at once but the few that are too heavy for the others to balance.

    A step takes at least as long as its heaviest document, and at best its mean micro-batch. So
    all documents at hand, sorted by cost ``W_1 ≥ W_2 ≥ …``, are held back from the heaviest on: the
    fewest ``k`` with ``N · W_{k+1} ≤ τ · Σ_{j>k} W_j``. The others go to the least loaded
    micro-batches (LPT). If S_max keeps those from being balanced, ``k`` is raised until the
    imbalance is at most ``max(1, τ) · SLACK``, or to the best that was found if none is.

    No queues and no thresholds: what is heavy depends on what else is at hand. Held documents run
    as soon as enough of their like have arrived.

    * Documents that have waited ``max_age`` steps are placed first, oldest first. Others up to the
      weight of the heaviest of them may then run as well: they do not make the step longer.
    * Above ``limits.token_cap`` the lightest documents are held back too (but not due ones): they
      are the easiest to balance later.
    * At least one document runs.

    Raises :class:`ConfigError` for ``tau`` ≤ 0.
    """

    name: ClassVar[str] = "hold"
    in_stream_order: ClassVar[bool] = False

    def __init__(self, limits: Limits, cost: CostModel, tau: float = 1.0) -> None:
        if not tau > 0:
            raise ConfigError(f"tau is {tau}; give a positive number, 1 for perfect balance")
        self.limits = limits
        self.tau = tau
        self._cost = cost
        self._waiting: list[Document] = []

    @property
    def waiting(self) -> Sequence[Document]:
        return tuple(self._waiting)

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        self.limits.check(documents)
        due, rest = due_and_rest([*self._waiting, *documents], step, self.limits, self._cost)
        placement = self._balance(due, rest)
        self._waiting = placement.left
        return placement.micro_batches

    def flush(self, step: int) -> list[list[Document]]:
        due, rest = due_and_rest(self._waiting, step, self.limits, self._cost)
        placement = place(due + rest, self.limits)
        self._waiting = placement.left
        return placement.micro_batches

    def state_dict(self) -> dict[str, Any]:
        return save_state(self, waiting=self._waiting)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        (waiting,) = load_state(self, state, "waiting")
        self.limits.check(waiting)
        self._waiting = waiting

    def _balance(self, due: list[Weighted], rest: list[Weighted]) -> Placement:
        """The placement with the fewest heaviest of ``rest`` held back that is good enough.

        A larger k balances better, nearly always: so with many documents k is searched by doubling
        steps and bisection, some ten placements. With few documents a micro-batch, evenness
        depends on how their number divides; there every k is tried, which is cheap.
        """
        tried: dict[int, Placement] = {}

        def is_good(num_held: int) -> bool:
            tried[num_held] = self._place(due, rest, num_held)
            return tried[num_held].imbalance <= max(1.0, self.tau) * SLACK

        num_documents, num_micro_batches = len(due) + len(rest), self.limits.num_micro_batches
        num_held = self._fewest_to_hold(due, rest)
        # With fewer documents than micro-batches, some stay empty: nothing is gained beyond.
        most = max(num_held, min(len(rest), num_documents - num_micro_batches))
        growth = 2 if num_documents > 8 * num_micro_batches else 1
        too_few, stride = num_held - 1, 1
        while not is_good(num_held):
            if num_held == most:
                return min(tried.values(), key=lambda placement: placement.imbalance)
            too_few, num_held = num_held, min(num_held + stride, most)
            stride *= growth
        while num_held - too_few > 1:
            middle = (too_few + num_held) // 2
            if is_good(middle):
                num_held = middle
            else:
                too_few = middle
        return tried[num_held]

    def _fewest_to_hold(self, due: list[Weighted], rest: list[Weighted]) -> int:
        """The smallest k that lets the mean micro-batch match the heaviest document; else 0."""
        num_micro_batches = self.limits.num_micro_batches
        unavoidable_us = num_micro_batches * max((cost_us for cost_us, _ in due), default=0.0)
        total_us = sum(cost_us for cost_us, _ in due + rest)
        for num_held, (cost_us, _) in enumerate(rest):
            if num_micro_batches * cost_us <= max(self.tau * total_us, unavoidable_us):
                return num_held
            total_us -= cost_us
        return 0

    def _place(self, due: list[Weighted], rest: list[Weighted], num_held: int) -> Placement:
        """Places ``due``, then ``rest`` without its ``num_held`` heaviest, as the cap allows."""
        due_tokens = sum(document.length for _, document in due)
        lengths = (document.length for _, document in rest[num_held:])
        totals = list(accumulate(lengths, initial=due_tokens))
        num_run = max(bisect_right(totals, self.limits.token_cap) - 1, 0 if due else 1)
        stop = num_held + num_run
        placement = place(due + rest[num_held:stop], self.limits)
        held = [document for _, document in rest[:num_held] + rest[stop:]]
        return Placement(placement.micro_batches, placement.loads_us, held + placement.left)
