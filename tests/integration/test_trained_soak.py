"""The short form of a soak that trains slices: nothing is left of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_runs import finish, start

pytestmark = [pytest.mark.launcher, pytest.mark.own_script]


def soak(_argv: list[str]) -> int:
    from helpers.trained_soak import train

    trained = train(40)
    Path("soak.json").write_text(json.dumps(trained.flat() | {"refusal": trained.refusal()}))
    return 0


def test_trained_slices_leave_no_tensor_and_no_key(tmp_path: Path) -> None:
    finish(start(tmp_path, 1, {}, program=soak))
    figures = json.loads((tmp_path / "soak.json").read_text())
    assert figures["slices"] > 20, figures
    assert figures["refusal"] == "", figures
