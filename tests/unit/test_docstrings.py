"""The first line of a docstring says what the thing is or does, held over every file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_wlb

PACKAGE = Path(megatron_wlb.__file__).parent
HANGS_ON_A_NAME = re.compile(r"(Of|Those|That|These|With|Without) ")
"""Such a first line is the end of a sentence that the name would have to begin."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Each string that stands alone as a statement, and its line: also those behind attributes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def hanging(source: str) -> list[str]:
    return [f"{line}: {text}" for line, text in docstrings(source) if HANGS_ON_A_NAME.match(text)]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_docstring_begins_with_what_the_thing_is(path: Path) -> None:
    assert hanging(path.read_text()) == []


def test_finder_sees_docstrings_of_attributes_and_functions() -> None:
    source = 'A = 1\n"""Of a step."""\ndef f():\n    """Of all.\n\n    More."""\n    x = "Of x"\n'
    assert [line[:2] for line in hanging(source)] == ["2:", "4:"]
    assert hanging('"""Offers this."""') == []
