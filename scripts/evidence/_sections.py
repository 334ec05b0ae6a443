"""What a page of simulated results is made of: tables, pictures, and the paper's numbers beside."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _papers.paper import HARDWARE, Effort
from matplotlib.figure import Figure

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.files import replacing
from megatron_wlb.study.plot import BLUE, GREY, INK, ORANGE


@dataclass(frozen=True)
class Row:
    """One figure: simulated, its range over the seeds, and the paper's if it prints one."""

    name: str
    value: float
    lowest: float
    highest: float
    paper: float | None = None
    extra: tuple[str, ...] = ()

    @property
    def deviation(self) -> float | None:
        return None if self.paper is None else self.value / self.paper - 1


@dataclass(frozen=True)
class Section:
    """A table or figure of the paper."""

    key: str
    title: str
    text: str
    what: str
    rows: Sequence[Row]
    claims: Sequence[tuple[str, bool]]
    """What the paper concludes, and whether it is so here."""
    causes: str
    columns: tuple[str, ...] = ()
    """Headings of the rows' ``extra``."""
    base: float = 1.0
    groups: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """For the picture, if not one bar a row."""


@dataclass(frozen=True)
class Paper:
    """A paper whose experiments are simulated."""

    title: str
    page: str
    """Name of the page, and how its pictures' names begin."""
    makers: Mapping[str, Callable[[Effort], Section]]
    """The sections by key."""
    notes: Callable[[Effort], Sequence[str]]
    """What all sections assume."""
    steps: int
    warm_up: int
    hardware: str = HARDWARE


def check_solver() -> None:
    """Raises :class:`CompatibilityError` without OR-tools, which solves some sections exactly."""
    if importlib.util.find_spec("ortools") is None:
        raise CompatibilityError(
            "there is no OR-tools, which solves this section exactly; install it (pip install "
            "ortools) or name other sections with --only"
        )


def row_of(
    name: str, values: Sequence[float], paper: float | None = None, extra: tuple[str, ...] = ()
) -> Row:
    return Row(name, statistics.fmean(values), min(values), max(values), paper, extra)


def rising(values: Sequence[float]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))


def plot(section: Section, path: Path) -> None:
    groups = section.groups or {"simulated": section.rows}
    names = [row.name for row in next(iter(groups.values()))]
    height = 1.5 + (0.12 + 0.26 * len(groups)) * len(names)
    figure = Figure(figsize=(10, height), dpi=150, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
    figure.suptitle(f"{section.title} (simulated)", fontsize=13, fontweight="bold", color=INK)
    axes = figure.subplots()
    colours = (BLUE, ORANGE, "#009E73", "#CC79A7", "#56B4E9")
    size = 0.8 / len(groups)
    highest = section.base
    for number, (name, rows) in enumerate(groups.items()):
        at = [place - 0.4 + size * (number + 0.5) for place in range(len(rows))]
        values = [row.value for row in rows]
        errors = [[r.value - r.lowest for r in rows], [r.highest - r.value for r in rows]]
        axes.barh(
            at, [value - section.base for value in values], size * 0.9, left=section.base,
            xerr=errors, color=colours[number], label=name,
            error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
        )  # fmt: skip
        for y, row in zip(at, rows, strict=True):
            beside = row.paper is not None and 0 < row.paper - row.highest < 0.05
            axes.annotate(
                f"{row.value:.2f}", (row.paper if beside else row.highest, y), xytext=(7, 0),
                textcoords="offset points", va="center", fontsize=9, color=INK,
            )  # fmt: skip
        highest = max(highest, *(row.highest for row in rows))
        printed = [(row.paper, y) for y, row in zip(at, rows, strict=True) if row.paper]
        if printed:
            axes.plot(
                [value for value, _ in printed], [y for _, y in printed], ls="", marker="D", ms=7,
                mfc="white", mec=INK, mew=1.5, zorder=4,
                label="" if number else "printed in the paper",
            )  # fmt: skip
            highest = max(highest, *(value for value, _ in printed))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(
        min(section.base, *(row.lowest for rows in groups.values() for row in rows)) - 0.002,
        highest + 0.09 * (highest - section.base),
    )
    axes.set_xlabel(f"{section.what}; lines: lowest to highest")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color=GREY, lw=0.8)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    with replacing(path) as draft:
        figure.savefig(draft, format="png", dpi="figure")


def lines_of(sections: Sequence[Section], page: str) -> list[str]:
    """The part of the page below its notes."""
    claims = [(s, claim, holds) for s in sections for claim, holds in s.claims]
    held = sum(holds for _, _, holds in claims)
    printed = [row.deviation for s in sections for row in s.rows if row.deviation is not None]
    within = sum(abs(deviation) <= 0.05 for deviation in printed)
    lines = [
        "## Are the paper's results reproduced?",
        "",
        f"{held} of {len(claims)} conclusions hold in simulation, and {within} of {len(printed)} "
        "printed numbers are met within 5 %.",
        "",
        "| conclusion of the paper | holds here |",
        "| --- | --- |",
    ]
    for section, claim, holds in claims:
        said = "yes" if holds else "**no**"
        lines.append(f"| {section.title.split(':')[0]}: {claim} | {said} |")
    for section in sections:
        lines += ["", f"## {section.title}", "", section.text, ""]
        lines.append(f"![{section.title}, simulated](images/{page}-{section.key}.png)")
        compared = any(row.paper is not None for row in section.rows)
        heads = ["", f"{section.what}, simulated", *["paper", "deviation"] * compared]
        heads += section.columns
        lines += ["", _line(heads), _line(["---"] * len(heads))]
        for row in section.rows:
            cells = [row.name, f"{row.value:.3f} ({row.lowest:.2f}-{row.highest:.2f})"]
            if row.paper is not None and row.deviation is not None:
                cells += [f"{row.paper:.4g}", f"{row.deviation:+.0%}"]
            elif compared:
                cells += ["", ""]
            lines.append(_line([*cells, *row.extra]))
        heading = "Why it deviates, as far as can be said." if section.claims else "What it says."
        lines += ["", f"**{heading}** {section.causes}"]
    return lines


def wrapped(line: str) -> str:
    """Prose in lines of 100; tables and pictures as they are."""
    if line.startswith(("|", "!", "#")):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(
        line, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def json_of(sections: Sequence[Section]) -> list[dict[str, Any]]:
    return [
        {
            "key": section.key,
            "title": section.title,
            "rows": [
                {"name": row.name, "simulated": row.value, "lowest": row.lowest,
                 "highest": row.highest, "paper": row.paper, "deviation": row.deviation,
                 "more": dict(zip(section.columns, row.extra, strict=True))}
                for row in section.rows
            ],
            "claims": [{"claim": claim, "holds": holds} for claim, holds in section.claims],
        }
        for section in sections
    ]  # fmt: skip
