"""Megatron-LM resumes experts over the same ranks, and over others."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_lm_runs import BOTH, DP2, EXPERTS, launch
from rank_runs import Flags, finish, losses

pytestmark = pytest.mark.launcher

EP2: Flags = {"expert_model_parallel_size": 2}


def test_experts_resume_to_the_bit_and_over_other_ranks(tmp_path: Path, corpus: Path) -> None:
    flags = BOTH | EXPERTS | DP2 | {"data_path": corpus, "train_iters": 6, "bf16": True}
    flags |= {"wlb_packing": "hold", "dist_ckpt_optim_fully_reshardable": True}
    saving: Flags = {"save": "ck", "save_interval": 3, "wlb_metrics": "plain"}
    found = finish(launch(tmp_path, 2, flags | EP2 | saving))
    assert "--moe-token-dispatcher-type allgather has no effect" in found.output
    expected = {n: loss for n, loss in losses(tmp_path / "plain").items() if n > 3}
    assert list(expected) == [4, 5, 6]
    flags |= {"load": "ck", "ckpt_step": 3}
    finish(launch(tmp_path, 2, flags | EP2 | {"wlb_metrics": "resumed"}))
    assert losses(tmp_path / "resumed") == expected

    # Megatron saves streams of random numbers for each rank of experts.
    flags |= {"expert_model_parallel_size": 4, "no_load_rng": True, "wlb_metrics": "other"}
    finish(launch(tmp_path, 4, flags))
    other = losses(tmp_path / "other")
    assert other[4] == pytest.approx(expected[4], rel=1e-4)  # the same weights, and biases
    assert other == pytest.approx(expected, rel=1e-2)  # bf16, where routing is a choice

    # At EP 1 Megatron has one optimizer for experts and all else, and two otherwise.
    flags |= {"expert_model_parallel_size": None, "no_load_optim": True, "train_iters": 4}
    finish(launch(tmp_path, 2, flags | {"wlb_metrics": "undivided"}))
    (found_4,) = losses(tmp_path / "undivided").values()
    assert found_4 == pytest.approx(expected[4], rel=1e-4)
