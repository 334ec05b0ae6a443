"""The tables of results, between markers of two pages: one of counts, and one of recipes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from _run_recipes.outcome import EQUAL, REFUSED, STATUSES, Outcome
from _run_recipes.results import Results
from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text

COUNTS_PAGE, RECIPES_PAGE = "recipes.md", "recipe-runs.md"
BEGIN, END = "<!-- recipe runs -->", "<!-- end of recipe runs -->"
_HEAD = ("Megatron-LM", "recipes", "train", "accepted", "fit 4 processes", "ran", "equal")


def write(results: Results, docs: Path) -> None:
    """Puts one version's results into both pages, in place of what they say of it."""
    name = f"{results.kind} {results.version}"
    counts = results.counts
    numbers = (counts.recipes, counts.training, counts.accepted, counts.fitting, counts.ran)
    row = _row([name, *map(str, (*numbers, counts.equal))])
    text, rows = _between(docs / COUNTS_PAGE)
    kept = [one for one in rows.splitlines()[2:] if not one.startswith(f"| {name} |")]
    body = "\n".join([_row(_HEAD), _row(["---"] * len(_HEAD)), *sorted([*kept, row])])
    write_text(docs / COUNTS_PAGE, text.format(body))

    text, sections = _between(docs / RECIPES_PAGE)
    found = {one.partition("\n")[0]: one for one in re.split(r"^## ", sections, flags=re.M)[1:]}
    found[name] = _section(name, results)
    body = "\n\n".join(f"## {found[key].strip()}" for key in sorted(found))
    write_text(docs / RECIPES_PAGE, text.format(body))


def _between(path: Path) -> tuple[str, str]:
    """A page with a place for what is between its markers, and what is there now."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    inner, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{path} has no place for results; put {BEGIN} and {END} there")
    escaped = [part.replace("{", "{{").replace("}", "}}") for part in (before, after)]
    return f"{escaped[0]}{BEGIN}\n{{}}\n{END}{escaped[1]}", inner.strip()


def _section(name: str, results: Results) -> str:
    outcomes = [results.outcomes[key] for key in sorted(results.outcomes)]
    by = Counter(one.status for one in outcomes)
    without = sum(bool(one.without) for one in outcomes if one.status == EQUAL)
    said = f"{results.counts}; {without} of these without flags that need a GPU."
    lines = [name, "", said, "", "| What | Recipes |", "| --- | --- |"]
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
