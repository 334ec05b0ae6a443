"""A :class:`DocumentCost`, or the cost of a stage, fitted to measured times; the runtime measures.

Every rank must plan with the same cost: fit on one rank and send the result to the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.document import DocumentCost, Work, unseen
from megatron_wlb.errors import ConfigError

Floats: TypeAlias = npt.NDArray[np.float64]


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
                f"cost profile: {sample} is no measurement; lengths and times must be positive"
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
    forward, forward_errors = _fit_columns(powers, np.array([s.forward_us for s in samples]))
    backward, backward_errors = _fit_columns(powers, np.array([s.backward_us for s in samples]))
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


@dataclass(frozen=True, slots=True)
class StageSample:
    """Measured times of one stage's forward and backward of a micro-batch."""

    lengths: Sequence[int]
    """Lengths of each attention segment (and of padding), in tokens."""
    forward_us: float
    backward_us: float
    prefixes: Sequence[int] = ()
    """Keys before each segment, of slices that ran before; none if not given."""
    is_slice: bool = False
    """Whether the first segment is a slice of a document."""


@dataclass(frozen=True, slots=True)
class StageFit:
    """The cost of a stage as fitted to micro-batches that ran there.

    Each pass takes ``constant + documents · n + linear · Σd + quadratic · Σd²`` µs: Hydraulis'
    latency model (App. B.2) with what every document costs besides. A slice counts as a document,
    with ``(p + d)² - p²`` for the ``p`` keys before it, and takes ``slice_us`` more.
    """

    forward: tuple[float, float, float, float]
    """The four coefficients in this order, none negative."""
    backward: tuple[float, float, float, float]
    mean_error: float
    """Mean of ``|predicted ÷ measured - 1|`` over the times it was fitted to."""
    slice_us: tuple[float, float] = (0.0, 0.0)
    """Forward and backward of a slice, for its document's buffers of keys and values; not in
    :meth:`work`, which is of whole documents."""

    def work(self, lengths: Iterable[int]) -> Work:
        """The parts of a micro-batch's time."""
        counts = _counts(list(lengths))
        forward, backward = (
            [c * n for c, n in zip(pass_, counts, strict=True)]
            for pass_ in (self.forward, self.backward)
        )
        return Work(sum(forward[:3]), forward[3], sum(backward[:3]), backward[3])


def fit_stage(samples: Sequence[StageSample]) -> StageFit:
    """The non-negative coefficients with the least squared relative errors.

    Measurements that are three times as far off as the middle one count for nothing: a shared
    machine at times does something else.

    Raises :class:`ConfigError` for fewer than eight samples, or a time that is not positive.
    """
    if len(samples) < 8:
        raise ConfigError(
            f"stage fit: {len(samples)} micro-batches are too few for five coefficients; "
            "measure at least 8"
        )
    rows = [(*_counts(s.lengths, s.prefixes), int(s.is_slice)) for s in samples]
    columns = np.array(rows, dtype=np.float64)
    coefficients, errors = [], []
    for name in ("forward_us", "backward_us"):
        times_us = np.array([getattr(sample, name) for sample in samples])
        if not (np.isfinite(times_us) & (times_us > 0)).all():
            raise ConfigError(f"stage fit: {name} has a time that is not positive; measure again")
        fitted, _ = _fit_columns(columns, times_us)
        error = np.abs(columns @ fitted / times_us - 1)
        usual = error <= 3 * float(np.median(error))
        fitted, _ = _fit_columns(columns[usual], times_us[usual])
        coefficients.append(fitted)
        errors.append(np.abs(columns @ fitted / times_us - 1))
    (*forward, forward_us), (*backward, backward_us) = np.array(coefficients).tolist()
    slice_us = forward_us, backward_us
    return StageFit((*forward,), (*backward,), float(np.mean(errors)), slice_us)


def _counts(lengths: Sequence[int], prefixes: Sequence[int] = ()) -> tuple[int, int, int, int]:
    """What a micro-batch's time grows with."""
    pairs = sum([length * length for length in lengths])
    if prefixes:
        pairs += sum([2 * keys * n for keys, n in zip(prefixes, lengths, strict=True)])
    return 1, len(lengths), sum(lengths), pairs


def _fit_columns(columns: Floats, times_us: Floats) -> tuple[Floats, Floats]:
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
