"""Patch files: exact or nothing, there and back."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_wlb.cli.main import main
from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.compat import patch_files
from megatron_wlb.runtime.compat.patch_files import PatchSeries, blob, has_patches
from megatron_wlb.runtime.compat.source import MegatronSource

P2P = "megatron/core/pipeline_parallel/p2p_communication.py"
SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the patches touch of the installed megatron-core, unpatched."""
    installed = MegatronSource.installed()
    if PatchSeries.of(installed.version).state(installed) != "stock":
        pytest.skip("the installed megatron-core is patched; wlb patch revert")
    for file in (P2P, SCHEDULES, "megatron/core/package_info.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed.core_root / file, tmp_path / file)
    return tmp_path


@pytest.fixture
def series(tree: Path) -> PatchSeries:
    return PatchSeries.of(MegatronSource.at(tree).version)


def contents(tree: Path) -> dict[str, bytes]:
    """Of all files, hidden ones too."""
    files = (path for path in tree.rglob("*") if path.is_file() and ".git/" not in str(path))
    return {str(path.relative_to(tree)): path.read_bytes() for path in files}


def test_apply_and_revert_restores_every_byte(tree: Path, series: PatchSeries) -> None:
    source, stock = MegatronSource.at(tree), contents(tree)
    assert series.state(source) == "stock"
    assert series.apply(source) == (P2P, SCHEDULES)
    assert series.state(source) == "patched"
    assert "shape_provider" in (tree / P2P).read_text()
    assert set(contents(tree)) == set(stock)
    assert series.apply(source) == ()  # nothing to do
    assert series.revert(source) == (P2P, SCHEDULES)
    assert contents(tree) == stock
    assert series.revert(source) == ()


def test_git_missing_is_one_line_and_state_needs_none(
    tree: Path, series: PatchSeries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    source, stock = MegatronSource.at(tree), contents(tree)
    assert series.state(source) == "stock"
    with pytest.raises(CompatibilityError, match=r"^git is not installed, .*; install it"):
        series.apply(source)
    assert contents(tree) == stock


def test_tree_inside_a_repository_is_patched_by_its_own_paths(
    tmp_path: Path, tree: Path, series: PatchSeries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a site-packages in a project: git would leave out what is not named from the top."""
    inner = tmp_path / "project" / "site-packages"
    inner.parent.mkdir()
    shutil.copytree(tree / "megatron", inner / "megatron")
    subprocess.run(["git", "init", "-q"], cwd=inner.parent, check=True)
    (tmp_path / "gitconfig").write_text("[apply]\n\twhitespace = fix\n[core]\n\tautocrlf = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    source, stock = MegatronSource.at(inner), contents(inner)
    assert series.apply(source) == (P2P, SCHEDULES)
    assert series.state(source) == "patched"
    series.revert(source)
    assert contents(inner) == stock


def test_damaged_patch_is_one_line_and_nothing_touched(
    tree: Path, series: PatchSeries, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.patch"
    broken.write_text(series.files[1].patch.read_text().replace("+import", "+imp", 1)[:3000])
    damaged = replace(series, files=(series.files[0], replace(series.files[1], patch=broken)))
    stock = contents(tree)
    with pytest.raises(CompatibilityError, match=r"^git cannot apply the patches: [^\n]*$"):
        damaged.apply(MegatronSource.at(tree))
    assert contents(tree) == stock


def test_mode_is_kept(tree: Path, series: PatchSeries) -> None:
    (tree / P2P).chmod(0o640)
    series.apply(MegatronSource.at(tree))
    assert stat.S_IMODE((tree / P2P).stat().st_mode) == 0o640


@pytest.mark.parametrize("action", ["apply", "revert", "state"])
def test_changed_file_is_refused_and_nothing_touched(
    tree: Path, series: PatchSeries, action: str
) -> None:
    (tree / SCHEDULES).write_bytes((tree / SCHEDULES).read_bytes() + b"\n")
    before = contents(tree)
    with pytest.raises(CompatibilityError, match=r"schedules\.py is neither as megatron-core"):
        getattr(series, action)(MegatronSource.at(tree))
    assert contents(tree) == before


def test_missing_file_is_refused(tree: Path, series: PatchSeries) -> None:
    (tree / P2P).unlink()
    with pytest.raises(CompatibilityError, match=r"cannot read .*p2p_communication\.py"):
        series.apply(MegatronSource.at(tree))


def test_a_version_with_the_files_of_another_has_its_patches() -> None:
    """What the tag core_v0.19.0 calls itself."""
    assert has_patches("0.19.1") and not has_patches("0.19.3")
    assert PatchSeries.of("0.19.1").files == PatchSeries.of("0.19.2").files


def test_unknown_version_is_refused(tree: Path) -> None:
    info = tree / "megatron/core/package_info.py"
    info.write_text(info.read_text().replace("MINOR = 16", "MINOR = 99"))
    with pytest.raises(CompatibilityError, match=r"no patches for megatron-core 0\.99\.1, only"):
        PatchSeries.of(MegatronSource.at(tree).version)


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_half_done_work_is_finished(tree: Path, series: PatchSeries, action: str) -> None:
    """As a run leaves it that was killed between two files."""
    source, stock = MegatronSource.at(tree), contents(tree)
    series.apply(source)
    patched = contents(tree)
    (tree / P2P).write_bytes(stock[P2P])
    assert series.state(source) == "partly patched"
    assert getattr(series, action)(source) == ((P2P,) if action == "apply" else (SCHEDULES,))
    assert contents(tree) == (patched if action == "apply" else stock)


def test_failure_on_the_way_restores_all(
    tree: Path, series: PatchSeries, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, put = contents(tree), os.replace

    def fails_at_the_second(source: Path, target: Path) -> None:
        if target.name == "schedules.py" and "new" in source.parts:
            raise OSError(28, "No space left on device", str(target))
        put(source, target)

    monkeypatch.setattr(patch_files.os, "replace", fails_at_the_second)
    with pytest.raises(CompatibilityError, match="No space left on device; nothing was changed"):
        series.apply(MegatronSource.at(tree))
    assert contents(tree) == before


def test_checkout_with_other_changes_is_refused(tree: Path, series: PatchSeries) -> None:
    (tree / "other file.py").write_text("a = 1\n")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    for command in (
        "init -q",
        "add .",
        "-c user.name=a -c user.email=a@b.c -c commit.gpgsign=false commit -qm a",
    ):
        subprocess.run(["git", *command.split()], cwd=tree, check=True, env=environment)
    source = MegatronSource.at(tree)
    (tree / "other file.py").write_text("a = 2\n")
    for action in (series.apply, series.revert):
        with pytest.raises(CompatibilityError, match=r"not committed, as in other file\.py"):
            action(source)
    (tree / "other file.py").write_text("a = 1\n")
    (tree / "untracked.py").touch()  # nothing that a patch could be mixed up with
    series.apply(source)
    series.revert(source)  # our own changes do not make it dirty


def test_blob_is_gits_name_for_a_content() -> None:
    assert blob(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_command_reports_and_changes(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["patch", "check", str(tree)]) == 0
    assert capsys.readouterr().out.endswith(f"in {tree}: stock\n")
    assert main(["patch", "apply", "--json", str(tree)]) == 0
    out = capsys.readouterr().out
    assert '"state": "patched"' in out and SCHEDULES in out
    assert main(["patch", "revert", str(tree), "--json"]) == 0
    assert '"state": "stock"' in capsys.readouterr().out
    (tree / P2P).write_text("")
    assert main(["patch", "apply", str(tree)]) == 7
    assert "p2p_communication.py is neither" in capsys.readouterr().err
