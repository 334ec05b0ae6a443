"""Megatron-LM trains experts over ranks as the embedded trainer and one process do, and resumes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from megatron_lm_runs import (
    BOTH,
    DP2,
    PP2,
    TP2_SP,
    assert_equal_steps,
    finish,
    launch,
    logged,
    needs_megatron_lm,
)
from trainer_runs import Finished, Flags, losses

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
SMALL_DEEPSEEK = Path(__file__).parents[2] / "configs" / "small" / "deepseek.yaml"
EP2: Flags = {"expert_model_parallel_size": 2}
SLICES: Flags = {"wlb_packing": "slim", "wlb_units": 12, "wlb_slice_multiple": 8}
RECOMPUTED: Flags = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip


def set_weights() -> None:
    """Gives experts the same weights in every layout: Megatron's depend on their rank."""
    sys.path.append(str(Path(__file__).parents[2] / "scripts"))
    importlib.import_module("_run_recipes.inside")._set_weights(False)


def auxiliary(finished: Finished) -> list[tuple[str, str]]:
    names = ("seq_load_balancing_loss", "z_loss")
    return list(zip(*(logged(finished, name) for name in names), strict=True))


def test_experts_over_ranks_train_as_in_one_process(tmp_path: Path, corpus: Path) -> None:
    flags = BOTH | EXPERTS | {"data_path": corpus, "train_iters": 3}
    alone = finish(launch(tmp_path, 1, flags | {"wlb_metrics": "alone"}, fault=set_weights))
    assert len(auxiliary(alone)) == 3
    # Whole experts on ranks that divide all else.
    layout = TP2_SP | {"expert_tensor_parallel_size": 1, "wlb_metrics": "whole"}
    finish(launch(tmp_path, 2, flags | layout, fault=set_weights))
    assert_equal_steps(tmp_path / "whole", tmp_path / "alone")
    layout = EP2 | PP2 | {"recompute_granularity": "selective", "recompute_modules": "moe"}
    flags |= layout | {"wlb_metrics": "layout"}
    found = finish(launch(tmp_path, 4, flags, fault=set_weights))
    assert_equal_steps(tmp_path / "layout", tmp_path / "alone")
    assert "--moe-token-dispatcher-type allgather has no effect" in found.output
    for ours, theirs in zip(auxiliary(found), auxiliary(alone), strict=True):
        assert [float(n) for n in ours] == pytest.approx([float(n) for n in theirs], rel=1e-5)


def test_experts_resume_to_the_bit_and_over_other_ranks(tmp_path: Path, corpus: Path) -> None:
    flags = BOTH | EXPERTS | DP2 | {"data_path": corpus, "train_iters": 6, "bf16": True}
    flags |= {"dist_ckpt_optim_fully_reshardable": True}
    saving: Flags = {"save": "ck", "save_interval": 3, "wlb_metrics": "plain"}
    finish(launch(tmp_path, 2, flags | EP2 | saving))
    expected = {n: loss for n, loss in losses(tmp_path / "plain").items() if n > 3}
    assert list(expected) == [4, 5, 6]
    flags |= {"load": "ck", "ckpt_step": 3}
    finish(launch(tmp_path, 2, flags | EP2 | {"wlb_metrics": "resumed"}))
    assert losses(tmp_path / "resumed") == expected

    # Megatron saves streams of random numbers for each rank of experts.
    flags |= {"expert_model_parallel_size": 4, "no_load_rng": True, "wlb_metrics": "other"}
    finish(launch(tmp_path, 4, flags))
    found = losses(tmp_path / "other")
    assert found[4] == pytest.approx(expected[4], rel=1e-4)  # the same weights, and biases
    assert found == pytest.approx(expected, rel=1e-2)  # bf16, where routing is a choice

    # At EP 1 Megatron has one optimizer for experts and all else, and two otherwise.
    flags |= {"expert_model_parallel_size": None, "no_load_optim": True, "train_iters": 4}
    finish(launch(tmp_path, 2, flags | {"wlb_metrics": "undivided"}))
    (found_4,) = losses(tmp_path / "undivided").values()
    assert found_4 == pytest.approx(expected[4], rel=1e-4)


@pytest.mark.long
def test_slices_that_replicas_run_alike_resume_to_the_bit(tmp_path: Path, corpus: Path) -> None:
    flags = BOTH | EXPERTS | SLICES | EP2 | PP2 | DP2 | {"data_path": corpus, "train_iters": 4}
    flags |= {"bf16": True, "wlb_units": None}
    saving: Flags = {"save": "ck", "save_interval": 2, "wlb_metrics": "plain"}
    finish(launch(tmp_path, 4, flags | saving))
    expected = {n: loss for n, loss in losses(tmp_path / "plain").items() if n > 2}
    again: Flags = {"load": "ck", "ckpt_step": 2, "wlb_metrics": "resumed"}
    finish(launch(tmp_path, 4, flags | again))
    assert losses(tmp_path / "resumed") == expected and list(expected) == [3, 4]


@pytest.mark.long
def test_small_deepseek_resumes_to_the_bit(tmp_path: Path, corpus: Path) -> None:
    """Latents, prediction and experts, over EP 2 × PP 2, in bf16."""
    flags: Flags = {"wlb_config": SMALL_DEEPSEEK, "data_path": corpus, "train_iters": 4}
    flags |= PP2 | DP2 | {"log_interval": 1, "global_batch_size": 8}
    flags |= {"lr_decay_style": "constant", "split": "80,15,5"}
    saving: Flags = {"save": "ck", "save_interval": 2, "wlb_metrics": "plain"}
    plain = finish(launch(tmp_path, 4, flags | saving))
    again: Flags = {"load": "ck", "ckpt_step": 2, "wlb_metrics": "resumed"}
    resumed = finish(launch(tmp_path, 4, flags | again))
    expected = {n: loss for n, loss in losses(tmp_path / "plain").items() if n > 2}
    assert list(expected) == [3, 4]
    assert losses(tmp_path / "resumed") == expected
    for name in ("seq_load_balancing_loss", "mtp_1 loss"):
        # Megatron counts the first figure of a run in the second again.
        assert logged(resumed, name)[0] == logged(plain, name)[2]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(PP2, id="over-replicas"),
        pytest.param(
            PP2 | TP2_SP | {"expert_tensor_parallel_size": 1} | RECOMPUTED,
            id="in-a-replica",
            marks=pytest.mark.long,
        ),
    ],
)
def test_slices_with_experts_train_as_in_one_process(
    tmp_path: Path, corpus: Path, layout: Flags
) -> None:
    """Documents are cut elsewhere where other ranks share the work: they count as a whole."""
    flags = BOTH | EXPERTS | SLICES | {"data_path": corpus, "train_iters": 3}
    alone = finish(launch(tmp_path, 1, flags | {"wlb_metrics": "alone"}, fault=set_weights))
    flags |= EP2 | layout | {"wlb_metrics": "layout", "wlb_hang_seconds": 30}
    found = finish(launch(tmp_path, 4, flags, fault=set_weights))
    assert_equal_steps(tmp_path / "layout", tmp_path / "alone")
    for ours, theirs in zip(auxiliary(found), auxiliary(alone), strict=True):
        assert [float(n) for n in ours] == pytest.approx([float(n) for n in theirs], rel=1e-5)
