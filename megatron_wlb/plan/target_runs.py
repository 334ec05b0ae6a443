"""Which tokens of a document are targets, and what each counts in the loss.

A *run* is ``(start, stop, weight)``: tokens ``[start, stop)``, counted from the stored document's
first one, are targets that count ``weight`` each. Runs are in order and do not overlap. Tokens of
no run are read, but nothing learns to predict them: prompts of conversations, answers of tools.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from megatron_wlb.reading import MAX_SIZE, shown

Runs: TypeAlias = tuple[tuple[int, int, float], ...]


def weight_of(runs: Runs, first: int, last: int) -> float:
    """Sums the weights of targets ``[first, last)``; an int where all weights are."""
    return sum(
        weight * (min(stop, last) - max(start, first))
        for start, stop, weight in runs
        if start < last and first < stop
    )


def by_sample(runs: Runs | None, length: int) -> Runs:
    """Weights that sum to 1 over the ``length`` first tokens of a document, the first one aside,
    which nothing predicts: the loss of a step is then the mean over documents of each one's mean.

    ``runs`` None means that every token is a target. A document without a target stays so.
    """
    runs = ((1, length, 1),) if runs is None else runs
    total = weight_of(runs, 1, length)
    return tuple((start, stop, weight / total) for start, stop, weight in runs) if total else ()


def checked(values: Iterable[Sequence[float]]) -> Runs:
    """Reads the lists that JSON makes of runs. Raises ``ValueError`` for any other."""
    runs, before = [], 0
    for start, stop, weight in values:
        whole = type(start) is int and type(stop) is int and before <= start < stop <= MAX_SIZE
        if not whole or type(weight) not in (int, float) or not 0 < weight < math.inf:
            raise ValueError(f"{shown([start, stop, weight])} is no run of targets")
        runs.append((int(start), int(stop), weight))
        before = int(stop)
    return tuple(runs)
