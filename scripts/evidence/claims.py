#!/usr/bin/env python3
"""Writes docs/results/claims.md: every claim with its command, kind, figure, spread and date.

    scripts/evidence/claims.py           # after a figure of claims.yaml or of a page has changed
    scripts/evidence/claims.py --check   # fails where the page is old, or a figure is nowhere

The claims are in claims.yaml. Each has quotes of the page that its command makes, or that says what
the command printed. A quote that the page no longer has is an error, and so is a number of a figure
that stands in none of its quotes, and a number of README.md that no claim has.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = Path(__file__).with_name("claims.yaml")
PAGE = ROOT / "docs" / "results" / "claims.md"
NO_CLAIMS = {
    "16",
    "16,384",
    "8,192",
    "128K",
    "64",
    "0.18",
    "0.19",
    "0.16.1",
    "0.19.0",
    "3.12",
    "2.0",
    "2025",
}
"""Numbers of the README that say what is run, not what came of it."""
HEAD = """\
# Which command stands behind each figure?

Made by `scripts/evidence/claims.py` of `scripts/evidence/claims.yaml`; do not edit it by hand. A
figure is *measured*, *counted*, *tested*, *modelled*, *simulated* or *read*
([glossary.md](../glossary.md)). Each stands on the page named. The command makes that page, or the
page says what the command printed. A test finds figures that their pages no longer have, and
numbers of the README that are not here. Commands are numbered, and listed below.

| Claim | Figure | Spread | Kind | Date | Command | Page |
| --- | --- | --- | --- | --- | --- | --- |
"""
NO_COMMAND = "none is kept"
"""The command of a figure that was taken by hand."""


def read() -> list[dict[str, Any]]:
    claims: list[dict[str, Any]] = yaml.safe_load(CLAIMS.read_text())
    return claims


def page_of(claims: list[dict[str, Any]]) -> str:
    columns = "claim", "figure", "spread", "kind", "date"
    commands = dict.fromkeys(c["command"] for c in claims if c["command"] != NO_COMMAND)
    numbers = {command: number for number, command in enumerate(commands, 1)}
    rows = [
        [*(str(c[name]) for name in columns), str(numbers.get(c["command"], "none")),
         f"[{c['page']}]({c['page']})"]
        for c in claims
    ]  # fmt: skip
    listed = [f"{number}. `{command}`" for command, number in numbers.items()]
    without = [f"- {c['claim']}" for c in claims if c["command"] == NO_COMMAND]
    parts = [HEAD + "\n".join(f"| {' | '.join(row)} |" for row in rows)]
    parts += ["## The commands", "\n".join(listed)]
    if without:
        parts += ["## Taken by hand", "No command is kept for these:", "\n".join(without)]
    return "\n\n".join(parts) + "\n"


def quotes_of(claim: dict[str, Any]) -> list[str]:
    """One or several."""
    quotes: str | list[str] = claim["quote"]
    return [quotes] if isinstance(quotes, str) else quotes


def wrong(claims: list[dict[str, Any]]) -> list[str]:
    """What is not so: quotes that pages do not have, numbers of the README without a claim."""
    found = []
    for claim in claims:
        path = (PAGE.parent / claim["page"]).resolve()
        page, text = path.relative_to(ROOT), " ".join(path.read_text().split())
        quotes = [" ".join(quote.split()) for quote in quotes_of(claim)]
        found += [
            f"{page} has no {quote!r}: {claim['claim']}" for quote in quotes if quote not in text
        ]
        found += [
            f"{number} is in no quote of {page}: {claim['claim']}"
            for number in re.findall(r"\d[\d.,]*\d(?:e-\d+)?|\d", str(claim["figure"]))
            if number not in " ".join(quotes)
        ]
    known = {number for claim in claims for number in str(claim.get("readme", "")).split()}
    numbers = numbers_of((ROOT / "README.md").read_text())
    found += [f"README.md has {number}, which no claim has" for number in sorted(numbers - known)]
    found += [f"a claim has {number}, which README.md has not" for number in known - numbers]
    return found


def numbers_of(text: str) -> set[str]:
    """Numbers that may be figures: with a decimal point or two digits, outside code and links."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    words = re.findall(r"(?<![\w.,=-])\d[\d.,]*K?(?![\w])", text.replace("-", " "))
    numbers = {word.rstrip(".,") for word in words}
    return {number for number in numbers if len(number) > 1} - NO_CLAIMS


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    claims = read()
    problems = wrong(claims)
    page = page_of(claims)
    if not options.check:
        PAGE.write_text(page)
    elif not PAGE.is_file() or PAGE.read_text() != page:
        problems.append("docs/results/claims.md is old; run scripts/evidence/claims.py")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
