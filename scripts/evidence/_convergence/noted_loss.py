"""Cross-entropy that notes what documents cost in evaluations: a file for ``--wlb-loss``.

Each micro-batch of an evaluation is a line of the file that :data:`NOTES` names: documents'
numbers, the sum of each one's losses in nats, and the number of its targets.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_wlb.runtime.stepping.losses import TargetTokens

NOTES = "CONVERGENCE_NOTES"


def loss(log_probs: torch.Tensor, targets: TargetTokens) -> torch.Tensor:
    if not log_probs.requires_grad:
        numbers, own = torch.unique(targets.samples, return_inverse=True)
        sums = torch.zeros(len(numbers), dtype=torch.float64).index_add_(
            0, own, -log_probs.double()
        )
        with Path(os.environ[NOTES]).open("a", encoding="utf-8") as file:
            columns = [one.tolist() for one in (numbers, sums, own.bincount())]
            file.write(json.dumps(columns) + "\n")
    return -log_probs
