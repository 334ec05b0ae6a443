"""What the Python scripts beside it share: flags, and what a table says of what is wanted."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_wlb.cli.flags import flag
from megatron_wlb.data.lengths import DISTRIBUTIONS
from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text
from megatron_wlb.settings.command_line import Parser

sys.path.append(str(Path(__file__).parents[1]))  # what scripts/quickstart is made of


def parser_of(description: str | None) -> Parser:
    """A parser whose help shows the script's docstring as it stands."""
    return Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_seeds(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Of the random lengths."""
    flag(parser, "--seeds N", f"of the random lengths{more}", [1, 2, 3], of=int)


def add_distribution(parser: argparse.ArgumentParser) -> None:
    """Which random lengths."""
    flag(parser, "--distribution", "of the lengths", "reference", choices=DISTRIBUTIONS)


def put(page: Path, kind: str, text: str) -> None:
    """Writes ``text`` between a page's marks of that kind. Raises :class:`ConfigError` without."""
    begin, end = f"<!-- {kind} -->", f"<!-- end of {kind} -->"
    content = page.read_text(encoding="utf-8")
    marked = re.compile(re.escape(begin) + ".*" + re.escape(end), re.DOTALL)
    if not marked.search(content):
        raise ConfigError(f"{page} has no place for this study; add {begin} and {end}")
    write_text(page, marked.sub(lambda _: f"{begin}\n\n{text}\n\n{end}", content))


def verdict(misses: Sequence[str]) -> str:
    """A cell of a table."""
    return "[red]" + ", ".join(misses) if misses else "[green]as wanted"
