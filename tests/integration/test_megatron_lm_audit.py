"""Runs of Megatron-LM have a ledger: over kills, other layouts and steps that are left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron_lm_runs import BOTH, LAYOUTS, launch
from trainer_runs import Flags, finish, num_lines, tracked

from megatron_wlb.cli.main import main
from megatron_wlb.planning.ledger.lines import NAME

pytestmark = pytest.mark.launcher

FORMATS: dict[str, Flags] = {"torch_dist": LAYOUTS["dp2"][1] | {"bf16": True}, "torch": {}}


@pytest.mark.parametrize("name", FORMATS)
def test_megatron_lm_run_trains_each_token_once(
    name: str, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed after a step that was not saved; then, where that can be, at half the ranks."""
    flags = BOTH | FORMATS[name] | {"data_path": corpus, "train_iters": 8, "ckpt_format": name}
    flags |= {"wlb_packing": "hold", "wlb_look_ahead": 1, "iterations_to_skip": [1]}
    flags |= {"save": "ck", "load": "ck", "save_interval": 3, "eval_iters": 1, "eval_interval": 4}
    ledger = tmp_path / "ck" / NAME
    run = launch(tmp_path, 2, flags)
    run.wait_until(lambda: tracked(ledger.parent) > 0 and num_lines(ledger) >= 1 + 4)
    run.kill()
    resumed = tracked(ledger.parent)
    finish(launch(tmp_path, 1 if name == "torch_dist" else 2, flags))
    capsys.readouterr()
    assert main(["audit", str(tmp_path / "ck"), "--json", "--replay"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["lost"]["number"], report["twice"]["number"]) == (0, 0)
    assert (report["steps"], report["restarts"], report["proven_until"]) == (8, 1, 8)
    assert report["rolled_back"] >= 4 - resumed
    assert (report["skipped"], report["replayed"]) == (1, 8)
