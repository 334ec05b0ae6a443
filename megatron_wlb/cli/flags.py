"""Flags of commands: what a flag's value is called says how it is read."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_wlb.reading import Several, decimal, path_of_flag, text_of_flag

READERS = {
    **dict.fromkeys(("N", "TOKENS", "K", "L"), int),
    **dict.fromkeys(("X", "STEPS", "SHARE", "GIB", "S"), decimal),
    **dict.fromkeys(("FILE", "FILE.yaml", "FILE.html", "FILE.json"), path_of_flag),
}
"""By the name of the value; all others are texts."""


def flag(
    group: argparse._ActionsContainer, words: str, help: str, default: Any = None, **options: Any
) -> None:
    """Adds ``--name VALUE``, or ``--name`` alone: a switch, or one that has ``choices``.

    Names such as ``a,b,…`` and ``of`` (what makes a value of a word) take a list. The help says
    the ``default``; ``options`` are argparse's.
    """
    name, _, value = words.partition(" ")
    if "," in value or "of" in options:
        options["action"] = Several
    elif value:
        options["type"] = READERS.get(value, text_of_flag)
    elif "choices" not in options:
        options["action"], default = "store_true", False
    if value:
        options["metavar"] = value
    if default:
        said = ",".join(map(str, default)) if isinstance(default, list) else default
        help += f" (default: {said:g})" if isinstance(said, float) else f" (default: {said})"
    group.add_argument(name, default=default, help=help, **options)


def add_command(
    actions: argparse._SubParsersAction[Any], name: str, summary: str, **options: Any
) -> argparse.ArgumentParser:
    """Adds a sub-command whose help shows texts as they stand."""
    command: argparse.ArgumentParser = actions.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )
    return command
