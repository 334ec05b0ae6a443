"""A checkpoint that does not fit, is damaged, or finds no room: one line, and the others stay."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hostile import OWNED, make_hostile
from helpers.layouts import further, some_of
from torch.distributed.checkpoint import FileSystemReader
from trainer_runs import TINY, TRACKER, Flags, assert_refused, finish, losses, start

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.saving import checksums


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, Flags]:
    """A folder of checkpoints, and the flags of the run that left them."""
    folder = tmp_path_factory.mktemp("saved")
    flags = TINY | {"pipeline_model_parallel_size": 2} | {"data_path": corpus}
    finish(start(folder, 2, flags | {"save": "ck", "save_interval": 2}))
    return folder / "ck", flags


@pytest.fixture
def copied(saved: tuple[Path, Flags], tmp_path: Path) -> tuple[Path, Flags]:
    folder, flags = saved
    shutil.copytree(folder, tmp_path / "ck")
    return tmp_path / "ck", flags | {"load": "ck"}


def test_resume_with_the_same_settings_works(copied: tuple[Path, Flags], tmp_path: Path) -> None:
    """Positive control of the cases below."""
    finished = finish(start(tmp_path, 2, copied[1]))
    assert "resumed after iteration 4" in finished.output
    assert "other settings" not in finished.output


def test_resume_with_settings_that_may_change_says_which(
    copied: tuple[Path, Flags], tmp_path: Path
) -> None:
    changed: Flags = {"wlb_max_age": 3, "clip_grad": 0.5, "hidden_dropout": 0.25}
    finished = finish(start(tmp_path, 2, copied[1] | changed | {"wlb_hold_tau": 1.5}))
    (line,) = [line for line in finished.output.splitlines() if "other settings" in line]
    said = line.partition("from here on: ")[2].split("; ")
    assert sorted(said) == [
        "--clip-grad 1.0 there, 0.5 here",
        "--hidden-dropout 0.0 there, 0.25 here",
        "--wlb-hold-tau 1.0 there, 1.5 here",
        "--wlb-max-age 12 there, 3 here",
    ]


OTHER_RUNS: dict[str, tuple[int, Flags, list[str]]] = {
    "layout": (
        2,
        {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 2},
        ["--tensor-model-parallel-size 1 there, 2 here; --pipeline-model-parallel-size 2"],
    ),
    "vpp": (
        2,
        {"num_virtual_stages_per_pipeline_rank": 2},
        ["--num-virtual-stages-per-pipeline-rank None there, 2 here"],
    ),
    "world": (4, {}, ["processes 2 there, 4 here"]),
    "gbs": (2, {"global_batch_size": 8}, ["--global-batch-size 4 there, 8 here"]),
    "window": (2, {"seq_length": 128}, [": --seq-length 256 there, 128 here;"]),
    "seed": (2, {"seed": 4321}, ["seed 1234 there and 4321 here"]),
    "packing": (2, {"wlb_packing": "wlb"}, ["hold", "wlb"]),
    "split": (2, {"split": "1"}, ["corpora"]),
    "hidden-size": (2, {"hidden_size": 32}, [": --hidden-size 16 there, 32 here;"]),
    "norm": (2, {"normalization": "RMSNorm"}, ["--normalization LayerNorm there, RMSNorm here"]),
    "heads": (2, {"num_attention_heads": 4}, [": --num-attention-heads 2 there, 4 here;"]),
    "vocabulary": (2, {"vocab_size": 300}, ["padded vocabulary 256 there, 384 here"]),
    "precision": (2, {"bf16": True}, ["--bf16 False there, True here"]),
    "optimizer": (2, {"optimizer": "sgd"}, ["--optimizer adam there, sgd here"]),
    # Megatron would go on with the rate of the checkpoint, which has reached 0.
    "learning-rate": (2, {"lr": 0.5}, ["--lr 0.001 there, 0.5 here"]),
    "longer-decay": (2, {"train_iters": 8}, [": --train-iters 4 there, 8 here;"]),
}


@pytest.mark.parametrize("name", some_of(OTHER_RUNS, "window", "split", "heads", "longer-decay"))
def test_resume_of_another_run_is_one_line(
    name: str, copied: tuple[Path, Flags], tmp_path: Path
) -> None:
    num_processes, flags, fragments = OTHER_RUNS[name]
    finished = start(tmp_path, num_processes, copied[1] | flags).wait()
    assert_refused(finished, CheckpointError.exit_code, *fragments, "resume with")


def test_a_folder_to_load_that_does_not_exist_is_one_line(corpus: Path, tmp_path: Path) -> None:
    flags = TINY | {"data_path": corpus, "load": "nowhere", "save": "ck"}
    finished = start(tmp_path, 2, flags).wait()
    assert_refused(finished, CheckpointError.exit_code, "--load nowhere does not exist", "give")
    assert not (tmp_path / "ck").exists()


def test_resume_on_another_corpus_is_one_line(
    copied: tuple[Path, Flags], tmp_path: Path, code_corpora: list[Path]
) -> None:
    finished = start(tmp_path, 2, copied[1] | {"data_path": code_corpora[1]}).wait()
    assert_refused(
        finished,
        CheckpointError.exit_code,
        f" of {code_corpora[1]} there",
        "resume with the same corpora",
    )


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


TRACKERS: dict[str, tuple[str, list[str]]] = {
    "missing-iteration": ("7", ["iteration 7", "iter_0000007 does not exist", "write the number"]),
    "empty": ("", ["holds ''", "write the number"]),
    "text": ("release", ["holds 'release'", "write the number"]),
    "not-utf8": ("\udcff\udcfe", ["cannot read", "write the number"]),
}


@pytest.mark.parametrize("name", some_of(TRACKERS, "missing-iteration", "not-utf8"))
def test_bad_tracker_is_one_line(name: str, copied: tuple[Path, Flags], tmp_path: Path) -> None:
    folder, flags = copied
    text, fragments = TRACKERS[name]
    tracker = folder / TRACKER
    tracker.write_bytes(text.encode(errors="surrogateescape"))
    finished = start(tmp_path, 2, flags).wait()
    assert_refused(finished, CheckpointError.exit_code, str(tracker.name), *fragments)


def flip(path: Path, at: int | None = None) -> None:
    """One bit, in the middle if not told where."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 0x40
    path.write_bytes(content)


