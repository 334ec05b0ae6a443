"""Megatron-LM trains experts over ranks as the embedded trainer and one process do, and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_lm_runs import (
    BOTH,
    PP2,
    TP2_SP,
    assert_equal_steps,
    finish,
    launch,
    logged,
    needs_megatron_lm,
)
from trainer_runs import Flags, losses

pytestmark = needs_megatron_lm

EXPERTS: Flags = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
    "moe_router_dtype": "fp32",
    "disable_bias_linear": True,
    "wlb_packing": "hold",
}
EP2: Flags = {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}


def auxiliary(finished) -> list[tuple[str, str]]:
    names = ("seq_load_balancing_loss", "z_loss")
    return list(zip(*(logged(finished, name) for name in names), strict=True))


def test_experts_over_ranks_train_as_in_one_process(tmp_path: Path, corpus: Path) -> None:
    flags = BOTH | EXPERTS | {"data_path": corpus, "train_iters": 3}
    alone = finish(launch(tmp_path, 1, flags | {"wlb_metrics": "alone"}))
    assert len(auxiliary(alone)) == 3
    for name, num_processes, layout in (
        ("ep2", 2, EP2),
        ("pp2", 4, EP2 | PP2 | {"recompute_granularity": "selective", "recompute_modules": "moe"}),
        ("tp2", 2, TP2_SP | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    ):
        found = finish(launch(tmp_path, num_processes, flags | layout | {"wlb_metrics": name}))
        assert_equal_steps(tmp_path / name, tmp_path / "alone")
        assert "--moe-token-dispatcher-type allgather has no effect" in found.output
        for ours, theirs in zip(auxiliary(found), auxiliary(alone), strict=True):
            assert [float(n) for n in ours] == pytest.approx([float(n) for n in theirs], rel=1e-5)


def test_experts_resume_to_the_bit_and_over_other_ranks(tmp_path: Path, corpus: Path) -> None:
    flags = BOTH | EXPERTS | {"data_path": corpus, "train_iters": 6, "bf16": True}
    finish(launch(tmp_path, 2, flags | EP2 | {"wlb_metrics": "plain"}))
    flags |= {"load": "ck", "save_interval": 3, "ckpt_format": "torch_dist"}
    finish(launch(tmp_path, 2, flags | EP2 | {"save": "ck", "exit_interval": 3}))
    finish(launch(tmp_path, 2, flags | EP2 | {"wlb_metrics": "resumed"}))
    expected = losses(tmp_path / "plain")
    assert losses(tmp_path / "resumed") == {n: expected[n] for n in (4, 5, 6)}

    other = {"use_distributed_optimizer": True, "wlb_metrics": "other"}  # EP 1
    finish(launch(tmp_path, 2, flags | other))
    found = losses(tmp_path / "other")
    assert found == pytest.approx({n: expected[n] for n in (4, 5, 6)}, rel=1e-2)
    assert found[4] == pytest.approx(expected[4], rel=1e-4)
