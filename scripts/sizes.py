#!/usr/bin/env python3
"""How large the house is: lines, names and pages, and what they may be at most.

Limits are what they were last, so that nothing grows; lower one when you have made it smaller.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "megatron_wlb"
STARTS = ("launch", "pretrain_gpt", "planning.packing.slim")
"""Modules of a launch with ``--wlb-packing slim``; a packing is loaded by its name."""
OUTSIDE = ("strategies", "adapters")
"""Rooms that the core does not import."""


class Size(NamedTuple):
    """What is counted, and how much of it may be, and should be one day."""

    what: str
    limit: float
    wanted: float


SIZES = {
    "slim_lines": Size("lines that a launch with slim imports, also in functions", 30_100, 30_000),
    "core_lines": Size(f"lines of the package without {' and '.join(OUTSIDE)}", 47_265, 39_000),
    "test_lines": Size("lines of tests", 49_410, 36_000),
    "test_ratio": Size("lines of tests for each line of the package", 0.99, 0.9),
    "tested_modules": Size("modules of the package that tests name", 221, 110),
    "class_names": Size("class names that two modules have", 3, 4),
    "file_names": Size("file names that two modules have", 8, 8),
    "pages": Size("pages of docs/ that are written by hand", 20, 20),
}


def measured(root: Path) -> dict[str, float]:
    """The sizes of a checkout."""
    modules = modules_of(root)
    lines = {name: _lines(path) for name, path in modules.items()}
    tests = sorted((root / "tests").rglob("*.py"))
    test_lines = sum(map(_lines, tests))
    classes = Counter(
        name
        for path in modules.values()
        for name in {n.name for n in _tree(path).body if isinstance(n, ast.ClassDef)}
    )
    files = Counter(path.name for path in modules.values() if path.name != "__init__.py")
    return {
        "slim_lines": sum(lines[name] for name in closure(modules, STARTS)),
        "core_lines": sum(n for name, n in lines.items() if name.partition(".")[0] not in OUTSIDE),
        "test_lines": test_lines,
        "test_ratio": round(test_lines / sum(lines.values()), 3),
        "tested_modules": len(set().union(*(imported(path, modules) for path in tests))),
        "class_names": sum(number > 1 for number in classes.values()),
        "file_names": sum(number > 1 for number in files.values()),
        "pages": len([*(root / "docs").glob("*.md")]),
    }


def modules_of(root: Path) -> dict[str, Path]:
    """The modules of the package, by their dotted names below it; the package itself is ``""``."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def closure(modules: dict[str, Path], starts: tuple[str, ...]) -> set[str]:
    """The modules that these import, and what those import; folders that they are in, too."""
    found: set[str] = set()
    left = list(starts)
    while left:
        name = left.pop()
        if name in modules and name not in found:
            found.add(name)
            left += [*imported(modules[name], modules), name.rpartition(".")[0]]
    return found


def imported(path: Path, modules: dict[str, Path], for_types: bool = False) -> set[str]:
    """The modules of the package that a file imports, also in functions, or ``for_types`` alone."""
    found: set[str] = set()
    for name in _imported(_tree(path), for_types):
        place = name.removeprefix(f"{PACKAGE}.")
        found.add(place if place in modules else place.rpartition(".")[0])
    return found & modules.keys() - {""}


def _imported(node: ast.AST, for_types: bool) -> Iterator[str]:
    children = ast.iter_child_nodes(node)
    match node:
        case ast.Import():
            yield from (a.name for a in node.names if a.name.startswith(f"{PACKAGE}."))
        case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == PACKAGE:
            yield from (f"{module}.{alias.name}" for alias in node.names)
        case ast.If() if not for_types and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            children = iter(node.orelse)
    for child in children:
        yield from _imported(child, for_types)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    found = measured(Path(__file__).parent.parent)
    if args.json:
        print(json.dumps({n: {"now": v, **SIZES[n]._asdict()} for n, v in found.items()}, indent=1))
    else:
        print(f"{'now':>9} {'limit':>9} {'wanted':>9}")
        for name, now in found.items():
            size = SIZES[name]
            over = f"  <- over its limit by {now - size.limit:,g}" if now > size.limit else ""
            print(f"{now:>9,g} {size.limit:>9,g} {size.wanted:>9,g}  {size.what}{over}")
    return int(any(now > SIZES[name].limit for name, now in found.items()))


if __name__ == "__main__":
    sys.exit(main())
