"""``wlb_state.json``: what was saved, or one line that says what is wrong with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.saving import state_file
from megatron_wlb.runtime.saving.newest import TRACKER, folder_of

STATE = {
    "planner": {"stream": {"document": 17}}, "cost": [1.5], "kernel": "sdpa", "totals": {},
    "settings": {}, "layout": [1, 1, 2],
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The state of a checkpoint after step 7."""
    folder = folder_of(tmp_path, 7)
    state_file.write(folder, 7, STATE)
    (tmp_path / TRACKER).write_text("7\n")
    return folder / state_file.NAME


def test_any_changed_character_is_found(file: Path, tmp_path: Path) -> None:
    text = file.read_text()
    assert json.loads(text)["layout"] == [1, 1, 2]
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert state_file.newest_state(tmp_path) == (7, STATE["planner"])
    for at, character in enumerate(text):
        file.write_text(text[:at] + chr(ord(character) ^ 1) + text[at + 1 :])
        with pytest.raises(CheckpointError, match=r"is damaged: wlb_state.json has crc32 .*, exp"):
            state_file.newest_state(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:40]), "is damaged: .* has crc32"),
        (lambda file: file.write_bytes(b""), "is damaged: .* has crc32 00000000, expected ''"),
        (lambda file: file.write_bytes(b"\xff"), "is damaged: .* cannot be read"),
        (lambda file: state_file.write(file.parent, 6, STATE), "is damaged: .* of iteration 6"),
        (lambda file: state_file.write(file.parent, 7, {}), "is damaged: .* lacks planner, cost"),
        (
            lambda file: state_file.write(file.parent, 7, STATE | {"version": 2}),
            "is of version 2, not 1; go on with the release of megatron-wlb that saved it",
        ),
    ],
)
def test_another_file_is_one_line(
    change: Callable[[Path], object], said: str, file: Path, tmp_path: Path
) -> None:
    change(file)
    with pytest.raises(CheckpointError, match=said):
        state_file.newest_state(tmp_path)


def test_full_disk_is_one_line_and_leaves_the_file_before(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_text()

    def full(_file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*No space left on device; free some"):
        state_file.write(file.parent, 7, STATE | {"kernel": "another"})
    assert file.read_text() == before


def test_state_in_a_store_goes_through_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: str, mode: str) -> object:
        return (tmp_path / path.removeprefix("msc://").replace("/", "-")).open(mode)

    monkeypatch.setitem(sys.modules, "multistorageclient", SimpleNamespace(open=opened))
    state_file.write("msc://ck/iter_0000007", 7, STATE)
    assert state_file.state_of("msc://ck/iter_0000007")["planner"] == STATE["planner"]


@pytest.mark.parametrize("failure", [PermissionError(13, "denied"), RuntimeError("403 denied")])
def test_error_of_a_store_is_one_line_on_all_ranks(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank brings this error to the others, and no other kind."""
    store = SimpleNamespace(open=Mock(side_effect=failure))
    monkeypatch.setitem(sys.modules, "multistorageclient", store)
    for do in (partial(state_file.write, iteration=7, state=STATE), state_file.state_of):
        with pytest.raises(CheckpointError, match=r"msc://ck/iter_0000007.*wlb_state.json.*denied"):
            do("msc://ck/iter_0000007")
