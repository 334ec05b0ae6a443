"""What the runs say: differences of held-out loss to ``original``, seed by seed, with intervals."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _common import put
from matplotlib.figure import Figure
from rich.table import Table

from megatron_wlb.errors import ConfigError
from megatron_wlb.files import replacing, write_text
from megatron_wlb.reading import MAX_RECORD_BYTES, read_mapping, record
from megatron_wlb.study.plot import BLUE, INK, ORANGE

BASE = "original"
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantile of Student's t with 1, 2, … degrees of freedom."""
NORMAL = 1.96
LENGTHS = ("short", "middling", "long")
BUCKETS = (256, 1024)
"""Tokens up to which held-out documents are short, and then middling."""


@dataclass(frozen=True)
class Run:
    """One packing with one seed: what it was at each look at held-out documents."""

    tokens: list[int]
    """Trained so far."""
    seconds: list[float]
    """Of steps so far."""
    steps: list[int]
    loss: list[float]
    """Nats a token, over all held-out documents."""
    by_length: list[list[float]]
    """Over short, middling and long ones."""

    @classmethod
    def of(cls, metrics: Path, notes: Path, lengths: npt.NDArray[np.int64], interval: int) -> Run:
        """Of a launched run: its ``--wlb-metrics``, and what :mod:`_convergence.noted_loss` noted
        of held-out documents of such ``lengths``, after every so many steps and at the end.
        """
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        tokens, ms = (np.cumsum([line[name] for line in lines]) for name in ("tokens", "step_ms"))
        ends = [*range(interval, len(lines) + 1, interval), len(lines)]
        noted = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
        each = len(noted) // len(ends)
        run = cls([], [], [], [], [])
        for look, end in enumerate(ends):
            columns = zip(*noted[look * each : (look + 1) * each], strict=True)
            numbers, sums, targets = map(np.concatenate, columns)
            kinds = np.searchsorted(BUCKETS, lengths[numbers])
            by_kind = [np.bincount(kinds, one, len(LENGTHS)) for one in (sums, targets)]
            run.tokens.append(int(tokens[end - 1]))
            run.seconds.append(float(ms[end - 1] / 1e3))
            run.steps.append(end)
            run.loss.append(float(sums.sum() / targets.sum()))
            run.by_length.append((by_kind[0] / by_kind[1]).tolist())
            if end == len(lines):  # Megatron evaluates once more behind its loop.
                break
        return run

    @classmethod
    def read(cls, path: Path) -> Run:
        """What :meth:`write` wrote."""
        return record(f"{path}: ", cls, read_mapping(path, max_bytes=MAX_RECORD_BYTES))

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(asdict(self)) + "\n")

    def until(self, seconds: float) -> Run:
        """The run so far, after so many seconds: its last look is between two of its own.

        Raises :class:`ConfigError` for a run that took less.
        """
        if self.seconds[-1] < seconds:
            raise ConfigError(
                f"a run took {self.seconds[-1]:.0f} s for its steps, and runs are compared after "
                f"{seconds:g} s; give more --tokens"
            )
        at = [*(one for one in self.seconds if one < seconds), seconds]

        def then(column: Sequence[float]) -> list[float]:
            return [float(value) for value in np.interp(at, self.seconds, column)]

        by_length = zip(*map(then, zip(*self.by_length, strict=True)), strict=True)
        tokens, steps = ([*map(round, then(one))] for one in (self.tokens, self.steps))
        return Run(tokens, at, steps, then(self.loss), [[*one] for one in by_length])

    @property
    def late(self) -> float:
        """The mean of the later half of the looks."""
        return statistics.fmean(self.loss[len(self.loss) // 2 :])


def kept(path: Path) -> dict[tuple[str, int], Run]:
    """The runs that :meth:`Study.keep` wrote beside a page; none where there is no file yet.

    Raises :class:`ConfigError` for any other file.
    """
    if not path.exists():
        return {}
    runs = {}
    for name, values in read_mapping(path, max_bytes=MAX_RECORD_BYTES).items():
        packing, _, seed = name.rpartition(" ")
        if not (packing and seed.isdecimal()):
            raise ConfigError(f"{path}: {name} is no packing and seed; give another --page")
        runs[packing, int(seed)] = record(f"{path}: {name}: ", Run, values)
    return runs


@dataclass(frozen=True)
class Difference:
    """A mean over seeds with its 95 % interval by Student's t; infinite for one seed."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Difference:
        if len(values) < 2:
            return cls(values[0], math.inf)
        spread = statistics.stdev(values) / math.sqrt(len(values))
        degrees = len(values) - 1
        quantile = STUDENT[degrees - 1] if degrees <= len(STUDENT) else NORMAL
        return cls(statistics.fmean(values), quantile * spread)

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.half:.4f}"

    @property
    def verdict(self) -> str:
        if abs(self.mean) <= self.half:
            return "no difference seen"
        return "learns more" if self.mean < 0 else "learns less"


COLUMNS: dict[str, Callable[[Run], float]] = {
    "at the end": lambda run: run.loss[-1],
    "later half": lambda run: run.late,
    **{
        f"{name} documents": lambda run, at=at: run.by_length[-1][at]  # type: ignore[misc]
        for at, name in enumerate(LENGTHS)
    },
}
"""Figures of a run, in nats a token."""


@dataclass(frozen=True)
class Study:
    """All runs, by packing and seed; not every packing needs every seed."""

    runs: Mapping[tuple[str, int], Run]

    def __post_init__(self) -> None:
        if not self.seeds(BASE):
            raise ConfigError(f"no run is of {BASE}, with which all are compared; add it")

    @property
    def packings(self) -> list[str]:
        """Those that share a seed with :data:`BASE`."""
        return [name for name in dict.fromkeys(name for name, _ in self.runs) if self.seeds(name)]

    def seeds(self, packing: str) -> list[int]:
        """Those that both it and :data:`BASE` ran with."""
        own = (seed for name, seed in self.runs if name == packing)
        return sorted(seed for seed in own if (BASE, seed) in self.runs)

    def values(self, packing: str, of: Callable[[Run], float]) -> list[float]:
        return [of(self.runs[packing, seed]) for seed in self.seeds(packing)]

    def difference(self, packing: str, of: Callable[[Run], float]) -> Difference:
        pairs = ((self.runs[packing, s], self.runs[BASE, s]) for s in self.seeds(packing))
        return Difference.of([of(own) - of(base) for own, base in pairs])

    def spread(self, of: Callable[[Run], float]) -> float:
        """Standard deviation of ``original`` from seed to seed."""
        values = self.values(BASE, of)
        return statistics.stdev(values) if len(values) > 1 else math.inf

    def summary(self) -> dict[str, Any]:
        result: dict[str, Any] = {"packings": {}}
        for packing in self.packings:
            figures: dict[str, Any] = {"seeds": self.seeds(packing)}
            for name, of in COLUMNS.items():
                own = self.difference(packing, of)
                mean = statistics.fmean(self.values(packing, of))
                half = own.half if math.isfinite(own.half) else None
                figures[name] = {"loss": mean, "difference": own.mean, "interval": half}
            last = [self.runs[packing, seed] for seed in self.seeds(packing)]
            figures["tokens"] = statistics.fmean(run.tokens[-1] for run in last)
            figures["steps"] = statistics.fmean(run.steps[-1] for run in last)
            figures["seconds"] = statistics.fmean(run.seconds[-1] for run in last)
            result["packings"][packing] = figures
        return result

    def rows(self) -> list[list[str]]:
        rows = []
        for packing in self.packings:
            loss = statistics.fmean(self.values(packing, COLUMNS["at the end"]))
            apart = [
                "" if packing == BASE else str(self.difference(packing, of))
                for of in COLUMNS.values()
            ]
            judged = self.difference(packing, COLUMNS["at the end"]).verdict
            said = "" if packing == BASE else judged
            rows.append([packing, str(len(self.seeds(packing))), f"{loss:.4f}", *apart, said])
        return rows

    @property
    def headings(self) -> list[str]:
        return ["packing", "seeds", "loss at the end", *(f"Δ {name}" for name in COLUMNS), "says"]

    def table(self) -> Table:
        table = Table(title=f"held-out loss, nats a token; Δ to {BASE}")
        for heading in self.headings:
            table.add_column(heading)
        for row in self.rows():
            table.add_row(*row)
        return table

    def keep(self, path: Path) -> None:
        """Writes all runs into a file, a line each."""
        lines = (
            f"{json.dumps(f'{packing} {seed}')}: {json.dumps(asdict(run))}"
            for (packing, seed), run in self.runs.items()
        )
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")

    def draw(self, path: Path) -> None:
        """Differences with their intervals, and the curves of the first three packings."""
        figure = Figure(figsize=(11, 4.2), dpi=150, facecolor="white")
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
        curves, apart = figure.subplots(1, 2)
        styles = {BASE: (INK, 2.5), "hold": (BLUE, 1.5), "slim": (ORANGE, 1.5)}
        for packing, (colour, width) in styles.items():
            if packing not in self.packings:
                continue
            for number, seed in enumerate(self.seeds(packing)):
                run = self.runs[packing, seed]
                label = None if number else packing
                curves.plot(
                    np.array(run.tokens) / 1e6, run.loss, color=colour, lw=width,
                    alpha=0.6, label=label,
                )  # fmt: skip
        curves.set_xlabel("tokens trained, millions")
        curves.set_ylabel("held-out loss, nats a token")
        curves.set_title("a line for each seed", color=INK)
        curves.legend(frameon=False)
        others = [packing for packing in self.packings if packing != BASE]
        for at, name in enumerate(("short documents", "middling documents", "long documents")):
            found = [self.difference(packing, COLUMNS[name]) for packing in others]
            where = np.arange(len(others)) + 0.2 * (at - 1)
            halves = [one.half if math.isfinite(one.half) else 0.0 for one in found]
            colour = (INK, BLUE, ORANGE)[at]
            apart.errorbar(
                [one.mean for one in found], where, xerr=halves, fmt="o", color=colour, label=name
            )
        apart.axvline(0, color=INK, lw=0.8)
        apart.set_yticks(range(len(others)), others)
        apart.invert_yaxis()
        apart.set_xlabel(f"difference to {BASE} at the end, 95 % interval (left is better)")
        apart.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
        with replacing(path) as draft:
            figure.savefig(draft, format="png")

    def write(self, page: Path, picture: Path, kind: str) -> None:
        """Puts table and picture between the page's marks for this kind of study."""
        lines = ["| " + " | ".join(self.headings) + " |", "|" + " --- |" * len(self.headings)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows()]
        spread = self.spread(COLUMNS["at the end"])
        text = "\n".join(
            [
                f"![Held-out loss and differences]({picture.relative_to(page.parent)})",
                "",
                *lines,
                "",
                f"From seed to seed `{BASE}` itself varies by {spread:.4f} (standard deviation at "
                "the end).",
            ]
        )
        put(page, kind, text)
