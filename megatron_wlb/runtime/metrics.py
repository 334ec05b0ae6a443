"""What a step was, by name, and the file of ``--wlb-metrics``: a JSON line a step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from megatron_wlb.plan import StepPlan
from megatron_wlb.runtime.rank_main import writing


def step_values(plan: StepPlan, plan_wait_s: float, step_s: float) -> dict[str, float]:
    """What ran and what it took, as every log names it: the step, and in it the wait for a plan."""
    return {
        "tokens": plan.num_tokens,
        "targets": plan.num_targets,
        "padding": plan.padding_tokens,
        "imbalance": plan.imbalance,
        "delay_steps": plan.delay_steps,
        "waiting_documents": plan.num_waiting,
        "waiting_tokens": plan.waiting_tokens,
        "plan_wait_ms": plan_wait_s * 1e3,
        "step_ms": step_s * 1e3,
    }


class MetricsFile:
    """Appends to the file; of each line nothing is lost if the process dies after it. Without a
    path nothing is written.

    Raises :class:`megatron_wlb.errors.CheckpointError` here and in :meth:`write` where it cannot be
    written.
    """

    def __init__(self, path: str | None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            with writing("--wlb-metrics", path):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._file = Path(path).open("a")  # noqa: SIM115 - open as long as the run

    def write(self, values: Mapping[str, Any]) -> None:
        """What is not a finite number is null, for JSON has no other name for it."""
        if self._file is None:
            return
        known = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        with writing("--wlb-metrics", self._file.name):
            self._file.write(json.dumps(known, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
