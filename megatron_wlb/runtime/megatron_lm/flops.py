"""Floating-point operations of packed documents, by Megatron's own formula.

Megatron's ``num_floating_point_operations(args, batch_size)`` is that of ``batch_size`` sequences
of ``seq_length`` tokens, each attending to all before it: ``a·s + b·s²`` a sequence. Packed
documents attend only to themselves: ``a·Σd + b·Σd²``. Two evaluations of Megatron's formula give
``a`` and ``b``, whatever the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_wlb.plan import StepPlan

Formula = Callable[[argparse.Namespace, int], float]


@dataclass(frozen=True)
class DocumentFlops:
    """Operations of forward and backward of documents in the whole model."""

    per_token: float
    per_token_squared: float

    @classmethod
    def of(cls, formula: Formula, args: argparse.Namespace) -> DocumentFlops:
        """Derives them from Megatron's formula at one and at two windows."""
        window = args.seq_length
        one, two = (
            float(formula(argparse.Namespace(**{**vars(args), "seq_length": length}), 1))
            for length in (window, 2 * window)
        )
        squared = (two - 2 * one) / (2 * window**2)
        return cls((one - squared * window**2) / window, squared)

    def of_documents(self, lengths: Iterable[int]) -> float:
        """Counts the operations of documents: ``a·Σd + b·Σd²``."""
        return sum(self.per_token * d + self.per_token_squared * d * d for d in lengths)

    def of_plan(self, plan: StepPlan) -> float:
        """Counts the operations of a step; its padding is no work that counts.

        A slice has those of its document up to its end and not to its beginning.
        """
        spans = [span for m in plan for span in m.spans]
        before = self.of_documents(span.start for span in spans)
        return self.of_documents(span.stop for span in spans) - before
