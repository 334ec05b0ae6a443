"""One HTML file that shows a comparison: opened from disk, it needs nothing else and no network.

The page is ``report.html`` beside this module, which draws the JSON that is put into it.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wlb import __version__
from megatron_wlb.cost.memory import GIB
from megatron_wlb.data.length_statistics import LengthStatistics
from megatron_wlb.data.lengths import Lengths
from megatron_wlb.planning.run import Run
from megatron_wlb.simulator.baseline import COLUMNS, Baseline
from megatron_wlb.simulator.step_timeline import StepTimeline
from megatron_wlb.simulator.trial import Outcome

NUM_BINS = 16
MOST_BARS = 160
"""Micro-batches of a packing that are drawn, in whole steps."""

SHOWN = (
    "speedup", "net_speedup", "tokens_per_s", "step_ms", "mfu", "bubble_share", "peak_gib",
    "pp_imbalance", "cp_imbalance", "dp_imbalance", "delay_mean",
)  # fmt: skip
"""Columns of the table, after the name."""
_MEMORY_COLUMN = 1 + SHOWN.index("peak_gib")


@dataclass(frozen=True)
class Page:
    """What the page shows."""

    scenario: Run
    outcomes: Sequence[Outcome]
    base: Baseline
    """What all are compared with."""
    lengths: Lengths
    """Lengths of a sample of the documents."""
    title: str
    subtitle: str
    facts: Sequence[tuple[str, str]]
    command: str

    def html(self) -> str:
        template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
        # Nothing in a JSON string may end the script element or open a comment.
        data = json.dumps(self.data(), separators=(",", ":")).replace("<", "\\u003c")
        head, rest = template.split("$TITLE")
        middle, tail = rest.split("$DATA")
        return f"{head}{html.escape(self.title)}{middle}{data}{tail}"

    def data(self) -> dict[str, Any]:
        """What the page draws, JSON-able."""
        best = fastest(self.outcomes)
        drawn = examples(self.outcomes)
        return {
            "title": self.title,
            "subtitle": self.subtitle,
            "facts": [list(fact) for fact in self.facts],
            "cards": self._cards(best),
            "columns": [
                ["packing, sharding", "what was compared"],
                *([COLUMNS[one].header, COLUMNS[one].about] for one in SHOWN),
            ],
            "memory_column": _MEMORY_COLUMN,
            "table": [self._row(outcome, outcome is best) for outcome in self.outcomes],
            "lengths": _histogram(self.lengths, self.scenario.window),
            "levels": [
                {
                    "title": name(outcome),
                    "values": [
                        [level.upper(), round(getattr(outcome, f"{level}_imbalance"), 4), colour]
                        for level, colour in (("pp", "blue"), ("cp", "orange"), ("dp", "green"))
                    ],
                }
                for outcome in self.outcomes
            ],
            "micro": [
                {"title": name(outcome), "steps": _first_steps(outcome.example.micro_batch_us)}
                for outcome in drawn
            ],
            "micro_text": (
                "Forward and backward of all stages, attention as its slowest context-parallel "
                "rank has it; the line is the mean of the step."
            ),
            "timelines": [_timeline(name(outcome), outcome.example.timeline) for outcome in drawn],
            "memory": [_memory(name(outcome), outcome.example.timeline) for outcome in drawn],
            "limit_gib": self.scenario.limit_gib,
            "texts": self._texts(),
        }

    def _cards(self, best: Outcome | None) -> list[list[str]]:
        original, limit = self.base.original, f"{self.scenario.limit_gib:.1f} allowed"
        if best is None:
            least = min(self.outcomes, key=lambda outcome: outcome.peak_bytes)
            return [[f"{least.peak_bytes / GIB:.1f} GiB", f"the least peak, of {limit}: none fits"]]
        net = f", net of {self.base.overlap}" if self.base.overlap else ""
        return [
            [
                f"{best.speedup(original):.2f}×",
                f"the work a second of {self.base.name}: {name(best)}",
            ],
            [f"{self.base.net_speedup(best):.2f}×", f"the same{net}, on {self.base.hardware}"],
            [f"{best.mfu:.1%}", f"MFU, from {original.mfu:.1%}"],
            [f"{best.bubble_share:.1%}", f"bubble share, from {original.bubble_share:.1%}"],
            [f"{best.peak_bytes / GIB:.1f} GiB", f"peak, of {limit}"],
        ]

    def _row(self, outcome: Outcome, is_best: bool) -> dict[str, Any]:
        cells = [COLUMNS[one].cell(outcome, self.base) for one in SHOWN]
        if len(outcome.mfu_by_seed) > 1:
            cells[0] += " ({:.2f}-{:.2f})".format(*outcome.speedup_by_seed(self.base.original))
        return {
            "cells": [name(outcome), *cells],
            "best": is_best,
            "over": bool(outcome.out_of_memory),
        }

    def _texts(self) -> dict[str, str]:
        first = self.outcomes[0]
        steps, seeds = first.metrics.num_steps, len(first.mfu_by_seed)
        over = [name(outcome) for outcome in self.outcomes if outcome.out_of_memory]
        fits = f"Too much for the limit: {'; '.join(over)}. " if over else ""
        stands_out = "The fastest that fits memory stands out."
        if fastest(self.outcomes) is None:
            stands_out = "None fits memory: no speed-up here is to be had."
        times = (
            "a cost that was measured and put in"
            if self.scenario.measured is not None
            else "the model's shape and the rates in the hardware file, some of them assumed"
        )
        return {
            "compared": (
                f"{steps:,} steps of each over the same documents"
                f"{f' of {seeds} seeds' if seeds > 1 else ''}. {stands_out} {self.base.said}"
            ),
            "memory-text": (
                f"The first replica's ranks in the step drawn above; the dashed line is the limit "
                f"of {self.scenario.limit_gib:.1f} GiB. {fits}"
            ),
            "method": (
                f"Micro-batches are planned as training would plan them, their times come from "
                f"{times}, and Megatron's schedule is replayed with them: transfers between "
                f"stages, gradient reduction and optimizer update included. "
                f"megatron-wlb {__version__} made this page with:"
            ),
            "command": self.command,
        }


def name(outcome: Outcome) -> str:
    return f"{outcome.title}, {outcome.sharding}"


def fastest(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The outcome with the most work a second, among those that fit memory."""
    fit = (outcome for outcome in outcomes if not outcome.out_of_memory)
    return max(fit, key=lambda outcome: outcome.mfu, default=None)


