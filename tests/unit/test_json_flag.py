"""``--json`` means the same in every command and script: a switch, the result goes to stdout."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
FILES = sorted([*PROJECT.glob("megatron_wlb/**/*.py"), *PROJECT.glob("scripts/**/*.py")])


def json_flags(path: Path) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_argument"
        and any(isinstance(word, ast.Constant) and word.value == "--json" for word in node.args)
    ]


WITH_FLAG = {str(path.relative_to(PROJECT)): json_flags(path) for path in FILES if json_flags(path)}


def test_flag_finder_finds_commands_and_scripts() -> None:
    assert {"megatron_wlb/cli/plan.py", "scripts/evidence/bench_cp.py"} < WITH_FLAG.keys()


@pytest.mark.parametrize("name", WITH_FLAG)
def test_json_flag_takes_no_file(name: str) -> None:
    for call in WITH_FLAG[name]:
        options = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert options["action"] == "'store_true'" and "type" not in options
