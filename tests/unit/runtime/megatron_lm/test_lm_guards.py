"""Every flag of Megatron-LM that cannot run with plans is refused with its name and a remedy."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.runtime.megatron_lm import refusals
from megatron_wlb.settings.command_line import refuse_arguments

FINE: dict[str, Any] = {
    # What matters of a command line that runs; as Megatron's parser leaves it.
    "data_path": ["corpus"], "data_args_path": None, "train_data_path": None,
    "per_split_data_args_path": None, "attention_dropout": 0.0, "micro_batch_size": 2,
    "decrease_batch_size_if_needed": True,
    "global_batch_size": 16,
    "position_embedding_type": "rope", "softmax_type": "vanilla", "cuda_graph_impl": "none",
    "context_parallel_size": 2, "pipeline_model_parallel_size": 2, "overlap_p2p_comm": True,
    "tensor_model_parallel_size": 3, "world_size": 24,
    "num_layers_per_virtual_pipeline_stage": None, "num_virtual_stages_per_pipeline_rank": 2,
    "transformer_impl": "transformer_engine", "dataloader_type": None, "ckpt_format": "torch_dist",
    "non_persistent_ckpt_type": None, "use_distributed_optimizer": True, "save": "ck",
    "no_save_optim": None, "bf16": True, "fp16": False, "num_experts": None,
    "dist_ckpt_optim_fully_reshardable": False,
    "cpu_offloading_num_layers": 0, "tp_comm_overlap": False,
    "sequence_parallel": True, "defer_embedding_wgrad_compute": False,
    "recompute_granularity": None,
}  # fmt: skip

REFUSED: dict[str, dict[str, Any]] = {
    "--hybrid-override-pattern": {"hybrid_override_pattern": "M*-"},
    "--position-embedding-type": {"position_embedding_type": "mrope"},
    "--softmax-type": {"softmax_type": "learnable"},
    "--transformer-impl": {"transformer_impl": "inference_optimized"},
    "--fp8-format": {"fp8": "hybrid", "transformer_impl": "local"},
    "--fp4-format": {"fp4": "e2m1"},
    "--cpu-offloading-num-layers": {"cpu_offloading_num_layers": 2},
    "--moe-shared-expert-overlap": {"moe_shared_expert_overlap": True, "wlb_host_gib": 5.0},
    "--defer-embedding-wgrad-compute": {"defer_embedding_wgrad_compute": True},
    "--recompute-modules": {
        "recompute_modules": ["mlp"],
        "recompute_granularity": "selective",
        "add_bias_linear": True,
    },
    "--no-overlap-p2p-communication": {"overlap_p2p_comm": False},
    "--moe-token-dispatcher-type": {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "hybridep",
    },
    "--mlp-chunks-for-training": {"mlp_chunks_for_training": 4, "num_experts": 8},
    "--moe-router-load-balancing-type": {
        "moe_router_load_balancing_type": ["seq_aux_loss", "quantile_balancing"]
    },
    "--use-torch-fsdp2": {"use_torch_fsdp2": True, "num_experts": 8},
    "--data-path": {"data_path": None},
    "--mock-data": {"mock_data": True},
    "--use-distributed-optimizer": {"bf16": False},
    "--ckpt-format": {"ckpt_format": "torch_dcp"},
    "--non-persistent-ckpt-type": {"non_persistent_ckpt_type": "local"},
}
"""What refuses a flag. A flag that is refused wherever it is given needs no case."""


WITH_STRATEGIES: dict[str, dict[str, Any]] = {
    "--ckpt-format": {"ckpt_format": "torch"},
    "--optimizer": {"optimizer": "muon"},
    "--step-batch-size-schedule": {"step_batch_size_schedule": "0:2"},
}


@pytest.mark.parametrize("refusal", refusals.OF_STRATEGIES, ids=lambda one: one.flag)
def test_flag_is_refused_with_strategies_alone(refusal: refusals.Refusal) -> None:
    one_size = {"decrease_batch_size_if_needed": False}
    own = WITH_STRATEGIES.get(refusal.flag, {refusal.name: True})
    given = argparse.Namespace(**FINE | one_size | own)
    refusals.check(given)
    given.wlb_strategies = "strategies.yaml"
    with pytest.raises(ConfigError) as raised:
        refusals.check(given)
    assert str(raised.value) == refusal.message(given, "--wlb-strategies")


def test_what_the_store_does_already_is_turned_off_with_strategies() -> None:
    given = argparse.Namespace(**FINE | {"overlap_grad_reduce": True})
    refusals.turn_off(given)
    assert given.use_distributed_optimizer and given.overlap_grad_reduce
    given.wlb_strategies = "auto"
    refusals.turn_off(given)
    assert not (given.use_distributed_optimizer or given.overlap_grad_reduce)


def test_every_condition_has_a_case() -> None:
    conditional = [r.flag for r in refusals.REFUSALS if r.refused is not None or r.allowed]
    assert set(conditional) <= set(REFUSED) <= {r.flag for r in refusals.REFUSALS}


def test_a_command_line_that_runs_passes() -> None:
    refusals.check(argparse.Namespace(**FINE))


@pytest.mark.parametrize("refusal", refusals.REFUSALS, ids=lambda refusal: refusal.flag)
def test_flag_is_refused_with_name_value_and_remedy(refusal: refusals.Refusal) -> None:
    flag = refusal.flag
    given = REFUSED.get(flag, {refusal.name: True})
    with pytest.raises(ConfigError) as raised:
        refusals.check(argparse.Namespace(**FINE | given))
    message = str(raised.value)
    assert message.startswith(flag)
    assert message.endswith(f"{refusal.reason}; {refusal.remedy}")
    assert "\n" not in message
    name, value = next(iter(given.items()))
    if isinstance(value, str | int | float) and not isinstance(value, bool) and value != "ck":
        assert f"{flag} {value} " in message, name


@pytest.mark.parametrize(
    "fine",
    [
        {"pipeline_model_parallel_size": 4, "overlap_p2p_comm": False},
        {"num_virtual_stages_per_pipeline_rank": None, "overlap_p2p_comm": False},
        {"dataloader_type": "single"},
        {
            "wlb_packing": "slim",
            "pipeline_model_parallel_layout": "Ett|tL",
            "num_virtual_stages_per_pipeline_rank": None,
        },
        {"decoder_first_pipeline_num_layers": 3, "account_for_loss_in_pipeline_split": False},
        {"eval_global_batch_size": 16, "eval_micro_batch_size": 2},
        {
            "eval_global_batch_size": 8,
            "global_batch_size": None,
            "step_batch_size_schedule": "0:8 1M:16",
        },
        {"ckpt_format": "torch"},
        {"bf16": False, "dist_ckpt_optim_fully_reshardable": True},
        {"bf16": False, "save": None},
        {"bf16": False, "no_save_optim": True},
        {"data_path": None, "train_data_path": ["corpus"]},
        {"data_path": None, "data_args_path": "paths.txt"},
        {"data_path": None, "mock_data": True},
        {"non_persistent_ckpt_type": "global"},
        {"position_embedding_type": "learned_absolute"},
        {"transformer_impl": "local"},
        {"fp8": "hybrid", "fp8_recipe": "delayed", "recompute_granularity": "full"},
        {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": True, "fp8_output_proj": True},
        {"mlp_chunks_for_training": 4},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"recompute_granularity": "full", "recompute_modules": ["mlp"], "add_bias_linear": True},
        {"mlp_chunks_for_training": 1, "num_experts": 8},
        {"defer_embedding_wgrad_compute": True, "sequence_parallel": False},
        # Megatron turns sequence parallelism off.
        {"defer_embedding_wgrad_compute": True, "tensor_model_parallel_size": 1},
    ],
)
def test_what_only_looks_alike_passes(fine: dict[str, Any]) -> None:
    refusals.check(argparse.Namespace(**FINE | fine))


def test_deferred_gradients_are_refused_where_documents_run_in_slices() -> None:
    given = FINE | {
        "defer_embedding_wgrad_compute": True, "sequence_parallel": False,
        "num_virtual_stages_per_pipeline_rank": None,
    }  # fmt: skip
    refusals.check(argparse.Namespace(**given | {"wlb_packing": "hold"}))
    says = "^--defer-embedding-wgrad-compute does not .*slices.*; leave it out$"
    with pytest.raises(ConfigError, match=says):
        refusals.check(argparse.Namespace(**given | {"wlb_packing": "slim"}))


@pytest.mark.parametrize(
    "given",
    [
        {"fp8_recipe": "tensorwise", "recompute_granularity": "full"},
        {"fp8_recipe": "blockwise", "recompute_granularity": "selective"},
    ],
)
def test_fp8_runs_in_slices_where_scales_depend_on_no_other_replica(given: dict[str, Any]) -> None:
    base = {"fp8": "hybrid", "num_virtual_stages_per_pipeline_rank": None, "wlb_packing": "slim"}
    refusals.check(argparse.Namespace(**FINE | base | given))


def test_no_option_makes_the_torch_format_load_sharded_optimizers_in_fp32() -> None:
    given = {"ckpt_format": "torch", "bf16": False, "dist_ckpt_optim_fully_reshardable": True}
    with pytest.raises(ConfigError, match=r"^--use-distributed-optimizer .* cannot load; add"):
        refusals.check(argparse.Namespace(**FINE | given))


@pytest.mark.parametrize("interval", [None, 0])
def test_a_missing_interval_of_evaluations_is_refused(interval: int | None) -> None:
    """Megatron divides by it, whether it evaluates or not."""
    given = FINE | {"eval_interval": interval, "eval_iters": 0}
    with pytest.raises(ConfigError, match=r"^--eval-interval is missing, .*; add --eval-interval"):
        refusals.check(argparse.Namespace(**given))
    refusals.check(argparse.Namespace(**given | {"skip_train": True}))
    refusals.check(argparse.Namespace(**given | {"eval_interval": 1000}))


def test_a_world_that_the_layout_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^20 processes do not divide by TP × PP × CP = 12;"):
        refusals.check(argparse.Namespace(**FINE | {"world_size": 20}))


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        ({"reset_position_ids": True}, "--reset-position-ids has no effect with --wlb-packing: p"),
        ({"reset_attention_mask": True}, "--reset-attention-mask has no effect"),
        ({"eod_mask_loss": True}, "--eod-mask-loss has no effect"),
        ({"dataloader_type": "cyclic"}, "--dataloader-type cyclic has no effect"),
        (
            {"hierarchical_context_parallel_sizes": [2, 2]},
            "--hierarchical-context-parallel-sizes 2 2 has no effect with --wlb-packing: keys",
        ),
        (
            {"per_dataset_sequences_path": "no-such.json"},
            "--per-dataset-sequences-path no-such.json has no effect with --wlb-packing: every",
        ),
        ({"cp_comm_type": ["a2a", "p2p"]}, "--cp-comm-type a2a p2p has no effect"),
        ({"cp_comm_type": ["a2a"]}, "--cp-comm-type a2a has no effect"),
        ({"cp_comm_type": ["p2p"]}, ""),
        ({"attention_dropout": 0.1}, "--attention-dropout 0.1: the kernels flash-attn-3"),
        ({"attention_dropout": 0.0}, ""),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex: DeepEP"),
        (
            {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True},
            "--moe-token-dispatcher-type flex: DeepEP",
        ),
        ({"enable_gloo_process_groups": False}, "--disable-gloo-process-groups: Megatron makes"),
        ({"enable_gloo_process_groups": True}, ""),
        ({"enable_cuda_graph": True}, "--enable-cuda-graph has no effect"),
        ({"external_cuda_graph": True}, "--external-cuda-graph has no effect"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local has no effect"),
        ({"cuda_graph_impl": "none"}, ""),
        ({"tp_comm_overlap": True}, "--tp-comm-overlap has no effect"),
        ({"ddp_average_in_collective": True}, "--ddp-average-in-collective has no effect"),
        (
            {"num_experts": 8, "moe_token_dispatcher_type": "allgather"},
            "--moe-token-dispatcher-type allgather has no effect with --wlb-packing: it gathers",
        ),
        ({"num_experts": None, "moe_token_dispatcher_type": "allgather"}, ""),
        ({"num_experts": 8, "moe_token_dispatcher_type": "alltoall"}, ""),
        ({"dataloader_type": "single"}, ""),
        (
            {"rampup_batch_size": [2, 2, 9]},
            "--rampup-batch-size 2 2 9 has no effect with --wlb-packing: Megatron-LM ignores it",
        ),
    ],
)
def test_flag_without_effect_is_one_warning(
    given: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    refusals.check(argparse.Namespace(**FINE | given))
    assert len(caplog.messages) == bool(warning)
    assert all(message.startswith(warning) for message in caplog.messages)


@pytest.mark.parametrize(("given", "runs"), [("flex", "flex"), ("allgather", "alltoall")])
def test_the_dispatcher_of_deepep_stays(given: str, runs: str) -> None:
    args = argparse.Namespace(moe_token_dispatcher_type=given, num_experts=8)
    refusals.turn_off(args)
    assert args.moe_token_dispatcher_type == runs


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({}, True),
        ({"world_size": 12}, False),  # one replica
        ({"fp8_recipe": "tensorwise"}, False),
        ({"fp8": None}, False),
    ],
)
def test_delayed_scaling_over_replicas_is_a_warning(
    given: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    refusals.check(argparse.Namespace(**FINE | {"fp8": "hybrid", "fp8_recipe": "delayed"} | given))
    assert ["wait for each other" in message for message in caplog.messages] == [True] * warned


def test_flags_that_cannot_run_are_told_at_once() -> None:
    given = FINE | {"use_varlen_dataset": True, "fp4": "e2m1", "world_size": 20, "qk_clip": True}
    with pytest.raises(ConfigError) as raised:
        refusals.check(argparse.Namespace(**given), ["--this is another"])
    told = [line.split()[0] for line in str(raised.value).splitlines()]
    assert told == ["--qk-clip", "--fp4-format", "--use-varlen-dataset", "20", "--this"]


def test_flags_that_this_version_does_not_have_are_refused_by_name() -> None:
    own = argparse.ArgumentParser()
    own.add_argument("--num-layers")
    words = "--sequence-packing-scheduler dp_balanced --fp8-recipe x --num-layer 2"
    with pytest.raises(ConfigError) as caught:
        refuse_arguments(own, f"unrecognized arguments: {words}", refusals.OF_OTHER_VERSIONS)
    refused, other, mistyped = str(caught.value).splitlines()
    assert refused.startswith("--sequence-packing-scheduler does not work with --wlb-packing: it ")
    assert other.startswith("--fp8-recipe is of another version of Megatron-LM; leave it out")
    assert mistyped == "unknown flag --num-layer; did you mean --num-layers?"
