"""A loss of one's own in place of cross-entropy: a function of targets' log-probabilities.

The step sums what the function returns, each target's loss times its weight, and divides once by
the sum of all weights, as with cross-entropy. So micro-batches, slices and ranks change nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from megatron_wlb.errors import ConfigError, TrainingError
from megatron_wlb.files import open_file
from megatron_wlb.plan import Document, MicroBatchPlan
from megatron_wlb.reading import one_line


@dataclass(frozen=True)
class TargetTokens:
    """The targets of one micro-batch on this rank, ``n`` of them, of all spans one after another.

    A token that several documents share is a target of each.

    Context-parallel ranks have parts of a document, and a slice has some of its tokens. A loss that
    needs all of a sample's tokens at once takes them from a pass before.
    """

    documents: tuple[Document, ...]
    """What the micro-batch runs, or slices of it; and what shares tokens of these."""
    owners: torch.Tensor
    """``[n]`` int64: the place in ``documents`` of that a target belongs to."""
    samples: torch.Tensor
    """``[n]`` int64: that document's number in its corpus."""
    positions: torch.Tensor
    """``[n]`` int64: the target's place in the stored document, from 1 on: nothing predicts 0."""
    tokens: torch.Tensor
    """``[n]`` int64: the ids of the targets."""
    weights: torch.Tensor
    """``[n]`` fp32: what each one's loss is multiplied by."""


LossFunction: TypeAlias = Callable[[torch.Tensor, TargetTokens], torch.Tensor]
"""Takes the targets' log-probabilities ``[n]``, fp32, and returns their losses ``[n]``.

``n`` is at least 1. The log-probabilities have a gradient in training and none in an evaluation. It
must not communicate: ranks call it for unlike micro-batches. With recomputation it is called once.
"""


class Targeted(NamedTuple):
    """Local rows that one document of a micro-batch runs, or shares."""

    document: Document
    rows: slice
    """Local rows."""
    labels: npt.NDArray[np.int64]
    """The token behind each, counted from the stored document's first."""

    def weights(self, depth: int = 0) -> npt.NDArray[np.float32]:
        """What the label of each counts for the document, or the label ``depth`` tokens on."""
        labels, runs = self.labels + depth, self.document.targets
        last = self.document.offset + self.document.num_labels
        if runs is None:
            return (labels <= last).astype(np.float32)
        starts, stops, weights = np.array([(0, 0, 0.0), *runs]).T
        at = np.searchsorted(starts, labels, side="right") - 1
        found = np.where((labels < stops[at]) & (labels <= last), weights[at], 0)
        return found.astype(np.float32)


def targeted(plan: MicroBatchPlan, rows: npt.NDArray[np.int64]) -> Iterator[Targeted]:
    """What each document of a micro-batch has of its local ``rows``, which ascend: those that it
    runs, and then what others share.
    """
    every, first = [], 0
    for span in plan.spans:
        place = span.document.offset + span.start
        every.append((span.document, first, first := first + span.length, place))
    every += [(use.document, *use.rows, use.place) for use in plan.sharing.uses]
    for document, start, stop, place in every:
        low, high = np.searchsorted(rows, [start, stop]).tolist()
        yield Targeted(document, slice(low, high), rows[low:high] + (place + 1 - start))


@dataclass(frozen=True)
class OwnLoss:
    """The loss of one micro-batch by a function of the user's."""

    function: LossFunction
    rows: torch.Tensor
    """``[n]`` int64: the rank's token of each target. One that several documents share is there
    once for each that it counts for."""
    targets: TargetTokens

    @classmethod
    def of(
        cls,
        function: LossFunction,
        plan: MicroBatchPlan,
        local: npt.NDArray[np.int64] | slice,
        labels: npt.NDArray[np.int64],
    ) -> OwnLoss:
        """``labels`` are ``[T/CP]``, of the ``local`` tokens of the micro-batch."""
        found: list[tuple[npt.NDArray[Any], ...]] = [(np.zeros(0, dtype=np.int64),) * 4]
        owners_of: dict[tuple[int, ...], int] = {}  # one of what a document runs and shares
        documents: list[Document] = []
        for part in targeted(plan, np.arange(plan.padded_length)[local]):
            weights = part.weights()
            counted = np.flatnonzero(weights)
            name = part.document.corpus, part.document.number, part.document.offset
            owner = owners_of.setdefault(name, len(documents))
            documents += [part.document] if owner == len(documents) else []
            owners = np.full(len(counted), owner)
            rows = part.rows.start + counted
            found.append((rows, owners, part.labels[counted], weights[counted]))
        rows, owners, places, weights = map(np.concatenate, zip(*found, strict=True))
        numbers = np.array([document.number for document in documents], dtype=int)
        targets = TargetTokens(
            tuple(documents),
            torch.from_numpy(owners),
            torch.from_numpy(numbers[owners]),
            torch.from_numpy(places),
            torch.from_numpy(labels[rows]),
            torch.from_numpy(weights.astype(np.float32)),
        )
        return cls(function, torch.from_numpy(rows), targets)

    def sum(self, losses: torch.Tensor) -> torch.Tensor:
        """Σ losses times weights; ``losses`` ``[1, T/CP]`` are cross-entropies of all tokens.

        Raises :class:`TrainingError` for a function that returns anything but a loss a target.
        """
        log_probs = -losses.float().view(-1)[self.rows]
        if not len(self.rows):
            return log_probs.sum()
        found = self.function(log_probs, self.targets)
        name = getattr(self.function, "__name__", "the loss function")
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        if shape != tuple(log_probs.shape):
            raise TrainingError(
                f"{name} returned {shape} for {len(log_probs)} targets; return a tensor with a "
                "loss for each, not their sum or mean"
            )
        if log_probs.requires_grad and not found.requires_grad:
            raise TrainingError(
                f"{name} returned losses without a gradient; compute them from the "
                "log-probabilities that it is given"
            )
        return (found.float() * self.targets.weights).sum()


@cache
def loss_source(file: str) -> bytes:
    """What a Python file holds when it is first asked for: what :func:`load_loss` runs.

    Raises :class:`ConfigError` for what is no file, or cannot be read.
    """
    try:
        with open_file(file) as stream:
            return stream.read()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--wlb-loss {file} is not a Python file ({one_line(error)}); give one with a function "
            "`loss`"
        ) from None


@cache
def load_loss(file: str) -> LossFunction:
    """The function ``loss`` of a Python file, ``--wlb-loss``.

    Raises :class:`ConfigError` for a file that cannot be imported, or has no such function.
    """
    path, source = Path(file), loss_source(file)
    spec = importlib.util.spec_from_file_location(f"wlb_loss_{path.stem}", path)
    if spec is None:
        raise ConfigError(
            f"--wlb-loss {file} is not a Python file; give one with a function `loss`"
        )
    module = importlib.util.module_from_spec(spec)
    try:
        exec(compile(source, file, "exec"), vars(module))
    except Exception as error:  # it is the user's code, and raises anything
        raise ConfigError(
            f"--wlb-loss {file} cannot be imported ({type(error).__name__}: {one_line(error)}); "
            "correct it"
        ) from error
    function = getattr(module, "loss", None)
    if not callable(function):
        raise ConfigError(
            f"--wlb-loss {file} has no function `loss`; define loss(log_probs, targets)"
        )
    return function  # type: ignore[no-any-return]
