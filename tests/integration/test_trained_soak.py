"""The short form of a soak that trains slices: nothing is left of a step."""

from __future__ import annotations

import json
from pathlib import Path

from trainer_runs import start


def soak(_argv: list[str]) -> int:
    from helpers.trained_soak import train

    trained = train(40)
    print("soak:", json.dumps(trained.flat() | {"refusal": trained.refusal()}), flush=True)
    return 0


def test_trained_slices_leave_no_tensor_and_no_key(tmp_path: Path) -> None:
    finished = start(tmp_path, 1, {}, program=soak).wait()
    assert finished.code == 0, finished.output
    (line,) = (line for line in finished.output.splitlines() if line.startswith("soak: "))
    figures = json.loads(line.removeprefix("soak: "))
    assert figures["slices"] > 20, figures
    assert figures["refusal"] == "", figures
