"""The cost of a stage, fitted to what its forwards and backwards took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_wlb.cost.document import Work
from megatron_wlb.cost.fit import fit_columns
from megatron_wlb.errors import ConfigError


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
        fitted, _ = fit_columns(columns, times_us)
        error = np.abs(columns @ fitted / times_us - 1)
        usual = error <= 3 * float(np.median(error))
        fitted, _ = fit_columns(columns[usual], times_us[usual])
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
