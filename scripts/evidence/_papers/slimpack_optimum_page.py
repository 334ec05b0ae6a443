"""SlimPack's programme (§4.1) against the package's cuts, as a section of a page."""

from __future__ import annotations

import statistics
from dataclasses import replace

from _sections import Row, Section, row_of

from _papers.paper import Effort, K
from _papers.slimpack_optimum import (
    GAP,
    LEAST,
    MULTIPLE,
    WINDOW,
    Case,
    bound_us,
    documents_of,
    evenest,
    optimum,
    package,
)

CASES = (Case(2, 2, 6), Case(2, 2, 8), Case(4, 2, 8))


def cuts(effort: Effort) -> Section:
    """How far the package's cuts are from the best ones."""
    rows, gains, doubled = list[Row](), [], []
    for case in CASES:
        ratios, even, twice, waits, sizes, counts = [], [], [], [], [], []
        for seed in effort.seeds:
            lengths = documents_of(case, seed)
            own = package(case, lengths)
            best, _ = optimum(case, lengths, sum(own.chains), own.us)
            ratios.append(own.us / best.us)
            even.append(evenest(case, lengths, own.chains).us / best.us)
            twice.append(package(replace(case, num_units=2 * case.num_units), lengths).us / best.us)
            waits.append(own.us / bound_us(case, lengths))
            sizes.append((own.heaviest, best.heaviest, own.ends, best.ends))
            counts.append(len(lengths))
        gains += ratios
        doubled += twice
        ours, theirs, *ends = (statistics.fmean(one) for one in zip(*sizes, strict=True))
        extra = (
            f"{statistics.fmean(even):.3f}",
            f"{statistics.fmean(twice):.3f}",
            f"{statistics.fmean(waits):.2f}",
            f"{ours:.2f} / {theirs:.2f}",
            f"{ends[0]:.2f} / {ends[1]:.2f}",
            f"{min(counts)}-{max(counts)}",
        )
        rows.append(row_of(case.name, ratios, None, extra))
    return Section(
        "cuts",
        "Section 4.1: cuts in closed form against a mixed-integer programme",
        "The table shows the package's step over the shortest one, which a mixed-integer programme "
        "finds by SCIP (in OR-tools), within "
        f"{GAP:.1%}: over all cuts at multiples of {MULTIPLE} tokens, all places of whole "
        "documents, and all numbers of slices of each document. It has as many units, the same "
        "schedule, and chains heaviest first. Documents are those of `reference` lengths from "
        f"{LEAST // K}K on, in windows of {WINDOW // K}K, few enough to be solved; each seed is "
        "one step. *Equal units* makes the heaviest unit as light as can be, which is the paper's "
        "aim, with the package's chains. *Twice the units* is the package's step with that. *No "
        "bubbles* is the package's over the mean work of a rank. *Heaviest* is the heaviest unit "
        "over the mean: the package's, and that of the shortest step. *Ends* is the same of the "
        "first and the last unit in the mean.",
        "the package's step over the shortest",
        rows,
        [],
        f"With so few units the package's step is {min(gains) - 1:.1%} to {max(gains) - 1:.1%} "
        "longer than the shortest. Not for its rounding: equal units as exact as can be are hardly "
        "faster. The shortest steps have unlike units: some are heavy, and the pipeline fills and "
        "drains with light ones. "
        f"With twice the units the package takes {min(doubled):.2f} to {max(doubled):.2f} of the "
        "shortest step of few. Steps of runs have 32 to 128 units, too many to be solved. What no "
        "cuts can gain there is in the section on backward units, as *no bubbles*.",
        ("equal units", "twice the units", "no bubbles", "heaviest", "ends", "documents"),
    )  # fmt: skip
