"""Megatron-LM on plans whose micro-batches stand for several windows."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_lm_runs import (
    BOTH,
    LAYOUTS,
    assert_equal_steps,
    launch,
    logged,
    validations,
)
from rank_runs import Flags, assert_refused, finish

from megatron_wlb.errors import CheckpointError

pytestmark = pytest.mark.launcher

NUM_STEPS = 4
TWO: Flags = BOTH | {"micro_batch_size": 2, "train_iters": NUM_STEPS}


def test_two_windows_in_a_row_train_as_two_rows(corpus: Path, tmp_path: Path) -> None:
    """`original` cuts at each window, inside a row too: the same pieces, so the same step."""
    flags = TWO | {"data_path": corpus, "wlb_packing": "original"}
    single = finish(launch(tmp_path, 1, flags | {"micro_batch_size": 1, "wlb_metrics": "single"}))
    saved: Flags = {"save": "ck", "save_interval": 4, "wlb_metrics": "double"}
    double = finish(launch(tmp_path, 1, flags | saved))
    assert_equal_steps(tmp_path / "double", tmp_path / "single")
    for figure in ("consumed samples", "learning rate", "global batch size"):
        assert logged(double, figure) == logged(single, figure)
    assert logged(double, "consumed samples") == ["8", "16", "24", "32"]
    other = launch(tmp_path, 1, flags | {"load": "ck", "micro_batch_size": 1}).wait()
    assert_refused(other, CheckpointError.exit_code, "4 micro-batches", "--micro-batch-size")


def test_evaluations_have_batches_of_their_own(corpus: Path, tmp_path: Path) -> None:
    """Two steps of half as many windows are the documents of one step, wherever they run."""
    flags = BOTH | {"data_path": corpus, "train_iters": 1, "wlb_packing": "hold"}
    flags |= {"eval_interval": 1, "eval_iters": 2, "split": "50,50,0"}
    halves = flags | {"eval_global_batch_size": 4, "eval_micro_batch_size": 2}
    whole = validations(finish(launch(tmp_path, 1, flags | {"eval_iters": 1})))
    half = validations(finish(launch(tmp_path, 1, halves)))
    both = validations(finish(launch(tmp_path, 2, halves | LAYOUTS["dp2"][1])))
    assert half and float(half[0]) == pytest.approx(float(whole[0]), rel=1e-6)
    assert list(map(float, both)) == pytest.approx(list(map(float, half)), rel=1e-5)
