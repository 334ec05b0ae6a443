"""Which tokens of a stored corpus are targets: ``PREFIX.targets.npy`` beside ``.bin`` and ``.idx``.

The file is a numpy array of runs, 20 bytes each, in order: ``document`` (int64), ``start`` and
``stop`` (int32, half-open, counted from the document's first token), ``weight`` (float32). A
document without a run has no target. A corpus without the file has all tokens as targets.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from megatron_wlb.data.arrays import array_of, open_array
from megatron_wlb.data.index import read_lengths
from megatron_wlb.errors import CorpusError
from megatron_wlb.files import replacing
from megatron_wlb.plan.target_runs import Runs

RUN = np.dtype([("document", "<i8"), ("start", "<i4"), ("stop", "<i4"), ("weight", "<f4")])
SUFFIX = ".targets.npy"
_RUNS_AT_ONCE = 1 << 20


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets of a corpus, which stay on its disk until they are looked at."""

    runs: npt.NDArray[Any]

    @classmethod
    def open(cls, prefix: str, lengths: npt.NDArray[np.int64]) -> Targets | None:
        """Opens and checks the file of a corpus of documents of these ``lengths``; None without
        one. Raises CorpusError for one that is damaged or of another corpus.
        """
        path = Path(prefix + SUFFIX)

        def bad(reason: str) -> NoReturn:
            raise CorpusError(f"{path} {reason}; write it anew, or remove it to train every token")

        try:
            runs = open_array(path)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not path.is_symlink():
                return None
            bad(f"cannot be read ({error.strerror or error})")
        except ValueError as error:
            bad(str(error))
        if runs.dtype != RUN or runs.ndim != 1:
            bad("is not an array of runs of targets")
        for first in range(0, len(runs), _RUNS_AT_ONCE):
            # With the one before, to see the order across pieces.
            wrong = _first_wrong(runs[max(first - 1, 0) : first + _RUNS_AT_ONCE], lengths)
            if wrong is not None:
                bad(
                    f"has the run {wrong}, which is out of order, outside of its document or "
                    f"weighs nothing (the corpus has {len(lengths)} documents)"
                )
        return cls(runs)

    def of(self, number: int) -> Runs:
        """The runs of a document."""
        start, stop = np.searchsorted(self.runs["document"], [number, number + 1]).tolist()
        return tuple(
            (first, last, _counted(weight))
            for _, first, last, weight in self.runs[start:stop].tolist()
        )

    @cached_property
    def digest(self) -> str:
        """Names them: 16 hex digits."""
        return hashlib.sha256(self.runs.tobytes()).hexdigest()[:16]


def write_targets(prefix: str | os.PathLike[str], masks: Iterable[npt.ArrayLike]) -> None:
    """Says which tokens of the corpus ``PREFIX.bin``, ``.idx`` a run trains, and how much.

    ``masks`` has one array ``[length]`` a document, in the corpus's order: 0 where a token is no
    target, else what it counts in the loss. Replaces what the corpus had. Raises CorpusError, and
    writes nothing, for masks that do not fit the corpus, or whose weights are negative or beyond
    float32.
    """
    runs = targets_of(str(prefix), masks, read_lengths(str(prefix)))
    rows = [(number, *run) for number, own in enumerate(runs) for run in own]
    with replacing(str(prefix) + SUFFIX) as draft, draft.open("wb") as stream:
        np.save(stream, np.array(rows, dtype=RUN))


def targets_of(
    name: str, masks: Iterable[npt.ArrayLike], lengths: npt.NDArray[np.int64]
) -> list[Runs]:
    """The runs of each document's mask; ``lengths`` are the documents'.

    Raises CorpusError, which begins with ``name``, as :func:`write_targets`.
    """
    arrays = [array_of(mask) for mask in masks]
    for number, array in enumerate(arrays):
        if array.ndim != 1 or array.dtype.kind not in "biuf":
            raise CorpusError(
                f"{name}: the mask of document {number} holds {array.dtype} of shape "
                f"{array.shape}; give a list of numbers"
            )
    found = np.array([array.size for array in arrays], dtype=np.int64)
    if not np.array_equal(found, lengths):
        raise CorpusError(
            f"{name} has {len(lengths)} documents of {lengths.sum()} tokens, and the masks are "
            f"{len(found)} of {found.sum()}; give one a document, as long as it"
        )
    for number, array in enumerate(arrays):
        with np.errstate(over="ignore"):
            read = array.astype(RUN["weight"])
        if not (np.isfinite(read) & (array >= 0) & ((read > 0) == (array > 0))).all():
            raise CorpusError(
                f"{name}: the mask of document {number} has weights from {array.min()} to "
                f"{array.max()}; give numbers from 0 on that float32 holds"
            )
    return [
        tuple((start, stop, _counted(weight)) for start, stop, weight in runs_of(array))
        for array in arrays
    ]


def _counted(weight: float) -> float:
    """An int where it is whole, so that targets are counted."""
    return int(weight) if weight.is_integer() else weight


def runs_of(mask: npt.NDArray[Any]) -> Runs:
    """Runs of equal weights in a mask ``[length]``; see :mod:`megatron_wlb.plan.target_runs`."""
    weights = np.concatenate([[0.0], mask.astype(np.float64), [0.0]])
    edges = np.flatnonzero(np.diff(weights))
    starts, stops, found = edges[:-1], edges[1:], weights[edges[:-1] + 1]
    rows = zip(starts.tolist(), stops.tolist(), found.tolist(), strict=True)
    return tuple((start, stop, weight) for start, stop, weight in rows if weight)


def _first_wrong(runs: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> Any:
    """The first of some runs that cannot be, or does not come after the one before it."""
    document, start, stop, weight = (runs[name] for name in RUN.names or ())
    held = (document >= 0) & (document < len(lengths)) & (start >= 0) & (start < stop)
    held &= stop <= lengths[np.where(held, document, 0)]
    held &= np.isfinite(weight) & (weight > 0)
    later = document[1:] > document[:-1]
    later |= (document[1:] == document[:-1]) & (start[1:] >= stop[:-1])
    held[1:] &= later
    return None if held.all() else runs[np.flatnonzero(~held)[0]].item()
