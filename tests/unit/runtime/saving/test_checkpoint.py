from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.gloo import GlooPool

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.saving.newest import latest
from megatron_wlb.settings.config import Config

# Cases, run in a process that has Megatron under the CPU emulation.


def events_of_putting_in_force(root: str, failing: str) -> list[str]:
    """What reaches the disk in which order; an OSError at the file ``failing``."""
    from megatron_wlb.runtime.saving import checkpoint, newest

    folder = newest.folder_of(root, 12)
    folder.mkdir(parents=True)
    for name in ("common.pt", "__0_0.distcp", ".metadata"):
        (folder / name).write_text(name)
    (Path(root) / newest.TRACKER).write_text("8\n")
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        if name == failing:
            raise OSError(5, "Input/output error")
        events.append(name)
        fsync(descriptor)

    def recorded_replace(source: Path, target: Path) -> None:
        events.append(f"{source.name} > {target.name}: {source.read_text().strip()}")
        replace(source, target)

    os.fsync, os.replace = recorded_fsync, recorded_replace  # type: ignore[assignment]
    try:
        checkpoint._put_in_force(folder, 12)
    except OSError as error:
        events.append(str(error))
    finally:
        os.fsync, os.replace = fsync, replace
    return events


TRACKER = "latest_checkpointed_iteration"


def test_checkpoint_is_on_disk_before_the_tracker_names_it(gloo: GlooPool, tmp_path: Path) -> None:
    (events,) = gloo.run(1, events_of_putting_in_force, str(tmp_path), "")
    at = events.index(f"{TRACKER}.partial > {TRACKER}.txt: 12")
    written = {"common.pt", "__0_0.distcp", ".metadata", "iter_0000012", f"{TRACKER}.partial"}
    assert set(events[:at]) == written
    assert events[at + 1 :] == [tmp_path.name]
    assert latest(tmp_path) == 12


@pytest.mark.parametrize("failing", ["__0_0.distcp", f"{TRACKER}.partial"])
def test_file_that_does_not_reach_the_disk_leaves_the_tracker(
    failing: str, gloo: GlooPool, tmp_path: Path
) -> None:
    (events,) = gloo.run(1, events_of_putting_in_force, str(tmp_path), failing)
    assert "Input/output error" in events[-1]
    assert (tmp_path / f"{TRACKER}.txt").read_text() == "8\n"


def test_folders_that_cannot_be_synced_are_no_error(gloo: GlooPool, tmp_path: Path) -> None:
    """Some network file systems have none of it."""
    (events,) = gloo.run(1, events_of_putting_in_force, str(tmp_path), "iter_0000012")
    assert events[-1] == tmp_path.name
    assert latest(tmp_path) == 12


def test_folder_without_checkpoints_has_no_latest_one(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("9\n", "names iteration 9, but .*iter_0000009 does not exist"),
        ("nine\n", "holds 'nine', not an iteration"),
        ("-1\n", "holds '-1'"),
        ("²\n", "holds '²'"),
        ("", "holds ''"),
    ],
)
def test_tracker_that_names_no_checkpoint_is_refused(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / f"{TRACKER}.txt").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        latest(tmp_path)


def require_same(saved: dict[str, object], now: dict[str, object]) -> None:
    from megatron_wlb.runtime.saving import checkpoint

    checkpoint._require_same_settings("ck", saved, now, {}, Config())


def test_checkpoint_of_before_a_setting_existed_had_its_default(gloo: GlooPool) -> None:
    now = {"num_layers": 4, "use_rope_scaling": False}
    gloo.run(1, require_same, {"num_layers": 4}, now)
    with pytest.raises(CheckpointError, match="--use-rope-scaling False there, True here"):
        gloo.run(1, require_same, {"num_layers": 4}, now | {"use_rope_scaling": True})
