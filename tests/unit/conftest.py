"""What tests of several modules need."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_wlb.runtime.compat import targets
from megatron_wlb.runtime.compat.source import MegatronSource


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The installed core's files that the table of hooked names names, to be changed."""
    installed = MegatronSource.installed()
    modules = {target.partition(":")[0] for target in targets.CORE} | {"megatron.core.package_info"}
    for module in modules:
        path = installed.file(module)
        assert path is not None
        copy = tmp_path / path.relative_to(installed.core_root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return tmp_path
