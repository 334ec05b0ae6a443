"""Whole steps at the layouts of WLB-LLM's Table 1, simulated with the kernels measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from _papers import paper
from _papers.paper import Effort, K, Pair
from _sections import Row, Section, plot

from _gpu_report.drawing import Pictures, table
from _gpu_report.machine import TINY, hardware_path
from _gpu_report.results import Results
from megatron_wlb.errors import ConfigError
from megatron_wlb.study.plot import shown_tokens

PACKINGS: dict[str, Pair] = {
    "original, adaptive": ("original", "adaptive"),
    "wlb, adaptive": ("wlb:2", "adaptive"),
    "hold, adaptive": ("hold", "adaptive"),
    "hold+shape, adaptive": ("hold+shape", "adaptive"),
}
SLIM: Pair = ("slim", "adaptive")
"""It has no virtual stages, so its layout has one chunk a rank."""
TECHNIQUES: dict[str, tuple[Pair, float | None]] = {
    "CP per-document": (("original", "per-document"), paper.FIGURE_13["CP per-document"]),
    "CP adaptive": (("original", "adaptive"), paper.FIGURE_13["CP adaptive"]),
    "PP var-len and delay": (("wlb:2", "per-sequence"), paper.FIGURE_13["PP var-len and delay"]),
    "all": (("wlb:2", "adaptive"), paper.FIGURE_13["all"]),
    "hold, hybrid (ours)": (("hold", "hybrid"), None),
    "hold+shape, hybrid (ours)": (("hold+shape", "hybrid"), None),
}
OF_7B = "7b", 128 * K


def measure(results: Results) -> None:
    path = hardware_path(results.out)
    if not path.exists():
        raise ConfigError(f"{path} is not there; run the part profile first")
    effort = Effort(30, (1, 2), 30, hardware=str(path))
    layouts = paper.TABLE_1
    scale = 1
    if results.tiny:
        effort, scale = Effort(1, (1,), 1, hardware=str(path)), TINY
        layouts = {OF_7B: layouts[OF_7B]}
    for (model, window), layout in layouts.items():
        results.once(
            f"figure-12, {model.upper()}-{shown_tokens(window // scale)}",
            lambda m=model, w=window, at=layout: of_layout(m, w // scale, at, effort),
        )
    results.once("figure-13", lambda: of_techniques(128 * K // scale, effort))
    for window in paper.WINDOWS[: 1 if results.tiny else None]:
        results.once(
            f"figure-14, {shown_tokens(window // scale)}",
            lambda w=window: of_window(w, w // scale, effort),
        )


def row(name: str, plain: Any, outcome: Any, printed: float | None = None) -> dict[str, Any]:
    return asdict(
        Row(name, outcome.speedup(plain), *outcome.speedup_by_seed(plain), printed,
            (f"{outcome.mfu:.0%}", f"{outcome.peak_bytes / 2**30:.0f}"))
    )  # fmt: skip


def of_layout(
    model: str, window: int, layout: tuple[int, int, int, int], effort: Effort
) -> list[dict[str, Any]]:
    """A row a packing: Figure 12, and this project's packings."""
    base = paper.scenario(model, window, layout, hardware=effort.hardware)
    found = paper.speedups(base, list(PACKINGS.values()), effort)
    plain = found[paper.PLAIN]
    rows = [row(name, plain, found[pair]) for name, pair in PACKINGS.items()]
    one_chunk = paper.scenario(model, window, layout, 1, effort.hardware)
    slim = paper.speedups(one_chunk, [SLIM], effort)[SLIM]
    return [*rows, row("slim, adaptive, one chunk a rank", plain, slim)]


def of_techniques(window: int, effort: Effort) -> list[dict[str, Any]]:
    """Figure 13: each technique by itself, at 7B-128K."""
    base = paper.scenario("7b", window, paper.TABLE_1[OF_7B], hardware=effort.hardware)
    found = paper.speedups(base, [pair for pair, _ in TECHNIQUES.values()], effort)
    plain = found[paper.PLAIN]
    # What the paper prints is of its own window.
    printed = {name: said if window == 128 * K else None for name, (_, said) in TECHNIQUES.items()}
    return [row(name, plain, found[pair], printed[name]) for name, (pair, _) in TECHNIQUES.items()]


def of_window(window: int, scaled: int, effort: Effort) -> list[dict[str, Any]]:
    """Figure 14: 7B by window, in the layout of 128K."""
    base = paper.scenario("7b", scaled, paper.TABLE_1[OF_7B], hardware=effort.hardware)
    pair: Pair = ("wlb:2", "adaptive")
    found = paper.speedups(base, [pair], effort)
    printed = paper.FIGURE_14.get(scaled)
    return [row(shown_tokens(scaled), found[paper.PLAIN], found[pair], printed)]


def lines(figures: Mapping[str, Any], pictures: Pictures) -> list[str]:
    text = [
        "Work a second over Plain-4D (`original`, per-sequence) by the project's simulator, which "
        "takes attention, matrix products and memory bandwidth as measured here. Links and "
        "overlaps are assumed. So these speed-ups are *simulated* with measured kernels "
        "([simulator.md](../simulator.md)). Ranges are over seeds.",
    ]
    for number, about in (
        (12, "Figure 12: packings at the layouts of Table 1"),
        (13, "Figure 13: each technique at 7B-128K"),
        (14, "Figure 14: `wlb`, adaptive, by window, 7B"),
    ):
        found = {
            key.partition(", ")[2]: [Row(**one) for one in rows]
            for key, rows in figures.items()
            if key.startswith(f"figure-{number}")
        }
        if found:
            text += ["", f"### {about}", *_figure(number, about, found, pictures)]
    return text


def _figure(
    number: int, about: str, found: Mapping[str, Sequence[Row]], pictures: Pictures
) -> list[str]:
    """A table and a picture. ``found`` are rows by layout, or all under one empty name."""
    named = [
        (f"{layout}, {one.name}" if layout and number == 12 else one.name, one)
        for layout, rows in found.items()
        for one in rows
    ]
    cells = [
        [name, f"{one.value:.3f} ({one.lowest:.2f}-{one.highest:.2f})",
         "" if one.paper is None else f"{one.paper:g}", *one.extra]
        for name, one in named
    ]  # fmt: skip
    groups: dict[str, list[Row]] = {}
    for layout, rows in found.items():
        for one in rows:
            group = one.name if number == 12 else "measured kernels"
            name = layout if number == 12 else one.name
            groups.setdefault(group, []).append(Row(name, one.value, one.lowest, one.highest,
                                                    one.paper))  # fmt: skip
    section = Section(
        f"figure-{number}", "", "", "speed-up over Plain-4D", [one for _, one in named], (), "",
        groups=groups,
    )  # fmt: skip
    picture = pictures.add(
        f"figure-{number}", about.replace("`", ""),
        lambda path, title: plot(replace(section, title=title), path),
    )  # fmt: skip
    return ["", *table(["", "speed-up", "paper", "MFU", "peak GiB"], cells), *picture]
