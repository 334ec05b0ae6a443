"""Documents, streams and costs for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hypothesis import strategies as st

from megatron_wlb.cost import DocumentCost
from megatron_wlb.data.lengths import REFERENCE_WINDOW, sample_lengths
from megatron_wlb.plan import Document


def reference_lengths(num_windows: int, seed: int, window: int = REFERENCE_WINDOW) -> list[int]:
    """Lengths of the documents of ``num_windows`` windows of the reference distribution."""
    lengths: list[int] = sample_lengths("reference", num_windows, seed=seed, window=window).tolist()
    return lengths


def documents(lengths: Sequence[int], step: int = 0, first: int = 0) -> list[Document]:
    """Whole documents of one corpus that arrive in ``step``, numbered from ``first``."""
    return [
        Document(0, first + i, 0, length, True, 0, first + i, step)
        for i, length in enumerate(lengths)
    ]


class ListStream:
    """A stream that gives documents of the listed lengths, one list a step."""

    def __init__(self, steps: Sequence[Sequence[int]]) -> None:
        self._steps = steps
        self._first = [0, *accumulate(map(len, steps))]
        self.step = 0

    @classmethod
    def of_step_tokens(cls, lengths: Sequence[int], step_tokens: int) -> ListStream:
        """Lets documents arrive as the real stream does: in the step of their first token."""
        steps: list[list[int]] = [[] for _ in range(-(-sum(lengths) // step_tokens))]
        position = 0
        for length in lengths:
            steps[position // step_tokens].append(length)
            position += length
        return cls(steps)

    @property
    def exhausted(self) -> bool:
        return self.step >= len(self._steps)

    def next_step(self) -> list[Document]:
        arrived = documents(self._steps[self.step], self.step, self._first[self.step])
        self.step += 1
        return arrived

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]


@dataclass(frozen=True)
class Run:
    """What a packer is given: its settings, and lengths of arriving documents by step."""

    settings: dict[str, Any]
    steps: list[list[int]]


def costs() -> st.SearchStrategy[DocumentCost]:
    """Unequal coefficients; documents cost more the longer they are."""
    linear = st.floats(0.01, 10)
    quadratic = st.floats(0, 1)
    return st.builds(DocumentCost, linear, quadratic, linear, quadratic, st.floats(0, 1000))


@st.composite
def runs(draw: st.DrawFn, longest_in_windows: int | None = None) -> Run:
    """Any lengths up to S_max, or to so many windows: uneven, all equal, one giant, all giants.

    There may be fewer documents than micro-batches, steps without any, more than can run in a
    step, and an S_max of just the window.
    """
    window = draw(st.integers(1, 50))
    max_tokens = draw(st.one_of(st.just(window), st.integers(window, 3 * window)))
    longest = longest_in_windows * window if longest_in_windows else max_tokens
    any_length = st.integers(1, longest)
    length = draw(
        st.sampled_from(
            [any_length, st.integers(1, max(1, longest // 8)), st.just(draw(any_length))]
        )
    )
    steps = draw(st.lists(st.lists(length, max_size=12), min_size=1, max_size=10))
    if draw(st.booleans()):
        steps[draw(st.integers(0, len(steps) - 1))].append(longest)
    num_micro_batches = draw(st.integers(1, 5))
    step_tokens = num_micro_batches * window
    settings = {
        "num_micro_batches": num_micro_batches,
        "window": window,
        "max_tokens": max_tokens,
        "max_step_tokens": draw(st.none() | st.integers(step_tokens, 2 * step_tokens)),
        "max_age": draw(st.integers(0, 4)),
        "cost": draw(costs()),
    }
    return Run(settings, steps)
