#!/usr/bin/env python3
"""Writes ``megatron_wlb/runtime/compat/signatures.txt``: what Megatron's functions take.

    scripts/megatron_signatures.py CHECKOUT… [--add MODULE:NAME…]

Give a checkout of each version. The names are those that the file has, those that the package
imports, and added ones. Then look at each line that changed: a new parameter or default may ask
for a change of our call, and nothing but numbers would show it.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_wlb.runtime.compat import hooks  # noqa: E402
from megatron_wlb.runtime.compat.source import MegatronSource  # noqa: E402


def imported(source: MegatronSource) -> Iterator[str]:
    """What the package imports from Megatron, or reads from an imported module of it."""
    for path in (ROOT / "megatron_wlb").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        modules: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron."):
                for alias in node.names:
                    if source.file(f"{node.module}.{alias.name}"):
                        modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    else:
                        yield f"{node.module}:{alias.name}"
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = modules.get(node.value.id)
                if module and not source.file(f"{module}.{node.attr}"):
                    yield f"{module}:{node.attr}"


def lines(names: set[str], sources: list[MegatronSource]) -> Iterator[str]:
    for name in sorted(names):
        before = hooks.MISSING
        for source in sources:
            found = source.signature(name)
            text = hooks.MISSING if found is None else f"({found})"
            if text != before:
                yield f"{name} {source.version} {text}"
            before = text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="+")
    parser.add_argument("--add", nargs="+", default=[])
    args = parser.parse_args()
    sources = [MegatronSource.at(path) for path in args.checkouts]
    names = set(args.add).union(*(hooks.expected_of(v) for v in hooks.VERSIONS))
    names.update(name for source in sources for name in imported(source))
    hooks.FILE.write_text("\n".join(lines(names, sources)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
