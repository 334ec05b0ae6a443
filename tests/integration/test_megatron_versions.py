"""The ragged pipelines on the other megatron-core versions, where their sources are at hand.

``MEGATRON_CORE_SOURCES`` names a folder with a source tree a version: checkouts, or unpacked wheels
(``pip download --no-deps megatron-core==0.19.2 --python-version 3.12 --only-binary=:all:``, unzip).
Their tables and patches are checked too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.versions import CASES, patched_copy, run_with_core

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.compat import hooks
from megatron_wlb.runtime.compat.source import MegatronSource

VARIABLE = "MEGATRON_CORE_SOURCES"


def sources() -> dict[str, MegatronSource]:
    """By version; of several trees of one version the first."""
    found: dict[str, MegatronSource] = {}
    folder = os.environ.get(VARIABLE)
    for path in sorted(Path(folder).iterdir()) if folder else ():
        try:
            source = MegatronSource.at(path)
        except CompatibilityError:
            continue
        found.setdefault(source.version, source)
    return found


SOURCES = sources()


@pytest.fixture(params=hooks.VERSIONS)
def source(request: pytest.FixtureRequest) -> MegatronSource:
    if request.param not in SOURCES:
        pytest.skip(f"no source of megatron-core {request.param} in {VARIABLE}")
    return SOURCES[request.param]


def test_source_has_every_hook(source: MegatronSource) -> None:
    assert not any(hooks.problems(source).values())
    assert source.has_training


def test_patches_apply(source: MegatronSource, tmp_path: Path) -> None:
    if not hooks.VERSIONS[source.version].tested:
        pytest.skip(f"there are no patches for megatron-core {source.version}")
    hooks.check(source=patched_copy(source, tmp_path))
    for path in (tmp_path / "megatron/core/pipeline_parallel").glob("*.py"):
        compile(path.read_bytes(), path, "exec")


def test_ragged_pipelines_compute_what_one_process_does(source: MegatronSource) -> None:
    run = run_with_core(source.core_root)
    assert (run.version, Path(run.folder).parents[1]) == (source.version, source.core_root)
    assert run.differences == {str(case): [] for case in CASES}
