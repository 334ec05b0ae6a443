"""One TP rank's share of a 7B and a 70B stage, beside what the cost and memory models say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import bench_cp

from _gpu_report.drawing import Pictures, table
from _gpu_report.results import Results
from megatron_wlb.settings.command_line import parse

STAGES = {"7B": ("7b", 8, 8), "70B": ("70b", 8, 5)}
"""Name -> model, TP size, layers: 7B in 4 stages, 70B in 16."""
TINY_MODEL = """
--num-layers 1 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 2 --vocab-size 128
--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
"""
TINY_STAGES = {"tiny": (parse(TINY_MODEL.split()), 1, 1)}
WINDOWS, REPEATS = (8192, 32768), 5
SEED = 1


def measure(results: Results) -> None:
    from _stage_share import measure_share

    scale = 128 if results.tiny else 1
    for name, (model, tp_size, num_layers) in (TINY_STAGES if results.tiny else STAGES).items():
        for window in WINDOWS[: 1 if results.tiny else None]:
            results.once(
                f"{name}, {window}",
                lambda m=model, t=tp_size, n=num_layers, w=window: [
                    asdict(row)
                    for row in measure_share(
                        m, tp_size=t, num_layers=n, lengths=bench_cp.windows(w, 2, scale, SEED),
                        device=results.device, repeats=1 if results.tiny else REPEATS, seed=SEED,
                    )
                ],
            )  # fmt: skip


def lines(figures: Mapping[str, Any], pictures: Pictures) -> list[str]:
    del pictures
    rows = []
    for key, found in figures.items():
        for row in found:
            pairs = [(row[f"{kind}_us"], 1e3, 2) for kind in ("measured", "modelled")]
            pairs += [(row[f"{kind}_bytes"], 2**20, 1) for kind in ("measured", "modelled")]
            cells = ["" if n is None else f"{n / unit:,.{digits}f}" for n, unit, digits in pairs]
            rows.append([key.partition(",")[0], row["what"], f"{row['tokens']:,}",
                         str(row["documents"]), *cells])  # fmt: skip
    columns = ["stage", "what", "tokens", "documents", "ms, measured", "ms, modelled",
               "MiB, measured", "MiB, modelled"]  # fmt: skip
    return table(columns, rows)