def examples(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes to draw: the first, and each other packing's with the sharding of the fastest one.

    If none fits memory, the fastest is that of all.
    """
    first = outcomes[0]
    best = fastest(outcomes) or max(outcomes, key=lambda outcome: outcome.mfu)
    return [
        outcome
        for outcome in outcomes
        if outcome is first
        or (
            outcome.sharding == best.sharding
            and (outcome.setting != first.setting or outcome is best)
        )
    ]


def _histogram(lengths: Lengths, window: int) -> dict[str, Any]:
    """Makes bins of the documents that have tokens: others are not packed."""
    statistics = LengthStatistics.of(lengths, window)  # as `wlb corpus stats`
    low = int(np.log2(statistics.lengths[0]))
    high = max(low + 1, int(np.ceil(np.log2(max(statistics.longest, window)))))
    edges = 2.0 ** np.arange(max(low, high - NUM_BINS), high + 1)
    # A bar is of those above its left edge and up to its right one; the first has all shorter.
    bars = [statistics.part(*ends) for ends in pairwise([0, *(edges[1:-1] + 1), np.inf])]
    long = statistics.part(window / 2)
    return {
        "edges": edges.tolist(),
        "series": [
            {"name": name, "shares": [round(getattr(b, share), 5) for b in bars], "colour": colour}
            for name, share, colour in (
                ("documents", "documents_share", "blue"),
                ("tokens", "tokens_share", "orange"),
                ("attention work", "attention_share", "red"),
            )
        ],
        "window": window,
        "text": (
            f"{statistics.documents:,} documents with {statistics.tokens:,} tokens, a sample of "
            "what was packed. Those of half a window and more are "
            f"{long.documents_share:.2%} of the documents, {long.tokens_share:.0%} of the tokens "
            f"and {long.attention_share:.0%} of the attention work, counted in pieces of at most "
            f"{window:,} tokens."
        ),
    }


def _first_steps(steps: Sequence[Sequence[float]]) -> list[list[float]]:
    fitting = max(1, MOST_BARS // max(1, len(steps[0])))
    return [[round(us, 1) for us in step[:MOST_BARS]] for step in steps[:fitting]]


def _timeline(title: str, line: StepTimeline) -> dict[str, Any]:
    """The timeline of the data-parallel rank that is done last. Slices name document and tokens."""
    last = max(range(line.dp_size), key=lambda rank: line.replicas[rank].step_us)
    replica = line.replicas[last]
    ranks = []
    for intervals, parts in zip(replica.intervals, line.collectives, strict=True):
        actions: list[list[Any]] = [
            [i.action.kind, i.action.chunk, i.action.micro_batch, i.start_us, i.stop_us]
            + ([i.slice.document, f"{i.slice.start}-{i.slice.stop}"] if i.slice else [])
            for i in intervals
        ]
        # A reduction beside backward takes no time of its own: only what comes after is drawn.
        stop_us = intervals[-1].stop_us
        actions += [
            [part.what, 0, 0, max(part.start_us, stop_us), part.stop_us]
            for part in parts
            if part.stop_us > stop_us
        ]
        ranks.append([[*a[:3], round(a[3], 1), round(a[4], 1), *a[5:]] for a in actions])
    if line.dp_size > 1:
        title += f" (replica {last})"
    return {
        "title": title,
        "step_us": line.step_us,
        "bubble": line.bubble_share,
        "chunks": line.vpp_size,
        "ranks": ranks,
    }


def _memory(title: str, line: StepTimeline) -> dict[str, Any]:
    ranks = []
    for rank in line.memory[0].ranks:
        peak = rank.peak_bytes / GIB
        parts = [
            ("weights and gradients", (rank.state.weights + rank.state.gradients) / GIB, "blue"),
            ("optimizer", rank.state.optimizer / GIB, "green"),
        ]
        rest = peak - sum(gib for _, gib, _ in parts)
        ranks.append({"peak": peak, "parts": [*parts, (f"at {rank.peak_at}", rest, "orange")]})
    return {"title": title, "ranks": ranks}
