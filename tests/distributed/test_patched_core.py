"""A copy of the installed megatron-core with our patches trains to the same numbers.

Once with the plan's shapes through the public ``shape_provider``, once without the plugin's
communicator: with the micro-batches' lengths given to Megatron's own schedules.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.layouts import further
from helpers.versions import CASES, run_with_core

from megatron_wlb.runtime.compat.patch_files import PatchSeries
from megatron_wlb.runtime.compat.source import MegatronSource


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> MegatronSource:
    """A patched copy of ``megatron.core``."""
    installed = MegatronSource.installed()
    if PatchSeries.of(installed.version).state(installed) != "stock":
        pytest.skip("the installed megatron-core is patched; wlb patch revert")
    root = tmp_path_factory.mktemp("patched")
    shutil.copytree(
        installed.core_root / "megatron" / "core",
        root / "megatron" / "core",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    copy = MegatronSource.at(root)
    PatchSeries.of(copy.version).apply(copy)
    return copy


@pytest.mark.parametrize("stock_communicator", [False, further(True)])
def test_patched_core_computes_what_one_process_does(
    patched: MegatronSource, stock_communicator: bool
) -> None:
    run = run_with_core(patched.core_root, stock_communicator=stock_communicator)
    assert Path(run.folder).parents[1] == patched.core_root
    assert run.takes_shape_provider
    assert run.differences == {str(case): [] for case in CASES}
