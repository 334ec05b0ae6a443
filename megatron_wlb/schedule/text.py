"""Pipeline orders to read, to keep and to edit: a text form and a CSV form, and files of both.

Text is a line a rank, its actions in running order::

    rank 0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
    rank 1: F0.0 B0.0 F0.1 B0.1 F0.2 B0.2

In CSV a row is a rank and a cell an action, without a header, so that a spreadsheet shows the
schedule as papers draw it. Empty lines and what follows ``#`` are left out when reading.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_wlb.errors import ConfigError, PlanError
from megatron_wlb.files import write_text
from megatron_wlb.schedule.order import Action, Order, validate


def to_text(order: Sequence[Sequence[Action]]) -> str:
    """A line a rank; :func:`from_text` is the inverse."""
    return "".join(
        f"rank {rank}: {' '.join(map(str, actions))}\n" for rank, actions in enumerate(order)
    )


def from_text(text: str) -> Order:
    """The order that was written so.

    Raises :class:`PlanError` for text that is none, ranks out of turn, or an order that is
    incomplete or deadlocks (:func:`~megatron_wlb.schedule.order.validate`).
    """
    order: Order = []
    for number, line in _lines(text):
        name, colon, actions = line.partition(":")
        if not colon or name.split() != ["rank", str(len(order))]:
            raise PlanError(
                f"line {number}: {line!r} is not the order of rank {len(order)}; write "
                f"'rank {len(order)}: F0.0 B0.0 …'"
            )
        order.append([_action(number, word) for word in actions.split()])
    validate(order)
    return order


def to_csv(order: Sequence[Sequence[Action]]) -> str:
    """A row a rank; :func:`from_csv` is the inverse."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([map(str, actions) for actions in order])
    return text.getvalue()


def from_csv(text: str) -> Order:
    """As :func:`from_text`. Empty cells are left out: a spreadsheet may show bubbles by them."""
    order = [
        [_action(number, cell.strip()) for cell in next(csv.reader([line])) if cell.strip()]
        for number, line in _lines(text)
    ]
    validate(order)
    return order


def write_order(path: str | os.PathLike[str], order: Sequence[Sequence[Action]]) -> None:
    """A file of text, or of CSV if it is called so; whole or not at all.

    Raises :class:`ConfigError` where it cannot be written.
    """
    write_text(path, to_csv(order) if Path(path).suffix == ".csv" else to_text(order))


def read_order(path: str | os.PathLike[str]) -> Order:
    """What :func:`write_order`, or a person, wrote.

    Raises :class:`ConfigError` if it cannot be read, :class:`PlanError` for what is in it.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the schedule {path}: {error}; give a text file") from None
    try:
        return from_csv(text) if path.suffix == ".csv" else from_text(text)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def _lines(text: str) -> list[tuple[int, str]]:
    """Numbered lines with something in them."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [(number, line) for number, line in enumerate(lines, start=1) if line]


def _action(number: int, word: str) -> Action:
    try:
        return Action.parse(word)
    except PlanError as error:
        raise PlanError(f"line {number}: {error}") from None
