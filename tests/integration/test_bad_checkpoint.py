"""A checkpoint that does not fit, is damaged, or finds no room: one line, and the others stay.

What checksums find is in ``test_megatron_lm_checksums.py``.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.layouts import some_of
from megatron_lm_runs import BOTH, PP2, launch
from rank_runs import TRACKER, Flags, assert_refused, finish, losses
from torch.distributed.checkpoint import FileSystemReader

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.saving import checksums

pytestmark = pytest.mark.launcher

RUN: Flags = BOTH | PP2 | {"train_iters": 4, "wlb_packing": "hold"}
SAVING: Flags = {"save": "ck", "load": "ck", "save_interval": 2, "wlb_metrics": "metrics"}
REMEDY = f"write 2 into ck/{TRACKER}"
"""The way to go on that an error must name."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, Flags]:
    """A folder of checkpoints after steps 2 and 4, and the flags of the run that left them."""
    folder = tmp_path_factory.mktemp("saved")
    flags = RUN | {"data_path": corpus}
    finish(launch(folder, 2, flags | SAVING | {"load": None}))
    return folder, flags


@pytest.fixture
def copied(saved: tuple[Path, Flags], tmp_path: Path) -> tuple[Path, Flags]:
    folder, flags = saved
    shutil.copytree(folder / "ck", tmp_path / "ck")
    return tmp_path / "ck", flags | {"load": "ck"}


def test_settings_that_may_change_are_told(copied: tuple[Path, Flags], tmp_path: Path) -> None:
    flags = copied[1] | {"ckpt_step": 2, "clip_grad": 0.5, "wlb_max_age": 3, "wlb_hold_tau": 1.5}
    finished = finish(launch(tmp_path, 2, flags))
    (line,) = [line for line in finished.output.splitlines() if "other settings" in line]
    said = line.partition("from here on: ")[2].split("; ")
    assert sorted(said) == [
        "--wlb-hold-tau 1.0 there, 1.5 here",
        "--wlb-max-age 12 there, 3 here",
    ]


TRACKERS: dict[str, tuple[str, list[str]]] = {
    "missing-iteration": ("7", ["iteration 7", "iter_0000007 does not exist", "write the number"]),
    "empty": ("", ["holds ''", "write the number"]),
    "text": ("newest", ["holds 'newest'", "write the number"]),
    "not-utf8": ("\udcff\udcfe", ["cannot read", "write the number"]),
}


@pytest.mark.parametrize("name", some_of(TRACKERS, "missing-iteration", "not-utf8"))
def test_bad_tracker_is_one_line(name: str, copied: tuple[Path, Flags], tmp_path: Path) -> None:
    folder, flags = copied
    text, fragments = TRACKERS[name]
    (folder / TRACKER).write_bytes(text.encode(errors="surrogateescape"))
    finished = launch(tmp_path, 2, flags).wait()
    assert_refused(finished, CheckpointError.exit_code, TRACKER, *fragments)


def flip_weight(folder: Path) -> None:
    """Flips the highest bit of a mantissa in the middle of the word embeddings."""
    places = FileSystemReader(folder).read_metadata().storage_data
    place = next(v for k, v in places.items() if k.fqn.endswith("word_embeddings.weight"))
    path = folder / place.relative_path
    content = bytearray(path.read_bytes())
    content[place.offset + place.length // 8 * 4 + 2] ^= 0x40
    path.write_bytes(content)


def test_flipped_weight_trains_on_without_checksums(
    copied: tuple[Path, Flags], saved: tuple[Path, Flags], tmp_path: Path
) -> None:
    """What the checksums are for, and that the flag turns them off."""
    folder, flags = copied
    (folder / TRACKER).write_text("2")
    flip_weight(folder / "iter_0000002")
    finished = finish(launch(tmp_path, 2, flags | SAVING | {"wlb_no_checksums": True}))
    assert finished.output.count("are not verified: --wlb-no-checksums") == 1
    found, expected = losses(tmp_path / "metrics"), losses(saved[0] / "metrics")
    assert [*found] == [3, 4]
    assert found != {step: expected[step] for step in found}
    assert not (folder / "iter_0000004" / checksums.NAME).exists(), "none are saved either"


@pytest.mark.parametrize(
    ("name", "said"), [(".metadata", "cannot be read"), ("__0_0.distcp", "bytes, expected ")]
)
def test_damage_without_checksums_is_one_line_and_the_checkpoint_before_loads(
    name: str, said: str, copied: tuple[Path, Flags], tmp_path: Path
) -> None:
    folder, flags = copied
    flags |= {"wlb_no_checksums": True}
    path = folder / "iter_0000004" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    finished = launch(tmp_path, 2, flags).wait()
    fragments = [f"ck/iter_0000004 is damaged: {name} ", said, REMEDY]
    assert_refused(finished, CheckpointError.exit_code, *fragments)

    (folder / TRACKER).write_text("2")  # what the line says
    finish(launch(tmp_path, 2, flags | {"wlb_metrics": "metrics"}))
    assert [*losses(tmp_path / "metrics")] == [3, 4]


# No room. The checkpoint before must stay in force, and what was written of the new one must go.


def full_disk_at_step_4() -> None:
    """Rank 0 alone cannot write; the other one is in Megatron's save meanwhile."""
    from megatron.core import dist_checkpointing

    save = dist_checkpointing.save

    def failing(state: Any, folder: str, *args: Any, **options: Any) -> Any:
        if "iter_0000004" in folder and os.environ["RANK"] == "0":
            Path(folder, "half").write_text("of it")
            raise OSError(28, os.strerror(28))
        return save(state, folder, *args, **options)

    dist_checkpointing.save = failing


def test_full_disk_at_save_ends_with_one_line_and_keeps_the_checkpoint_before(
    saved: tuple[Path, Flags], tmp_path: Path
) -> None:
    flags = saved[1] | SAVING
    finished = launch(tmp_path, 2, flags, fault=full_disk_at_step_4).wait()
    fragments = ["ck", "No space left", "free some room", "another folder"]
    assert_refused(finished, CheckpointError.exit_code, *fragments)
    assert (tmp_path / "ck" / TRACKER).read_text() == "2"

    before = losses(tmp_path / "metrics")
    finish(launch(tmp_path, 2, flags))
    assert losses(tmp_path / "metrics") == before == losses(saved[0] / "metrics")
