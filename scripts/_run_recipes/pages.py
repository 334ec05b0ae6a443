"""The tables of results, between markers of their page: counts first, then each recipe."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from _run_recipes.outcome import EQUAL, REFUSED, STATUSES, Outcome
from _run_recipes.results import Results
from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text

PAGE = "recipe-runs.md"
BEGIN, END = "<!-- recipe runs -->", "<!-- end of recipe runs -->"
_HEAD = (
    "Megatron-LM",
    "packing",
    "recipes",
    "train",
    "accepted",
    "fit 4 processes",
    "ran",
    "equal",
)


def write(results: Sequence[Results], folder: Path) -> None:
    """Puts results into the page, in place of what is there."""
    rows, sections = [_row(_HEAD), _row(["---"] * len(_HEAD))], []
    for one in sorted(results, key=lambda one: (one.version, one.kind, one.packing)):
        name, counts = f"{one.kind} {one.version}", one.counts
        numbers = (counts.recipes, counts.training, counts.accepted, counts.fitting, counts.ran)
        rows.append(_row([name, f"`{one.packing}`", *map(str, (*numbers, counts.equal))]))
        sections.append(_section(f"{name}, {one.packing}", one))
    path, body = folder / PAGE, "\n\n".join(["\n".join(rows), *sections])
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{path} has no place for results; put {BEGIN} and {END} there")
    write_text(path, f"{before}{BEGIN}\n{body}\n{END}{after}")


def _section(name: str, results: Results) -> str:
    outcomes = [results.outcomes[key] for key in sorted(results.outcomes)]
    by = Counter(one.status for one in outcomes)
    without = sum(bool(one.without) for one in outcomes if one.status == EQUAL)
    said = f"{results.counts}; {without} of these without flags that need a GPU."
    lines = [f"## {name}", "", said, "", "| What | Recipes |", "| --- | --- |"]
    lines += [_row([f"**{status}**", str(by[status])]) for status in STATUSES if by[status]]
    reasons = Counter(why for one in outcomes if one.status == REFUSED for why in one.why)
    if reasons:
        lines += ["", "| Refused, as | Recipes |", "| --- | --- |"]
        lines += [_row([_prose(why), str(number)]) for why, number in reasons.most_common()]
    lines += ["", "<details><summary>Each recipe</summary>", ""]
    lines += ["| Recipe | What | Ran as | Changed | Said |", "| --- | --- | --- | --- | --- |"]
    return "\n".join([*lines, *map(_recipe_row, outcomes), "", "</details>"])


def _recipe_row(one: Outcome) -> str:
    ran_as = one.layout + (", layout reduced" if one.reduced else "")
    changed = ", ".join(one.kinds)
    if one.without:
        changed += f"; without {' '.join(f'`{flag}`' for flag in one.without)}"
    said = "; ".join(map(_prose, one.why))
    return _row([f"`{one.recipe}`", one.status, ran_as, changed, said])


def _prose(text: str) -> str:
    """A line of an error, for a cell: flags are code, bars and HTML are not what they seem."""
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return re.sub(r"(?<![\w`])(--[a-z][\w-]*)", r"`\1`", text)


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
