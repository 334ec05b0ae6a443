"""The machine's hardware file by ``wlb profile``: a table a start, so that none is lost."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from _gpu_report.drawing import Pictures, table
from _gpu_report.machine import Heads, hardware_path, heads
from _gpu_report.results import Results
from megatron_wlb.cli.main import main as wlb
from megatron_wlb.cost.attention_latency import AttentionProfile
from megatron_wlb.cost.hardware import FIGURES
from megatron_wlb.errors import ConfigError
from megatron_wlb.study.plot import plot_attention

LONGEST, TINY_LONGEST = 160 * 1024, 512
"""The longest window of Figure 14, in tokens."""
REPEATS, TINY_REPEATS = 5, 1


def measure(results: Results) -> None:
    path = hardware_path(results.out)
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        results.figures.clear()
    for shape, of in heads(results).items():
        results.once(shape, lambda of=of: profiled(results, of))


def profiled(results: Results, of: Heads) -> dict[str, Any]:
    """Adds a table of such heads to the hardware file; what the file then says, but other tables.

    Raises :class:`ConfigError` where ``wlb profile`` ends with an error, which it has told.
    """
    path = hardware_path(results.out)
    longest, repeats = (TINY_LONGEST, TINY_REPEATS) if results.tiny else (LONGEST, REPEATS)
    flags = ["--out", str(path), "--device", results.device, "--dtype", "bfloat16", "--no-plot"]
    flags += ["--heads", f"{of[0]}/{of[1]}x{of[2]}", "--longest", str(longest)]
    flags += ["--repeats", str(repeats), "--force", "--json"]
    if path.exists():
        flags += ["--base", str(path)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = wlb(["profile", *flags])
    if code:
        raise ConfigError(f"wlb profile {' '.join(flags)} ended with {code}; see the log")
    content = json.loads(said.getvalue())
    return {name: content[name] for name in FIGURES if name in content} | {
        "attention": content["attention"][-1]
    }


def lines(figures: Mapping[str, Any], pictures: Pictures) -> list[str]:
    rows, shown = [], []
    for shape, found in figures.items():
        profile = AttentionProfile.from_dict(found["attention"])
        longest = profile.lengths[-1]
        rates = [
            f"{profile.tflops(queries, longest, backward=backward):.1f}"
            for queries in (16, 128, 1024, longest // 2)
            if queries < longest
            for backward in (False, True)
        ]
        pairs = [" / ".join(rates[n : n + 2]) for n in range(0, len(rates), 2)]
        pairs += [""] * (4 - len(pairs))
        rows.append([shape, profile.kernel, f"{longest:,}", *pairs, f"{profile.error:.1%}"])
        profile = replace(profile, machine=pictures.said_of(profile.machine))
        shown += pictures.add(
            f"attention-{shape.partition(',')[0].lower()}", f"Attention, {shape} (measured)",
            lambda path, _, one=profile: plot_attention(one, path),
        )  # fmt: skip
    columns = ["heads", "kernel", "keys", "16 queries", "128", "1024", "half of the keys",
               "off the grid"]  # fmt: skip
    last = list(figures.values())[-1:]
    measured = [
        [name, f"{one['value']:g}", one["source"]]
        for found in last
        for name, one in found.items()
        if name != "attention" and str(one["source"]).startswith("measured")
    ]
    return [
        "TFLOP/s of exact causal pairs, forward / backward, of so many queries that see all keys. "
        "The last column is the median error of what is interpolated.",
        "",
        *table(columns, rows),
        "",
        *table(["rate of the machine", "value", "what was measured"], measured),
        *shown,
    ]
