"""Megatron-LM with weights that torch's FSDP2 shards: one process's steps, saved and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_lm_runs import (
    BOTH,
    assert_equal_steps,
    launch,
    logged,
    validations,
)
from rank_runs import Flags, assert_refused, finish, losses

from megatron_wlb.errors import ConfigError

pytestmark = pytest.mark.launcher

UNTIED: Flags = BOTH | {
    "mock_data": True, "train_iters": 4, "wlb_packing": "hold", "clip_grad": 0.5,
    "untie_embeddings_and_output_weights": True, "seed": 3,
}  # fmt: skip
FSDP2: Flags = {"use_torch_fsdp2": True}


def test_checkpoints_of_sharded_weights_are_those_of_one_process(tmp_path: Path) -> None:
    """Weights and Adam's state go either way, with clipping and an evaluation."""
    flags = UNTIED | {"save_interval": 2, "eval_interval": 2, "eval_iters": 1}
    flags |= {"log_num_zeros_in_grad": True}
    sharded, saved = flags | FSDP2, {"save": "sharded", "wlb_metrics": "two"}
    two = finish(launch(tmp_path, 2, sharded | saved))
    one = finish(launch(tmp_path, 1, flags | {"save": "whole", "wlb_metrics": "one"}))
    assert_equal_steps(tmp_path / "two", tmp_path / "one")
    # Printed as 5.542151E+00. Another order of sums changes the last digit by one.
    sharded_losses, whole_losses = (list(map(float, validations(run))) for run in (two, one))
    assert len(whole_losses) > 1 and sharded_losses == pytest.approx(whole_losses, abs=1.1e-6)
    assert logged(two, "num zeros") == logged(one, "num zeros") != []
    there = {"load": "sharded", "ckpt_step": 2, "wlb_metrics": "there"}
    finish(launch(tmp_path, 1, flags | there))
    assert_equal_steps(tmp_path / "there", tmp_path / "one", first=3)
    back = {"load": "whole", "ckpt_step": 2, "wlb_metrics": "back"}
    finish(launch(tmp_path, 2, sharded | back))
    assert_equal_steps(tmp_path / "back", tmp_path / "one", first=3)


def test_parts_that_cannot_be_saved_are_refused_before_training(tmp_path: Path) -> None:
    flags = UNTIED | FSDP2 | {"global_batch_size": 9, "train_iters": 1, "wlb_metrics": "metrics"}
    refused = launch(tmp_path, 3, flags | {"save": "ck", "save_interval": 1}).wait()
    said = "3 data- and context-parallel ranks do not divide the 256 rows of"
    assert_refused(refused, ConfigError.exit_code, said, "--use-distributed-optimizer instead")
    finish(launch(tmp_path, 3, flags | {"wlb_cost": "measured"}))
    assert len(losses(tmp_path / "metrics")) == 1