def flip_weight(folder: Path) -> None:
    """The highest bit of a mantissa in the middle of the word embeddings."""
    places = FileSystemReader(folder).read_metadata().storage_data
    place = next(v for k, v in places.items() if k.fqn.endswith("word_embeddings.weight"))
    flip(folder / place.relative_path, place.offset + place.length // 8 * 4 + 2)


REMEDY = f"write 2 into ck/{TRACKER}"
"""The way to go on that an error must name."""

KINDS = ["common.pt", "metadata.json", ".metadata", "__0_0.distcp", "__1_1.distcp"]


@pytest.mark.parametrize("name", some_of([*KINDS, checksums.NAME], "__1_1.distcp"))
def test_flipped_bit_is_one_line_that_names_file_and_checksums(
    name: str, copied: tuple[Path, Flags], tmp_path: Path
) -> None:
    folder, flags = copied
    path = folder / "iter_0000004" / name
    before = zlib.crc32(path.read_bytes())
    flip(path)
    fragments = [f"ck/iter_0000004 is damaged: {name} has crc32 ", "expected ", REMEDY]
    if name != checksums.NAME:
        fragments += [f"has crc32 {zlib.crc32(path.read_bytes()):08x}", f"crc32 {before:08x} of"]
    finished = start(tmp_path, 2, flags).wait()
    assert_refused(finished, CheckpointError.exit_code, *fragments)


@pytest.mark.long
def test_checkpoint_of_data_parallel_ranks_is_verified(
    saved: tuple[Path, Flags], tmp_path: Path
) -> None:
    flags = saved[1] | {"pipeline_model_parallel_size": 1, "use_distributed_optimizer": True}
    flags |= {"save": "ck", "load": "ck", "save_interval": 2}
    finish(start(tmp_path, 2, flags | {"exit_interval": 2}))
    folder = tmp_path / "ck" / "iter_0000002"
    listed = {line.split(" ", 2)[2] for line in listed_in(folder)}
    assert listed == {path.name for path in folder.iterdir()} - {checksums.NAME}
    flip(folder / "__1_0.distcp")
    finished = start(tmp_path, 2, flags).wait()
    fragments = ["damaged: __1_0.distcp has crc32", "there is no checkpoint before it in ck"]
    assert_refused(finished, CheckpointError.exit_code, *fragments)


def listed_in(folder: Path) -> list[str]:
    return (folder / checksums.NAME).read_text().splitlines()[1:]


@pytest.mark.long
def test_checkpoint_that_lost_its_checksums_is_one_line(
    copied: tuple[Path, Flags], tmp_path: Path
) -> None:
    folder, flags = copied
    (folder / "iter_0000004" / checksums.NAME).unlink()
    finished = start(tmp_path, 2, flags).wait()
    assert_refused(finished, CheckpointError.exit_code, f"its {checksums.NAME} is missing", REMEDY)


def test_checkpoint_of_before_there_were_checksums_loads_and_the_log_says_so(
    copied: tuple[Path, Flags], tmp_path: Path
) -> None:
    folder, flags = copied
    common = folder / "iter_0000004" / "common.pt"
    content = torch.load(common, weights_only=False)
    assert content["common"].pop("checksums")
    content["common"]["planner"] = content["common"]["planner"].partition("\n")[2]  # bare JSON
    torch.save(content, common)
    (common.parent / checksums.NAME).unlink()
    finished = finish(start(tmp_path, 2, flags))
    assert finished.output.count("are not verified: it has no wlb_checksums.txt") == 1
    assert "resumed after iteration 4" in finished.output


def test_flipped_weight_trains_on_without_checksums(
    copied: tuple[Path, Flags], tmp_path: Path
) -> None:
    """What the checksums are for, and that the flag turns them off."""
    folder, flags = copied
    (folder / TRACKER).write_text("2\n")
    plain = start(tmp_path, 2, flags | {"wlb_metrics": "plain"}).wait()
    assert plain.output.count("verified ck/iter_0000002: 7 files") == 1, plain.output
    flags |= {"wlb_no_checksums": True, "save": "ck", "wlb_metrics": "flipped"}
    flip_weight(folder / "iter_0000002")
    finished = finish(start(tmp_path, 2, flags))
    assert finished.output.count("are not verified: --wlb-no-checksums") == 1
    expected, found = losses(tmp_path / "plain"), losses(tmp_path / "flipped")
    assert found.keys() == expected.keys() == {3, 4}
    assert found != expected
    assert not (folder / "iter_0000004" / checksums.NAME).exists(), "none are saved either"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("common.pt", halve),
        further("common.pt", Path.unlink),
        ("metadata.json", empty),
        further("__0_0.distcp", Path.unlink),
        ("__1_1.distcp", halve),
        further("__1_1.distcp", empty),
    ],
)
def test_damage_without_checksums_is_one_line_and_the_checkpoint_before_loads(
    name: str, damage: Callable[[Path], None], copied: tuple[Path, Flags], tmp_path: Path
) -> None:
    folder, flags = copied
    flags |= {"wlb_no_checksums": True}
    damage(folder / "iter_0000004" / name)
    finished = start(tmp_path, 2, flags).wait()
    assert_refused(finished, CheckpointError.exit_code, "ck/iter_0000004", "damaged", REMEDY)

    (folder / TRACKER).write_text("2\n")  # what the line says
    finished = finish(start(tmp_path, 2, flags))
    assert "resumed after iteration 2" in finished.output


