"""Who may import what, held over every file of the package."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import EllipsisType

import pytest
import sizes

import megatron_wlb
from megatron_wlb.extensions import EXTENSIONS, load

PACKAGE = Path(megatron_wlb.__file__).parent
PROJECT = PACKAGE.parent
MAX_LINES = 600

MAY_IMPORT_MEGATRON = ("runtime", "strategies.run", "pretrain_gpt", "launch")
MAY_IMPORT_MEGATRON_IN_FUNCTIONS = ("data.corpus",)
PROGRAMS = ("pretrain_gpt", "launch", "measure_cost", "torchrun")
FORMER_PATHS = ("verl", "slime", "packing_scheduler")
"""Of adapters; users' own scripts name them."""
FLOORS = (
    ("errors", "interrupts", "files", "reading", "extensions", "children"),
    ("settings",),
    ("cost",),
    ("plan", "data"),
    ("planning", "simulator"),
    ("study", "api", "runtime"),
    ("cli", "strategies", "adapters"),
)
"""From the ground up. Each imports from those before it alone, on its own floor too. Programs stand
beside ``cli``, and the scripts above."""
LAYERS = (*(layer for floor in FLOORS for layer in floor), *FORMER_PATHS)
INSIDE = {
    "cost": ("schedule", ...),
    "plan": ("sharding", "target_runs"),
    "planning": ("greedy", "packing", "planner", ..., "ledger"),
    "runtime": (
        "compat", "emulation", "device_clock", "ranks", "gpt", "findings", "stepping", "saving",
        "rank_main", "measuring", "trainer", "megatron_lm",
    ),
    "strategies": ("plan", "run", "strategy_search", "plan_strategies", "entry"),
}  # fmt: skip
"""The order inside a folder. The dots are all that it does not name."""
PLANNING = (*LAYERS[: LAYERS.index("runtime")], "strategies.plan")
ADVICE = ("study", "api")
"""What forecasts and compares. No run needs it: nothing of these imports it."""
RUNS = ("runtime", *PROGRAMS)
SCRIPTS = {
    path.stem for folder in ("scripts", "scripts/evidence") for path in (PROJECT / folder).iterdir()
}


def belongs(module: str, groups: tuple[str, ...]) -> bool:
    return any(module == group or module.startswith(group + ".") for group in groups)


