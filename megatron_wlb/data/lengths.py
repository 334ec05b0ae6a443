"""Synthetic document lengths: named, seeded distributions to measure packings on.

Each is drawn from numpy's ``default_rng``, concatenated, and cut at every window, as Megatron cuts
a corpus: each piece is a document, and a window is full. The figures they are made from are
published statements about corpora; what is ours is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.reading import unknown, whole_number

Lengths: TypeAlias = npt.NDArray[np.int64]
Draw: TypeAlias = Callable[[np.random.Generator, int], npt.NDArray[Any]]
"""Draws so many lengths of uncut documents, at least 1 each; fractions are dropped."""

REFERENCE_WINDOW = 131072
MOST_DRAWN_TOKENS = 1 << 38
"""The most tokens to draw: their documents take some GB and as many seconds."""


def reference(random: np.random.Generator, size: int) -> npt.NDArray[Any]:
    """A long-context corpus: lognormal (median 1200, σ 1.3), but 3 % Pareto.

    The tail begins at 16384 with α 0.8 and ends at 262144. Cut at 131072, a window has some 31
    documents, and 82 % of the tokens are in documents under half a window.
    """
    body = random.lognormal(np.log(1200), 1.3, size)
    shortest, longest, alpha = 16384, 262144, 0.8
    cut_off = 1 - (shortest / longest) ** alpha
    tail = shortest * (1 - random.random(size) * cut_off) ** (-1 / alpha)
    return np.minimum(np.where(random.random(size) < 0.03, tail, body), longest)


def stdlib(random: np.random.Generator, size: int) -> npt.NDArray[Any]:
    """Files of the Python standard library: lognormal, median 1.7K, mean 4.5K, p99 about 43K."""
    return random.lognormal(np.log(1700), 1.395, size)


def magi(random: np.random.Generator, size: int) -> npt.NDArray[Any]:
    """MagiAttention's benchmark: 71.4 % ≤ 1K, 94.4 % ≤ 4K, 0.45 % ≥ 32K; log-uniform between.

    The ends, 32 and 262144, are ours.
    """
    shares, lengths = (0, 0.714, 0.944, 0.9955, 1), (32, 1024, 4096, 32768, 262144)
    return _from_quantiles(random, size, shares, lengths)


def slimpack(random: np.random.Generator, size: int) -> npt.NDArray[Any]:
    """SlimPack's long-context corpora: 80 % < 4K, 1 % > 128K; log-uniform between.

    The ends, 128 and 262144, are ours. Uncut, that 1 % is 44 % of the attention.
    """
    shares, lengths = (0, 0.8, 0.99, 1), (128, 4096, 131072, 262144)
    return _from_quantiles(random, size, shares, lengths)


DISTRIBUTIONS: dict[str, Draw] = {
    "reference": reference,
    "stdlib": stdlib,
    "magi": magi,
    "slimpack": slimpack,
}


def distribution(name: str) -> Draw:
    """The distribution called so. Raises :class:`ConfigError` otherwise, and names the nearest."""
    if name not in DISTRIBUTIONS:
        raise unknown("distribution", name, DISTRIBUTIONS)
    return DISTRIBUTIONS[name]


def sample_lengths(
    name: str, num_windows: int, *, seed: int, window: int = REFERENCE_WINDOW
) -> Lengths:
    """Lengths, in stream order, of the documents that fill ``num_windows`` windows exactly.

    The same for the same arguments. No document is longer than a window or crosses one. Memory: 32
    bytes a document.

    Raises :class:`ConfigError` for an unknown name (the nearest one is named) or a size below 1.
    """
    draw = distribution(name)
    for what, value in (("num_windows", num_windows), ("window", window)):
        whole_number(what, value, 1)
    whole_number("tokens to draw (windows × window)", num_windows * window, 1, MOST_DRAWN_TOKENS)
    random = np.random.default_rng(seed)
    total = num_windows * window
    parts: list[Lengths] = []
    drawn = 0
    while drawn < total:
        part = draw(random, 65536).astype(np.int64)
        parts.append(np.maximum(part, 1))
        drawn += int(parts[-1].sum())
    ends = np.cumsum(np.concatenate(parts))
    ends = np.concatenate([ends[ends < total], np.arange(window, total + 1, window)])
    ends.sort(kind="stable")  # two sorted runs: merged, which is faster than any hash
    lengths = np.diff(ends, prepend=0)
    return lengths[lengths > 0]


def _from_quantiles(
    random: np.random.Generator, size: int, shares: Sequence[float], lengths: Sequence[float]
) -> npt.NDArray[Any]:
    """Draws lengths with the share ``shares[i]`` below ``lengths[i]``, log-uniform between."""
    return np.exp(np.interp(random.random(size), shares, np.log(lengths)))
