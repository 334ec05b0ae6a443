"""Documents, streams and costs for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def costs() -> st.SearchStrategy[DocumentCost]:
    """Unequal coefficients; documents cost more the longer they are."""
    linear = st.floats(0.01, 10)
    quadratic = st.floats(0, 1)
    return st.builds(DocumentCost, linear, quadratic, linear, quadratic, st.floats(0, 1000))
