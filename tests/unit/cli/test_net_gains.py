"""Gains are also told net of what stock Megatron may overlap, and plans may not."""

from __future__ import annotations

import json
import shlex

import pytest

from megatron_wlb.cli.main import main

QUICK = (
    "simulate --model 7b --distribution reference --window 16384 --steps 3 --num-seeds 1 "
    "--num-micro-batches 4 --pp-size 2 --packing original,hold"
)


def test_simulate_has_stock_megatron_with_all_that_it_overlaps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(shlex.split(f"{QUICK} --tp-size 4 --json")) == 0
    found = json.loads(capsys.readouterr().out)
    (stock,), (original, hold) = found["overlapped"], found["rows"]
    assert original["speedup"] == 1 < stock["speedup"]
    assert stock["step_tokens"] == original["step_tokens"]
    assert main(shlex.split(f"{QUICK} --tp-size 4")) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert "original with --tp-comm-overlap, which plans turn off: " in said
    assert f"hold {hold['speedup'] / stock['speedup']:.2f}×" in said


def test_nothing_is_net_where_stock_megatron_has_no_more_to_overlap(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(shlex.split(f"{QUICK} --json")) == 0
    assert json.loads(capsys.readouterr().out)["overlapped"] == []
