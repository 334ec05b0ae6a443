"""The file of ``--wlb-metrics``: a JSON line a step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_wlb.runtime.rank_main import writing


class MetricsFile:
    """Appends to the file; of each line nothing is lost if the process dies after it.

    Raises :class:`megatron_wlb.errors.CheckpointError` here and in :meth:`write` where it cannot be
    written.
    """

    def __init__(self, path: str) -> None:
        with writing("--wlb-metrics", path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = Path(path).open("a")  # noqa: SIM115 - open as long as the run

    def write(self, values: Mapping[str, Any]) -> None:
        """What is not a finite number is null, for JSON has no other name for it."""
        known = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        with writing("--wlb-metrics", self._file.name):
            self._file.write(json.dumps(known, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()
