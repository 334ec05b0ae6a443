"""Checkpoints that Megatron-LM saves under the launcher: verified before any of them is loaded."""

from __future__ import annotations

import os
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.hostile import OWNED, make_hostile
from helpers.layouts import further
from megatron_lm_runs import BOTH, DP2, PP2, launch
from rank_runs import TRACKER, Flags, assert_refused, finish, losses

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.saving import checksums, state_file
from megatron_wlb.runtime.saving.state_file import NAME

pytestmark = pytest.mark.launcher

NUM_STEPS = 4
REMEDY = f"write 2 into ck/{TRACKER}"
RUNS: dict[str, tuple[Flags, list[str]]] = {
    "pp2-torch_dist": (PP2, [NAME, "common.pt", "__0_0.distcp", ".metadata", "__1_1.distcp"]),
    "dp2-torch": (
        DP2 | {"ckpt_format": "torch", "bf16": True},
        [NAME, "mp_rank_00/model_optim_rng.pt", "mp_rank_00/distrib_optim.pt"],
    ),
}
"""Settings, and kinds of files: no ``common.pt`` from Megatron-LM 0.19 on."""


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def listed_in(folder: Path) -> set[str]:
    lines = (folder / checksums.NAME).read_text().splitlines()
    return {line.split(" ", 2)[2] for line in lines[1:]}


def files_of(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {checksums.NAME}


@pytest.fixture(scope="module", params=RUNS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: Path
) -> tuple[Path, Flags, list[str]]:
    """A folder with checkpoints after steps 2 and 4, the flags, the kinds of files."""
    folder = tmp_path_factory.mktemp("saved")
    layout, kinds = RUNS[request.param]
    flags = BOTH | layout | {"data_path": corpus, "train_iters": NUM_STEPS, "wlb_packing": "hold"}
    saving = {"save": "ck", "save_interval": 2, "wlb_metrics": "metrics"}
    finish(launch(folder, 2, flags | saving))
    kinds = [kind for kind in kinds if (folder / "ck" / "iter_0000004" / kind).exists()]
    return folder, flags | {"load": "ck"}, kinds


def test_every_file_is_verified_and_a_flipped_bit_is_one_line(
    saved: tuple[Path, Flags, list[str]], tmp_path: Path
) -> None:
    folder, flags, kinds = saved
    newest = folder / "ck" / "iter_0000004"
    assert listed_in(newest) == files_of(newest) >= set(kinds)
    for kind in kinds:
        shutil.copytree(folder / "ck", tmp_path / "ck")
        path = tmp_path / "ck" / "iter_0000004" / kind
        before = f"{zlib.crc32(path.read_bytes()):08x}"
        flip(path)
        finished = launch(tmp_path, 2, flags).wait()
        fragments = [
            f"ck/iter_0000004 is damaged: {path.name} has crc32 "
            f"{zlib.crc32(path.read_bytes()):08x} of",
            f"expected crc32 {before} of",
            REMEDY,
        ]
        assert_refused(finished, CheckpointError.exit_code, *fragments)
        (tmp_path / "ck" / TRACKER).write_text("2")  # what the line says
        if kind == kinds[0]:
            finished = finish(launch(tmp_path, 2, flags | {"wlb_metrics": "again"}))
            assert finished.output.count("verified ck/iter_0000002: ") == 1
            expected = losses(folder / "metrics")
            assert losses(tmp_path / "again") == {step: expected[step] for step in (3, 4)}
        shutil.rmtree(tmp_path / "ck")


@pytest.mark.parametrize("saved", ["pp2-torch_dist"], indirect=True)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.unlink(), f"ck/iter_0000004 has no packing state ({NAME})"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), f"{NAME} has crc32"),
        (lambda path: shutil.copy(path.parent.parent / "iter_0000002" / NAME, path),
         f"{NAME} is of iteration 2"),
    ],
    ids=["missing", "cut", "of another iteration"],
)  # fmt: skip
def test_planners_state_is_verified_even_without_checksums_of_files(
    change: Callable[[Path], object],
    said: str,
    saved: tuple[Path, Flags, list[str]],
    tmp_path: Path,
) -> None:
    folder, flags, _ = saved
    shutil.copytree(folder / "ck", tmp_path / "ck")
    change(tmp_path / "ck" / "iter_0000004" / NAME)
    finished = launch(tmp_path, 2, flags | {"wlb_no_checksums": True}).wait()
    remedy = "--finetune" if "no packing" in said else REMEDY
    assert_refused(finished, CheckpointError.exit_code, said, remedy)


