"""A :class:`DocumentCost` fitted to measured times; the runtime measures.

Every rank must plan with the same cost: fit on one rank and send the result to the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from megatron_wlb.cost.document import DocumentCost, unseen
from megatron_wlb.cost.schedule.graph import Floats
from megatron_wlb.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured times of a micro-batch that is one document."""

    length: int
    """Tokens of the document."""
    forward_us: float
    backward_us: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted cost and how far it is from what was measured."""

    cost: DocumentCost
    mean_error: float
    """Mean of ``|predicted ÷ measured - 1|`` over all forward and backward times."""
    max_error: float
    """The largest ``|predicted ÷ measured - 1|``."""
    num_samples: int


def fit_document_cost(
    samples: Iterable[Sample], reach_tokens: int | None = None, windowed_share: float = 0.0
) -> Fit:
    """The non-negative cost with the least squared *relative* errors over ``samples``.

    Relative errors, so that short documents count as much as long ones. Each pass is fitted apart
    as ``constant + linear · d + quadratic · d²``; both constants together are ``micro_batch_us``.
    Layers with a sliding window of ``reach_tokens``, a share of all, are spared what
    :func:`~megatron_wlb.cost.document.unseen` says of ``d²``.

    Raises :class:`ConfigError` for fewer than three distinct lengths, a length below 1, a time that
    is not positive, or times that do not grow with the length.
    """
    samples = list(samples)
    for sample in samples:
        times = (sample.forward_us, sample.backward_us)
        if sample.length < 1 or not all(math.isfinite(us) and us > 0 for us in times):
            raise ConfigError(
                f"cost profile: {sample} is not a measurement; lengths and times must be positive"
            )
    num_lengths = len({sample.length for sample in samples})
    if num_lengths < 3:
        raise ConfigError(
            f"cost fit: {num_lengths} distinct lengths cannot tell constant, linear and quadratic "
            "time apart; measure at least 3"
        )
    lengths = np.array([sample.length for sample in samples], dtype=np.float64)
    powers = lengths[:, None] ** np.arange(3)
    powers[:, 2] -= [windowed_share * unseen(s.length, reach_tokens) for s in samples]
    forward, forward_errors = fit_columns(powers, np.array([s.forward_us for s in samples]))
    backward, backward_errors = fit_columns(powers, np.array([s.backward_us for s in samples]))
    if not any(forward[1:]) and not any(backward[1:]):
        raise ConfigError(
            f"cost profile: times do not grow with the length over {min(lengths):.0f}-"
            f"{max(lengths):.0f} tokens; measure longer documents"
        )
    errors = np.concatenate([forward_errors, backward_errors])
    linear_us, square_us, backward_us, backward_square_us = map(
        float, (*forward[1:], *backward[1:])
    )
    return Fit(
        DocumentCost(
            linear_us,
            square_us,
            backward_us,
            backward_square_us,
            float(forward[0] + backward[0]),
            windowed_share * square_us,
            windowed_share * backward_square_us,
            reach_tokens,
        ),
        mean_error=float(errors.mean()),
        max_error=float(errors.max()),
        num_samples=len(samples),
    )


def fit_columns(columns: Floats, times_us: Floats) -> tuple[Floats, Floats]:
    """Non-negative coefficients of few columns, and the relative error of each time.

    The best non-negative fit is the plain least-squares fit on the columns that it uses, and three
    to five columns have few subsets: the best of those fits that have no negative coefficient.
    A column of zeros gets none.
    """
    used = np.flatnonzero(columns.any(axis=0)).tolist()
    scale = np.ones(columns.shape[1])
    scale[used] = columns[:, used].max(axis=0)  # columns of like size
    scaled = columns / scale / times_us[:, None]
    num = columns.shape[1]
    best, best_residual = np.zeros(num), math.inf
    for size in range(1, len(used) + 1):
        for subset in combinations(used, size):
            active = list(subset)
            solution = np.linalg.lstsq(scaled[:, active], np.ones(len(columns)), rcond=None)[0]
            residual = float(np.square(scaled[:, active] @ solution - 1).sum())
            if (solution >= 0).all() and residual < best_residual:
                best, best_residual = np.zeros(num), residual
                best[active] = solution
    return best / scale, np.abs(scaled @ best - 1)