@pytest.mark.parametrize("place", [".metadata", ".distcp"])
def test_code_of_a_checkpoint_does_not_run(
    place: str, copied: tuple[Path, Flags], tmp_path: Path
) -> None:
    folder, flags = copied
    make_hostile(folder / "iter_0000004", place)
    finished = start(tmp_path, 2, flags | {"wlb_no_checksums": True}).wait()
    assert not (tmp_path / OWNED).exists()
    assert_refused(finished, CheckpointError.exit_code, "'os.makedirs'", "may run code", REMEDY)


def die_in_the_middle_of_the_checksums() -> None:
    """Rank 0, at step 4, when half of them are written."""
    write = checksums._write

    def dying(folder: Path, contents: Any) -> None:
        if "iter_0000004" in str(folder):
            (folder / f"{checksums.NAME}.partial").write_text("crc32 0")
            os.kill(os.getpid(), signal.SIGKILL)
        write(folder, contents)

    checksums._write = dying


@pytest.mark.long
def test_kill_while_checksums_are_written_leaves_the_checkpoint_before(
    saved: tuple[Path, Flags], tmp_path: Path
) -> None:
    flags = saved[1] | {"save": "ck", "load": "ck", "save_interval": 2, "wlb_metrics": "metrics"}
    finished = start(tmp_path, 2, flags, fault=die_in_the_middle_of_the_checksums).wait()
    assert finished.code == -signal.SIGKILL, finished.output
    assert (tmp_path / "ck" / TRACKER).read_text() == "2\n"
    assert (tmp_path / "ck" / "iter_0000004" / "metadata.json").exists(), "killed too early"
    before = losses(tmp_path / "metrics")
    finished = finish(start(tmp_path, 2, flags))
    assert "resumed after iteration 2" in finished.output
    assert losses(tmp_path / "metrics") == before
    assert len(listed_in(tmp_path / "ck" / "iter_0000004")) == 7


