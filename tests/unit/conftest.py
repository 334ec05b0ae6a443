"""What tests of several modules need."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_wlb.runtime.compat.source import MegatronSource


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The installed core's Python files, to be changed."""
    core = MegatronSource.installed().core_root / "megatron" / "core"
    for path in core.rglob("*.py"):
        copy = tmp_path / "megatron" / "core" / path.relative_to(core)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return tmp_path
