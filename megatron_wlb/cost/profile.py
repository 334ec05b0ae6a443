"""A :class:`DocumentCost` fitted to measured times. (The measuring itself is runtime's.)

Fit on one rank and send the result to the others: measured times differ between ranks, and every
rank must plan with the same cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron_wlb.cost.document import DocumentCost
from megatron_wlb.errors import ConfigError

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured times of a micro-batch that is one document."""

    length: int
    """Tokens."""
    forward_us: float
    backward_us: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted cost and how far it is from what was measured."""

    cost: DocumentCost
    mean_error: float
    """Mean of ``|predicted ÷ measured - 1|`` over all forward and backward times."""
    max_error: float
    """The largest one."""
    num_samples: int

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, for checkpoints, logs and profile files; inverse of :meth:`from_dict`."""
        return {
            "cost": self.cost.as_dict(),
            "mean_error": self.mean_error,
            "max_error": self.max_error,
            "num_samples": self.num_samples,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Fit:
        """Raises :class:`ConfigError` if it is not what :meth:`as_dict` wrote."""
        try:
            return cls(
                DocumentCost.from_dict(values["cost"]),
                float(values["mean_error"]),
                float(values["max_error"]),
                int(values["num_samples"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"cost profile: {type(error).__name__} {error}; write it again by measuring"
            ) from None


def fit_document_cost(samples: Iterable[Sample]) -> Fit:
    """The non-negative cost with the least squared *relative* errors over ``samples``.

    Relative errors, because times span several orders of magnitude and short documents count as
    much as long ones. Each pass is fitted apart as ``constant + linear · d + quadratic · d²``; the
    two constants together are ``micro_batch_us``.

    Raises:
        ConfigError: fewer than three distinct lengths, a length below 1, a time that is not
            positive, or times that do not grow with the length.
    """
    samples = list(samples)
    for sample in samples:
        times = (sample.forward_us, sample.backward_us)
        if sample.length < 1 or not all(math.isfinite(us) and us > 0 for us in times):
            raise ConfigError(
                f"cost fit: {sample} is no measurement; lengths and times must be positive"
            )
    num_lengths = len({sample.length for sample in samples})
    if num_lengths < 3:
        raise ConfigError(
            f"cost fit: {num_lengths} distinct lengths cannot tell constant, linear and quadratic "
            "time apart; measure at least 3"
        )
    lengths = np.array([sample.length for sample in samples], dtype=np.float64)
    forward, forward_errors = _fit(lengths, np.array([s.forward_us for s in samples]))
    backward, backward_errors = _fit(lengths, np.array([s.backward_us for s in samples]))
    if not any(forward[1:]) and not any(backward[1:]):
        raise ConfigError(
            f"cost fit: times do not grow with the length over {min(lengths):.0f}-"
            f"{max(lengths):.0f} tokens; measure longer documents"
        )
    errors = np.concatenate([forward_errors, backward_errors])
    return Fit(
        DocumentCost(forward[1], forward[2], backward[1], backward[2], forward[0] + backward[0]),
        mean_error=float(errors.mean()),
        max_error=float(errors.max()),
        num_samples=len(samples),
    )


def _fit(lengths: Floats, times_us: Floats) -> tuple[list[float], Floats]:
    """Coefficients of ``d⁰, d¹, d²``, none negative, and the relative error of each time.

    The best non-negative fit is the plain least-squares fit on the columns that it uses, and three
    columns have only seven subsets: the best of those fits that have no negative coefficient.
    """
    scale = np.array([1.0, lengths.max(), lengths.max() ** 2])  # columns of like size
    columns = lengths[:, None] ** np.arange(3) / scale / times_us[:, None]
    best, best_residual = np.zeros(3), math.inf
    for size in (1, 2, 3):
        for subset in combinations(range(3), size):
            active = list(subset)
            solution = np.linalg.lstsq(columns[:, active], np.ones(len(lengths)), rcond=None)[0]
            residual = float(np.square(columns[:, active] @ solution - 1).sum())
            if (solution >= 0).all() and residual < best_residual:
                best, best_residual = np.zeros(3), residual
                best[active] = solution
    return (best / scale).tolist(), np.abs(columns @ best - 1)
