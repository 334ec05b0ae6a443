"""What the Python scripts beside it share: flags, and what a table says of what is wanted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_wlb.cli.flags import flag
from megatron_wlb.data.lengths import DISTRIBUTIONS
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


def verdict(misses: Sequence[str]) -> str:
    """A cell of a table."""
    return "[red]" + ", ".join(misses) if misses else "[green]as wanted"