def test_load_of_a_file_is_one_line(copied: tuple[Path, Flags], tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("weights")
    finished = start(tmp_path, 2, copied[1] | {"load": "model.pt"}).wait()
    assert_refused(finished, CheckpointError.exit_code, "model.pt is not a folder", "--save")


# No room. The checkpoint before must stay in force, and what was written of the new one must go.


def no_room_at_step_4() -> None:
    """The disk seems to be full once there is a checkpoint."""
    usage = shutil.disk_usage

    def measured(path: Any) -> Any:
        found = usage(path)
        return found._replace(free=1000) if "iter_0000004" in str(path) else found

    shutil.disk_usage = measured


def full_disk_at_step_4() -> None:
    """Rank 0 alone cannot write; the other one is in Megatron's save meanwhile."""
    from megatron.core import dist_checkpointing

    save = dist_checkpointing.save

    def failing(state: Any, folder: str, **options: Any) -> None:
        if "iter_0000004" in folder and os.environ["RANK"] == "0":
            Path(folder, "half").write_text("of it")
            raise OSError(28, os.strerror(28))
        save(state, folder, **options)

    dist_checkpointing.save = failing


@pytest.mark.parametrize(
    ("fault", "fragments"),
    [
        (no_room_at_step_4, ["0.001 MB free", "may take", "free some room"]),
        further(full_disk_at_step_4, ["No space left", "free some room", "another folder"]),
    ],
)
def test_full_disk_at_save_ends_with_one_line_and_keeps_the_checkpoint_before(
    fault: Callable[[], None], fragments: list[str], saved: tuple[Path, Flags], tmp_path: Path
) -> None:
    flags = saved[1] | {"save": "ck", "load": "ck", "save_interval": 2, "wlb_metrics": "metrics"}
    finished = start(tmp_path, 2, flags, fault=fault).wait()
    assert_refused(finished, CheckpointError.exit_code, "ck", *fragments)
    names = sorted(path.name for path in (tmp_path / "ck").iterdir())
    assert names == ["iter_0000002", TRACKER, "wlb_ledger.txt"]

    before = losses(tmp_path / "metrics")
    finished = finish(start(tmp_path, 2, flags))
    assert "resumed after iteration 2" in finished.output
    assert losses(tmp_path / "metrics") == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 900 kB: there is room for a checkpoint and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(disk)]
    try:
        subprocess.run(options, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_disk_that_fills_up_in_a_save_keeps_the_checkpoint_before(
    small_disk: Path, saved: tuple[Path, Flags], tmp_path: Path
) -> None:
    """The real thing: the tensors would fit, and what is written around them does not."""
    flags = saved[1] | {"save": "disk/ck", "load": "disk/ck", "save_interval": 2}
    finished = start(tmp_path, 2, flags).wait()
    assert_refused(finished, CheckpointError.exit_code, "disk/ck", "free some room")
    names = sorted(path.name for path in (small_disk / "ck").iterdir())
    assert names == ["iter_0000002", TRACKER, "wlb_ledger.txt"]
    finished = finish(start(tmp_path, 2, flags | {"save": None, "save_interval": None}))
    assert "resumed after iteration 2" in finished.output


def test_save_over_another_run_is_refused(copied: tuple[Path, Flags], tmp_path: Path) -> None:
    folder, flags = copied
    tracker = folder / TRACKER
    before = tracker.read_text()
    finished = start(
        tmp_path, 2, {k: v for k, v in flags.items() if k != "load"} | {"save": "ck"}
    ).wait()
    assert_refused(finished, CheckpointError.exit_code, "--save ck holds", "--load ck")
    assert tracker.read_text() == before
