"""What the Python scripts beside it share: flags, and what a table says of what is wanted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_wlb.data.lengths import DISTRIBUTIONS
from megatron_wlb.settings.command_line import Parser

sys.path.append(str(Path(__file__).parents[1]))  # what scripts/quickstart is made of


def parser_of(description: str | None) -> Parser:
    """A parser whose help shows the script's docstring as it stands."""
    return Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_seeds(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Of the random lengths."""
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[1, 2, 3], help=f"default: 1 2 3{more}"
    )


def add_distribution(parser: argparse.ArgumentParser) -> None:
    """Which random lengths."""
    parser.add_argument(
        "--distribution", choices=DISTRIBUTIONS, default="reference", help="default: reference"
    )


def verdict(misses: Sequence[str]) -> str:
    """A cell of a table."""
    return "[red]" + ", ".join(misses) if misses else "[green]as wanted"
