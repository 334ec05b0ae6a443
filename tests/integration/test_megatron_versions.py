"""The ragged pipelines on the other megatron-core versions, where their sources are at hand.

``MEGATRON_CORE_SOURCES`` names a folder with a source tree a version: checkouts, or unpacked wheels
(``pip download --no-deps megatron-core==0.19.2 --python-version 3.12 --only-binary=:all:``, unzip).
Their tables and patches are checked too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
from helpers.versions import CASES, run_with_core

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.compat import targets
from megatron_wlb.runtime.compat.patch_files import PatchSeries, has_patches
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


@pytest.fixture(params=targets.VERSIONS)
def source(request: pytest.FixtureRequest) -> MegatronSource:
    if request.param not in SOURCES:
        pytest.skip(f"no source of megatron-core {request.param} in {VARIABLE}")
    return SOURCES[request.param]


def test_source_has_every_hook(source: MegatronSource) -> None:
    assert not any(targets.problems(source).values())
    assert source.version == "0.16.1" or source.has_training


def test_patches_apply_and_revert(source: MegatronSource, tmp_path: Path) -> None:
    if not has_patches(source.version):
        pytest.skip(f"there are no patches for megatron-core {source.version}")
    series = PatchSeries.of(source.version)
    for file in series.files:
        copy = tmp_path / file.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.core_root / file.path, copy)
    shutil.copy(
        source.core_root / "megatron/core/package_info.py",
        tmp_path / "megatron/core/package_info.py",
    )
    stock = {file.path: (tmp_path / file.path).read_bytes() for file in series.files}
    copied = MegatronSource.at(tmp_path)
    series.apply(copied)
    assert series.state(copied) == "patched"
    for path, content in stock.items():
        patched = (tmp_path / path).read_bytes()
        assert patched != content
        compile(patched, path, "exec")
    series.revert(copied)
    assert {path: (tmp_path / path).read_bytes() for path in stock} == stock


def test_ragged_pipelines_compute_what_one_process_does(source: MegatronSource) -> None:
    if targets.needs_triton(source.version) and importlib.util.find_spec("triton") is None:
        pytest.skip(f"megatron-core {source.version} imports triton, which is not installed")
    run = run_with_core(source.core_root)
    assert (run.version, Path(run.folder).parents[1]) == (source.version, source.core_root)
    assert run.differences == {str(case): [] for case in CASES}
