"""Runs whose planner is reloaded from its saved state, held against the same runs left alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from helpers.strategies import costs
from megatron_wlb.cost import DocumentCost, Parallelism
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.data.documents import DocumentStream, LongDocuments
from megatron_wlb.planning.from_config import Split
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.planner import Planner
from megatron_wlb.planning.run import Workload

PACKINGS: dict[str, dict[str, Any]] = {
    "original": {},
    "fixed-greedy": {},
    "fixed-greedy, ahead": {"fixed_batches": 3},
    "fixed-greedy, arrival": {"fixed_batches": 2, "fixed_grouping": "arrival"},
    "wlb": {},
    "wlb, three queues": {"queue_thresholds": (2, 5, 9)},
    "hold": {},
    "hold, ahead": {"look_ahead": 3},
    "hold, far ahead": {"look_ahead": 7, "delay_price": 0.05},
    "slim": {},
    "slim, in few units": {"units": 3, "slice_multiple": 1},
}
AUTO = {"hold, auto": {"micro_batches": "auto"}, "original, auto": {"micro_batches": "auto"}}
"""Settings that only a pipeline gives a meaning."""
"""Settings by what is before the comma, the packing, and a word for them."""


@dataclass(frozen=True)
class Soak:
    """A run of ``num_steps`` steps, or of all there are."""

    packing: str
    """One of :data:`PACKINGS`."""
    lengths: tuple[tuple[int, ...], ...]
    """Lengths of the stored documents by corpus."""
    weights: tuple[float, ...] | None
    """Weights by corpus; None streams all as one corpus."""
    num_epochs: int | None
    long_documents: LongDocuments
    window: int
    num_micro_batches: int
    max_tokens: int
    max_step_tokens: int | None
    max_age: int
    cost: DocumentCost
    num_steps: int
    seed: int
    layout: Parallelism | None = None

    def planner(self) -> Planner:
        """Makes a new planner, at step 0."""
        corpora: list[Any] = [
            SimpleNamespace(prefix=f"corpus {number}", lengths=np.array(lengths), targets=None)
            for number, lengths in enumerate(self.lengths)
        ]
        ranges = {"train": [(0, len(lengths)) for lengths in self.lengths]}
        opened = Corpora(corpora, 1, ranges, {"train": self.weights})
        packing = PackingSettings(
            self.packing.partition(",")[0],
            self.max_tokens,
            max_step_tokens=self.max_step_tokens,
            max_age=self.max_age,
            **(PACKINGS | AUTO)[self.packing],
        )
        return Workload(
            Split(opened, "train", self.num_epochs),
            self.window,
            self.num_micro_batches,
            self.cost,
            self.seed,
            self.long_documents,
            layout=self.layout,
        ).planner(packing)

    def run(self) -> int:
        """Plans all steps twice, reloading one of the planners before each; the number of steps.

        Raises:
            AssertionError: plans or states differ, a step is empty, a document that has arrived
                is looked ahead to, or a token runs twice or is lost.
        """
        alone, reloaded = self.planner(), self.planner()
        ran: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        step = 0
        while step < self.num_steps:
            state = json.loads(json.dumps(reloaded.state_dict()))
            reloaded = self.planner()
            reloaded.load_state_dict(state)
            assert json.loads(json.dumps(reloaded.state_dict())) == state, f"state of step {step}"
            plan, again = alone.next_plan(), reloaded.next_plan()
            if plan is None or again is None:
                assert plan is again, f"one ends at step {step}"
                break
            assert plan.digest == again.digest, f"plans of step {step} differ"
            assert plan.num_tokens, f"step {step} is empty"
            for packing in (alone.packer, reloaded.packer):
                ahead = [
                    *getattr(packing, "_heavy_ahead", ()),
                    *getattr(packing, "_light_ahead", ()),
                ]
                assert all(document.step > step for document in ahead), f"stuck in step {step}"
            for document in plan.documents:
                which = (document.corpus, document.number, document.epoch)
                ran.setdefault(which, []).append((document.offset, document.length))
            step += 1
        else:
            plan = again
        for which, pieces in ran.items():
            stop = 0
            for offset, length in sorted(pieces):
                assert offset >= stop, f"document {which} runs tokens twice"
                stop = offset + length
        if plan is None:
            tokens = sum(length for pieces in ran.values() for _, length in pieces)
            stream = alone.stream
            assert isinstance(stream, DocumentStream)
            assert self.num_epochs is not None
            assert tokens == self.num_epochs * stream.tokens_per_epoch, "tokens are lost"
        return step


@st.composite
def soaks(draw: st.DrawFn, num_steps: int = 40) -> Soak:
    """Draws one to three corpora of uneven documents, many of them longer than the window."""
    window = draw(st.integers(2, 40))
    longest = draw(st.sampled_from([1, 2, 5])) * window
    num_corpora = draw(st.integers(1, 3))
    corpus = st.lists(st.integers(1, longest), min_size=1, max_size=30)
    lengths = draw(st.lists(corpus, min_size=num_corpora, max_size=num_corpora))
    weight = st.sampled_from([0.1, 0.3, 1, 7]) | st.floats(0.01, 10)
    weights = draw(st.none() | st.lists(weight, min_size=num_corpora, max_size=num_corpora))
    num_micro_batches = draw(st.integers(1, 5))
    step_tokens = num_micro_batches * window
    return Soak(
        draw(st.sampled_from(sorted(PACKINGS))),
        tuple(map(tuple, lengths)),
        None if weights is None else tuple(weights),
        draw(st.integers(1, 3)) if weights is None else None,
        draw(st.sampled_from(["split", "truncate"])),
        window,
        num_micro_batches,
        draw(st.integers(window, 3 * window)),
        draw(st.none() | st.integers(step_tokens, 2 * step_tokens)),
        draw(st.integers(0, 6)),
        draw(costs()),
        num_steps,
        draw(st.integers(0, 99)),
    )
