"""What ``wlb audit`` prints, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.long_soak import soak_of

from megatron_wlb.errors import CheckpointError
from megatron_wlb.planning.ledger.lines import NAME, read, seal
from megatron_wlb.planning.ledger.writer import StepLedger


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The ledger of a run that never saved."""
    planner, ledger = soak_of("hold", False, 1).planner(), StepLedger(tmp_path)
    ledger.start(0, planner)
    for plan in planner.plans(5):
        ledger.step(plan)
    ledger.close()
    return tmp_path


def test_audit_says_what_it_cannot_know(folder: Path, wlb) -> None:
    with (folder / NAME).open("ab") as stream:
        stream.write(b"torn")
    out, err = wlb("audit", folder)
    assert "waiting    not known: there is no checkpoint\n" in out
    assert "steps      5 (1 to 5), 0 restarts" in out
    assert err.startswith("note: the last line is torn")


def test_audit_names_what_is_wrong_and_fails(folder: Path, wlb) -> None:
    lines = [line.values for line in read(folder / NAME) if line is not None]
    (folder / NAME).write_bytes(b"".join(map(seal, [*lines[:3], lines[2], *lines[4:]])))
    out = wlb("audit", folder, status=CheckpointError.exit_code).out.splitlines()
    at = next(number for number, line in enumerate(out) if line.startswith("lost "))
    assert out[at : at + 2] == ["lost       1", "           the line of step 3"]
    assert out[at + 2].startswith("twice      ")
    assert out[at + 3].endswith("from token 0 on: ran in step 2, ran in step 2")
    assert len(out) - at == 3 + 5 + 1
    assert out[-1].strip() == "and more"


def test_audit_without_a_ledger_says_which_folder_to_give(tmp_path: Path, wlb) -> None:
    error = wlb.refusal("audit", tmp_path, status=CheckpointError.exit_code)
    assert "give the folder of a --save" in error
