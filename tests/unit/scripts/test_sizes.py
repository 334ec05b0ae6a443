"""What ``scripts/sizes.py`` counts, on a small tree that is made up."""

from __future__ import annotations

from pathlib import Path

import pytest
import sizes

FILES = {
    "megatron_wlb/__init__.py": "",
    "megatron_wlb/launch.py": "from megatron_wlb.plan import Plan\n\n\nclass Run:\n    pass\n",
    "megatron_wlb/pretrain_gpt.py": (
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
        "    from megatron_wlb.adapters import verl\n"
    ),
    "megatron_wlb/plan/__init__.py": "class Plan:\n    pass\n",
    "megatron_wlb/plan/late.py": "VALUE = 1\n",
    "megatron_wlb/planning/__init__.py": "",
    "megatron_wlb/planning/packing/__init__.py": "",
    "megatron_wlb/planning/packing/slim.py": (
        "def cut() -> int:\n    from megatron_wlb.plan import late\n\n    return late.VALUE\n"
    ),
    "megatron_wlb/strategies/run.py": "class Run:\n    pass\n",
    "megatron_wlb/adapters/verl.py": "import megatron_wlb.strategies.run\n",
    "megatron_wlb/adapters/late.py": "import verl\n",
    "tests/unit/test_plan.py": (
        "import megatron_wlb\nfrom megatron_wlb.plan import Plan, late\n"
        "from megatron_wlb.adapters.verl import x\n\nassert Plan, late\n"
    ),
    "docs/plan.md": "# Plan\n",
    "docs/results/plan.md": "# Plan\n",
}  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_sizes_count_what_they_say(tree: Path) -> None:
    found = sizes.measured(tree)
    assert found == {
        "slim_lines": 5 + 4 + 2 + 1 + 4,  # imports in functions count, those for types do not
        "core_lines": 16,
        "test_lines": 5,
        "test_ratio": 0.25,
        "tested_modules": 3,
        "class_names": 1,
        "file_names": 1,
        "pages": 1,
    }
    assert found.keys() == sizes.SIZES.keys()


def test_more_than_a_limit_fails(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sizes, "__file__", str(tree / "scripts" / "sizes.py"))
    monkeypatch.setattr("sys.argv", ["sizes.py"])
    assert sizes.main() == 0
    monkeypatch.setitem(sizes.SIZES, "pages", sizes.Size("pages", 0, 0))
    assert sizes.main() == 1
    assert "pages  <- over its limit by 1" in capsys.readouterr().out