@pytest.mark.parametrize("saved", ["dp2-torch"], indirect=True)
def test_state_of_another_save_than_the_weights_is_refused(
    saved: tuple[Path, Flags, list[str]], tmp_path: Path
) -> None:
    """As a crash leaves them in the middle of a save over an older one: the state comes first."""
    folder, flags, _ = saved
    shutil.copytree(folder / "ck", tmp_path / "ck")
    newest = tmp_path / "ck" / "iter_0000004"
    state_file.write(newest, 4, state_file.state_of(newest) | {"kernel": "another"})
    finished = launch(tmp_path, 2, flags | {"wlb_no_checksums": True}).wait()
    said = f"ck/iter_0000004 is damaged: its weights are of another save than {NAME}"
    assert_refused(finished, CheckpointError.exit_code, said, REMEDY)


def test_checkpoint_that_lost_its_checksums(
    saved: tuple[Path, Flags, list[str]], tmp_path: Path
) -> None:
    """In `torch` they come after Megatron's tracker: a kill may leave it without, and it loads."""
    folder, flags, _ = saved
    shutil.copytree(folder / "ck", tmp_path / "ck")
    (tmp_path / "ck" / "iter_0000004" / checksums.NAME).unlink()
    run = launch(tmp_path, 2, flags)
    if flags.get("ckpt_format") == "torch":
        finished = finish(run)
        assert finished.output.count("are not verified: it has no wlb_checksums.txt") == 1
    else:
        fragments = [f"its {checksums.NAME} is missing", REMEDY]
        assert_refused(run.wait(), CheckpointError.exit_code, *fragments)


@pytest.mark.parametrize("saved", ["pp2-torch_dist"], indirect=True)
@pytest.mark.parametrize("place", [".metadata", ".distcp"])
def test_code_of_a_checkpoint_does_not_run(
    place: str, saved: tuple[Path, Flags, list[str]], tmp_path: Path
) -> None:
    folder, flags, _ = saved
    shutil.copytree(folder / "ck", tmp_path / "ck")
    make_hostile(tmp_path / "ck" / "iter_0000004", place)
    finished = launch(tmp_path, 2, flags | {"wlb_no_checksums": True}).wait()
    assert not (tmp_path / OWNED).exists()
    assert_refused(finished, CheckpointError.exit_code, "'os.makedirs'", "may run code", REMEDY)


def die_before_the_checksums() -> None:
    """Rank 0, at step 4, when the files are written."""
    write = checksums._write

    def dying(folder: Path, contents: Any) -> None:
        if "iter_0000004" in str(folder):
            os.kill(os.getpid(), signal.SIGKILL)
        write(folder, contents)

    checksums._write = dying


@pytest.mark.parametrize("async_save", [False, further(True)], ids=["sync", "async"])
def test_kill_before_the_checksums_are_written_leaves_the_checkpoint_before(
    async_save: bool, corpus: Path, tmp_path: Path
) -> None:
    """So Megatron never names a checkpoint its latest that has none."""
    flags = BOTH | DP2 | {"data_path": corpus, "train_iters": NUM_STEPS, "wlb_packing": "hold"}
    flags |= {"bf16": True, "save": "ck", "load": "ck", "save_interval": 2, "wlb_metrics": "steps"}
    flags |= {"async_save": async_save}
    finished = launch(tmp_path, 2, flags, fault=die_before_the_checksums).wait()
    assert finished.code == -signal.SIGKILL, finished.output
    assert (tmp_path / "ck" / TRACKER).read_text() == "2"
    assert (tmp_path / "ck" / "iter_0000004" / "metadata.json").exists(), "killed too early"
    before = losses(tmp_path / "steps")
    finished = finish(launch(tmp_path, 2, flags))
    assert finished.output.count("verified ck/iter_0000002: ") == 1
    assert losses(tmp_path / "steps") == before
    folder = tmp_path / "ck" / "iter_0000004"
    assert listed_in(folder) == files_of(folder) and (tmp_path / "ck" / TRACKER).read_text() == "4"
