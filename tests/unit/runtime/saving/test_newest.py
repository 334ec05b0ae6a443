from __future__ import annotations

from pathlib import Path

import pytest

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.saving.newest import TRACKER, latest


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
    (tmp_path / TRACKER).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        latest(tmp_path)
