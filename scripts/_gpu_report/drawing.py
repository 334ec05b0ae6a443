"""Pictures and tables of the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TINY = "tiny form on a CPU: says nothing of a GPU"


@dataclass(frozen=True)
class Pictures:
    """Where a page's pictures go, and what their titles must say."""

    folder: Path
    tiny: bool

    def add(self, name: str, title: str, draw: Callable[[Path, str], None]) -> list[str]:
        """Draws one by its path and title; the page's lines for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        title = f"Tiny, on a CPU: {title}" if self.tiny else title
        draw(self.folder / f"gpu-{name}.png", title)
        return ["", f"![{title}](images/gpu-{name}.png)"]

    def said_of(self, machine: str) -> str:
        """The machine, as a picture is to name it."""
        return f"{machine}, {TINY}" if self.tiny else machine


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; nothing where there are no rows."""
    if not rows:
        return []
    cells = (heads, ["---"] * len(heads), *rows)
    return ["| " + " | ".join(word.replace("|", "/") for word in row) + " |" for row in cells]


def curves(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Mapping[int, float]]],
    x: str,
    y: str,
    *,
    of_tokens: bool = False,
) -> None:
    """Panels of named lines; ``of_tokens`` draws numbers of tokens on a logarithmic axis."""
    from matplotlib import colormaps  # takes a second, which only the page needs

    from megatron_wlb.study import plot

    figure = plot.new_figure(title, height=1.2 + 3.2 * len(panels))
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    for one, (panel, lines) in zip(axes, panels.items(), strict=True):
        for name, points in lines.items():
            share = names.index(name) / max(1, len(names) - 1)
            style = {"color": colormaps["viridis_r"](0.08 + 0.92 * share), "marker": "o", "ms": 3.5}
            one.plot(list(points), list(points.values()), label=name, **style)
        one.set_ylabel(y)
        one.set_ylim(bottom=0)
        one.grid(axis="y", color=plot.GREY, lw=0.8)
        plot.set_title(one, panel)
        if of_tokens:
            one.set_xscale("log", base=2)
            one.xaxis.set_major_formatter(lambda value, _: plot.shown_tokens(value))
        one.legend(frameon=False, fontsize=8.5)
    axes[-1].set_xlabel(x)
    plot.save(figure, path)
