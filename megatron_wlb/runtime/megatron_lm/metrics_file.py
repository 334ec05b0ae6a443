"""What a step was, by name, and the file of ``--wlb-metrics``: a JSON line a step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from megatron_wlb.cost.slices import HOST
from megatron_wlb.errors import CheckpointError
from megatron_wlb.plan import StepPlan
from megatron_wlb.runtime.rank_main import writing
from megatron_wlb.runtime.saving import lock


def step_values(plan: StepPlan, plan_wait_s: float, step_s: float) -> dict[str, float]:
    """What ran and what it took, as every log names it: the step, and in it the wait for a plan."""
    hosted = sum(m.length for m in plan if m.recomputed == HOST)
    of_slices = {
        "merged_documents": plan.num_merged,
        "recomputed_tokens": sum(m.length for m in plan if m.recomputed) - hosted,
        "hosted_tokens": hosted,
    }
    return {
        "tokens": plan.num_tokens,
        "targets": plan.num_targets,
        "padding": plan.padding_tokens,
        "imbalance": plan.imbalance,
        "delay_steps": plan.delay_steps,
        "waiting_documents": plan.num_waiting,
        "waiting_tokens": plan.waiting_tokens,
        **(of_slices if plan.chains else {}),
        "plan_wait_ms": plan_wait_s * 1e3,
        "step_ms": step_s * 1e3,
    }


def whole_lines(path: Path) -> int:
    """The number of bytes up to the end of the file's last line that is whole."""
    with path.open("rb") as stream:
        stop = stream.seek(0, os.SEEK_END)
        while stop:
            start = max(stop - 4096, 0)
            stream.seek(start)
            if newline := stream.read(stop - start).rfind(b"\n") + 1:
                return start + newline
            stop = start
    return 0


class MetricsFile:
    """Appends lines to a file. A line that was written is kept if the process dies. Without a path
    nothing is written.

    One run at a time has the file, where its file system has ``flock``. Half a line that a full
    disk left is cut off. Raises :class:`megatron_wlb.errors.CheckpointError` here and in
    :meth:`write` where it cannot be written, here also where another run has it.
    """

    def __init__(self, path: str | None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            with writing("--wlb-metrics", path):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._file = Path(path).open("a")  # noqa: SIM115 - open as long as the run
                if not lock.await_flock(self._file.fileno()):
                    self._file.close()
                    raise CheckpointError(
                        f"--wlb-metrics {path} is in use by another run; end that run or choose "
                        "another file"
                    )
                if Path(path).is_file():
                    os.truncate(path, whole_lines(Path(path)))

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
