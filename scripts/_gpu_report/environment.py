"""Which machine this is, and what of it the project can use."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from _gpu_report.drawing import Pictures, table
from _gpu_report.results import Results
from megatron_wlb.runtime.findings import examine

QUERY = (
    "name", "driver_version", "vbios_version", "memory.total", "power.limit", "clocks.max.sm",
    "clocks.max.memory", "clocks.sm", "temperature.gpu", "compute_mode", "mig.mode.current",
)  # fmt: skip
TIMEOUT_S = 30


def measure(results: Results) -> None:
    cuda = torch.version.cuda or "CPU build"
    results.put("torch", f"{torch.__version__} ({cuda})")
    results.put("gpu", gpu_facts())
    results.put("findings", [asdict(finding) for finding in examine()])


def gpu_facts() -> dict[str, str]:
    """What ``nvidia-smi`` says of the first GPU; nothing where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    done = subprocess.run(
        [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"],
        capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
    )  # fmt: skip
    rows = list(csv.reader(done.stdout.splitlines(), skipinitialspace=True))
    if done.returncode or not rows or len(rows[0]) != len(QUERY):
        return {}
    return dict(zip(QUERY, rows[0], strict=True))


def lines(figures: Mapping[str, Any], pictures: Pictures) -> list[str]:
    del pictures
    rows = [["torch", figures.get("torch", "")]]
    rows += [[name, value] for name, value in figures.get("gpu", {}).items()]
    findings = figures.get("findings", [])
    for finding in findings:
        if finding["area"] in ("machine", "kernel") or finding["level"] == "wrong":
            remedy = f" → {finding['remedy']}" if finding["remedy"] else ""
            rows.append([finding["subject"], f"{finding['level']}: {finding['found']}{remedy}"])
    return table(["", "found"], rows)