MODULES = sizes.modules_of(PROJECT)
PLANNING_MODULES = [module for module in MODULES if belongs(module, PLANNING)]


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, inside functions too."""
    return set(_imported(parsed(path), into_functions=True))


def imported_at_once(path: Path) -> set[str]:
    """Top-level packages that importing a file imports: not those inside functions."""
    return set(_imported(parsed(path), into_functions=False))


def _imported(node: ast.AST, into_functions: bool) -> Iterator[str]:
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    match node:
        case ast.Import():
            yield from (alias.name.partition(".")[0] for alias in node.names)
        case ast.ImportFrom(level=0, module=str(module)):
            yield module.partition(".")[0]
        case ast.If() if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            children = node.orelse
        case ast.FunctionDef() | ast.AsyncFunctionDef() if not into_functions:
            children = ()
    for child in children:
        yield from _imported(child, into_functions)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def of_project(path: Path) -> set[str]:
    """Modules of the project that a file imports, inside functions too, below ``megatron_wlb``."""
    return sizes.imported(path, MODULES, for_types=True)


def wrong_directions(order: Sequence[str | EllipsisType], folder: str = "") -> list[str]:
    """Imports between what ``order`` names of a folder that go from one to a later one."""

    def rank(module: str) -> int | None:
        rest = module.removeprefix(folder).lstrip(".").partition(".")[0]
        if (folder and not belongs(module, (folder,))) or not rest or rest in PROGRAMS:
            return None
        return order.index(rest if rest in order else ...)  # what nothing names raises

    wrong = []
    for module, path in MODULES.items():
        for other in of_project(path):
            first, second = rank(module), rank(other)
            if first is not None and second is not None and second > first:
                wrong.append(f"{module} imports {other}")
    return wrong


def test_each_imports_from_what_stands_before_it() -> None:
    assert wrong_directions(LAYERS) == []
    assert {folder: wrong_directions(order, folder) for folder, order in INSIDE.items()} == {
        folder: [] for folder in INSIDE
    }
    backwards = wrong_directions(INSIDE["planning"][::-1], "planning")
    assert "planning.planner imports planning.packing" in backwards, "the test sees imports"


def test_core_imports_neither_strategies_nor_adapters() -> None:
    """Not inside functions either; :mod:`megatron_wlb.extensions` names them."""
    outside = ("strategies", "adapters", *FORMER_PATHS)
    core = [module for module in MODULES if not belongs(module, outside)]
    found = {m: {o for o in of_project(MODULES[m]) if belongs(o, outside)} for m in core}
    assert {module: others for module, others in found.items() if others} == {}
    assert any(
        belongs(other, ("strategies",)) for other in of_project(MODULES["strategies.run.runner"])
    )


@pytest.mark.parametrize("name", EXTENSIONS)
def test_extensions_are_where_the_table_says(name: str) -> None:
    assert callable(load(name))


def test_launch_with_slim_imports_no_extension() -> None:
    places = (place.partition(":")[0] for place in EXTENSIONS.values())
    extensions = {place.removeprefix("megatron_wlb.") for place in places}
    found = sizes.closure(MODULES, sizes.STARTS)
    assert not extensions & found and "planning.slicing.cut" in found


def test_house_has_few_floors_and_folders() -> None:
    scripts = 1
    assert len(FLOORS) + scripts <= 8
    assert sum(path.is_dir() and path.name != "__pycache__" for path in PACKAGE.iterdir()) <= 11


def test_runs_import_nothing_that_only_advises() -> None:
    """Not through others either: what a run may import comes before the advice."""
    found = {module: of_project(path) for module, path in MODULES.items() if belongs(module, RUNS)}
    assert {m: o for m, others in found.items() for o in others if belongs(o, ADVICE)} == {}
    assert any(belongs(other, ADVICE) for other in of_project(MODULES["cli.plan"]))


def test_package_imports_no_script() -> None:
    assert {"evidence", "_papers", "reproduce_paper", "_quickstart"} <= SCRIPTS
    wrong = {module: imported(path) & {*SCRIPTS, "helpers"} for module, path in MODULES.items()}
    assert {module: names for module, names in wrong.items() if names} == {}


def test_slices_are_not_asked_for_by_a_packings_name() -> None:
    named = [module for module, path in MODULES.items() if '"slim"' in path.read_text()]
    assert "planning.packing.slim" in named
    assert len(named) <= 4, f"ask the packing for what it needs: {named}"


def test_import_rules_speak_of_modules_that_exist() -> None:
    tops = {module.partition(".")[0] for module in MODULES} - {""}
    assert tops == {*LAYERS, *PROGRAMS}
    assert {"plan", "errors"} <= set(PLANNING_MODULES)
    assert any("megatron" in imported(path) for path in MODULES.values())


def test_import_finder_sees_what_python_imports(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "import numpy.linalg as la\n"
        "from . import sibling\n"
        "if TYPE_CHECKING:\n    import types_only\nelse:\n    import run_only\n"
        "try:\n    import tried\nexcept ImportError:\n    from fallback.inner import x\n"
        "class C:\n    import in_class\n"
        "def f():\n    import lazy\n"
    )
    at_once = {"typing", "numpy", "run_only", "tried", "fallback", "in_class"}
    assert imported_at_once(path) == at_once
    assert imported(path) == at_once | {"lazy"}


@pytest.mark.parametrize("module", MODULES)
def test_only_the_runtime_imports_megatron(module: str) -> None:
    if belongs(module, MAY_IMPORT_MEGATRON):
        return
    lazy_is_fine = belongs(module, MAY_IMPORT_MEGATRON_IN_FUNCTIONS)
    assert "megatron" not in (imported_at_once if lazy_is_fine else imported)(MODULES[module])


@pytest.mark.parametrize("module", PLANNING_MODULES)
def test_planning_code_names_no_torch(module: str) -> None:
    assert not {"torch", "megatron"} & imported_at_once(MODULES[module])


def test_planning_code_loads_neither_torch_nor_megatron() -> None:
    """By what Python has loaded after each import: also through other modules."""
    script = (
        "import importlib, json, sys\n"
        "loaded = {}\n"
        "for module in json.loads(sys.argv[1]):\n"
        "    importlib.import_module('megatron_wlb.' + module)\n"
        "    loaded[module] = sorted({'torch', 'megatron'} & set(sys.modules))\n"
        "print(json.dumps(loaded))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(PLANNING_MODULES)],
        capture_output=True,
        text=True,
        check=False,
        cwd=PROJECT,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {module: [] for module in PLANNING_MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_module_says_what_it_is(module: str) -> None:
    if any(part.startswith("_") for part in module.split(".")):
        return
    assert ast.get_docstring(parsed(MODULES[module])), MODULES[module]


def test_files_stay_one_idea_long() -> None:
    paths = [
        path
        for folder in ("megatron_wlb", "tests", "scripts")
        for path in (PROJECT / folder).rglob("*")
        if path.suffix in {"", ".py", ".sh"} and path.is_file()
    ]
    lengths = {str(path.relative_to(PROJECT)): len(path.read_text().splitlines()) for path in paths}
    assert len(lengths) > len(MODULES)
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
