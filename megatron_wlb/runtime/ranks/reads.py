"""What a rank has read of the corpora in a step, as checksums: other ranks must have read the same.

Tensor-parallel ranks read the same tokens, and so do the first and the last stage of a pipeline,
which has the labels besides. Replicas read other documents, so nothing contradicts what one rank
alone has read.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class ReadRun:
    """Tokens of a stored document that lie together in a micro-batch of this rank."""

    micro_batch: int
    corpus: int
    document: int
    start: int
    """The first token, counted from the stored document's."""
    num_tokens: int
    crc32: int
    """A checksum of the tokens that the model takes in."""
    with_labels: int | None
    """The same with the tokens behind them that are labels alone; None before the last stage."""

    @classmethod
    def of(
        cls,
        place: tuple[int, int, int, int],
        tokens: npt.NDArray[np.int64],
        taken: npt.NDArray[np.int64],
        last: bool,
    ) -> ReadRun:
        """Sums up ``tokens``, of which ``taken`` are the first."""
        with_labels = zlib.crc32(tokens.data) if last else None
        return cls(*place, len(taken), zlib.crc32(taken.data), with_labels)


@dataclass(frozen=True)
class Reads:
    """The runs of a step on one rank."""

    label: str
    """The step."""
    runs: Sequence[ReadRun]
    place: tuple[int, ...]
    """Ranks among which are all that read the same."""
    weights: tuple[int, int]
    """What this rank's checksums count, without labels and with them. The weights of all that read
    the same add up to 0, and so do checksums that are equal."""

    @classmethod
    def of(cls, label: str, runs: Sequence[ReadRun], model: Any) -> Reads:
        """The reads of this rank of ``model``, in an order that is that of all its peers."""
        groups, gpts = model.groups, model.gpts
        is_first, is_last = any(g.pre_process for g in gpts), any(g.post_process for g in gpts)
        tp = groups.tp.size()
        readers = tp * min(groups.pp.size(), 2)
        leads = groups.tp.rank() == 0
        weights = (
            (readers - 1 if leads and is_first else -1) if is_first or is_last else 0,
            (tp - 1 if leads else -1) if is_last else 0,
        )
        ordered = sorted(runs, key=lambda run: run.micro_batch)  # stable
        place = tuple(sorted(dist.get_process_group_ranks(groups.mp)))
        return cls(label, ordered, place, weights)

    @property
    def balance(self) -> int:
        """The rank's share of a sum over all ranks that is 0 where all have read the same.

        Otherwise it is 0 once in 4 billion times.
        """
        sums = zip(*((run.crc32, run.with_labels or 0) for run in self.runs), strict=True)
        checksums = (zlib.crc32(np.array(column, dtype=np.int64).tobytes()) for column in sums)
        return sum(w * crc32 for w, crc32 in zip(self.weights, checksums, strict=False))

    def told(self) -> dict[str, str]:
        """The checksums by what they are of."""
        values = {}
        for run in self.runs:
            # Not by its path, which may differ over machines.
            name = (
                f"tokens {run.start} to {run.start + run.num_tokens} of document {run.document} of "
                f"corpus {run.corpus}, in micro-batch {run.micro_batch}, with crc32"
            )
            values[name] = f"{run.crc32:08x}"
            if run.with_labels is not None:
                values[f"labels of {name}"] = f"{run.with_labels:08x}"
        return values
