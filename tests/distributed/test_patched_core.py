"""A copy of the installed megatron-core with our patches trains to the same numbers.

Once with the plan's shapes through the public ``shape_provider``, once without the plugin's
communicator: with the micro-batches' lengths given to Megatron's own schedules.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.layouts import further
from helpers.versions import CASES, patched_copy, run_with_core

from megatron_wlb.runtime.compat import hooks
from megatron_wlb.runtime.compat.source import MegatronSource


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> MegatronSource:
    return patched_copy(MegatronSource.installed(), tmp_path_factory.mktemp("patched"))


def test_patched_core_fits_the_table(patched: MegatronSource) -> None:
    hooks.check(source=patched)


@pytest.mark.parametrize("stock_communicator", [False, further(True)])
def test_patched_core_computes_what_one_process_does(
    patched: MegatronSource, stock_communicator: bool
) -> None:
    run = run_with_core(patched.core_root, stock_communicator=stock_communicator)
    assert Path(run.folder).parents[1] == patched.core_root
    assert run.takes_shape_provider
    assert run.differences == {str(case): [] for case in CASES}
