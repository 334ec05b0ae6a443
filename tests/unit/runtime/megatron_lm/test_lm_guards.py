"""Every flag of Megatron-LM that cannot run with plans is refused with its name and a remedy."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.refusal import Refusal
from megatron_wlb.runtime.megatron_lm import refusals
from megatron_wlb.settings.command_line import megatron_flags, refuse_arguments

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
    "recompute_granularity": None, "eval_interval": 1000, "train_iters": 9, "lr": 1e-3,
}  # fmt: skip

NEEDED: dict[str, dict[str, Any]] = {
    # What else a row counts with, or which value of its own flag.
    "--fp8-format": {"transformer_impl": "local"},
    "--moe-shared-expert-overlap": {"wlb_host_gib": 5.0},
    "--recompute-modules": {
        "recompute_modules": ["mlp"], "recompute_granularity": "selective", "add_bias_linear": True,
    },
    "--no-overlap-p2p-communication": {"overlap_p2p_comm": False},
    "--moe-token-dispatcher-type": {
        "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep",
    },
    "--mlp-chunks-for-training": {"num_experts": 8},
    "--moe-router-load-balancing-type": {
        "moe_router_load_balancing_type": ["seq_aux_loss", "quantile_balancing"]
    },
    "--use-torch-fsdp2": {"num_experts": 8},
    "--hybrid-layer-pattern": {"hybrid_layer_pattern": "D*"},
    "no corpus is given": {"data_path": None},
    "--use-distributed-optimizer": {"bf16": False},
    "--ckpt-step": {"ckpt_format": "torch", "load": "ck"},
    "{f.world_size} processes": {"world_size": 20},
    "--eval-interval is missing": {"eval_interval": None},
    "--tensor-model-parallel-size": {"tensor_model_parallel_size": 0},
    "--pipeline-model-parallel-size": {"pipeline_model_parallel_size": 0},
    "--context-parallel-size": {"context_parallel_size": 0},
    "--loss-scale": {"fp16": True},
    "--initial-loss-scale": {"fp16": True},
    "--lr-decay-style": {"lr_decay_style": "WSD"},
    "nothing says how long": {"train_iters": None},
    "--lr is missing": {"lr": None},
    "--tokenizer-type": {"tokenizer_type": "NullTokenizer"},
}  # fmt: skip
WITH_STRATEGIES = {"wlb_strategies": "auto", "decrease_batch_size_if_needed": False}
OF_MODELOPT = ("--export-kd-teacher-load",)
"""Flags that Megatron's parser has only beside that package."""
ROWS = [(row, {}) for row in refusals.REFUSALS] + [
    (row, WITH_STRATEGIES) for row in refusals.OF_STRATEGIES
]


def lines(given: dict[str, Any]) -> list[str]:
    """What is refused."""
    try:
        refusals.check(argparse.Namespace(**given))
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(("row", "run"), ROWS, ids=lambda one: getattr(one, "name", ""))
def test_each_row_refuses_a_setting_that_no_other_row_refuses(
    row: Refusal[refusals.Given], run: dict[str, Any]
) -> None:
    """The setting is made from the row: a value of its flag, and what that counts with."""
    assert row.reason and row.remedy and row.name in {"", *megatron_flags(), *OF_MODELOPT}
    key = next((text for text in NEEDED if (row.name or row.reason).startswith(text)), "")
    needed = {} if run else NEEDED.get(key, {})
    values = (True, -1, 2, "torch", "another") if row.name else (None,)
    tried = (FINE | run | {refusals.attribute(row.name or "--"): v} | needed for v in values)
    refused = (lines(g) for g in tried if row.line(refusals.Given(argparse.Namespace(**g))))
    (line,) = next(told for told in refused if len(told) == 1)
    assert line.startswith(row.name) and line.endswith(row.remedy)
    assert lines(FINE | run) == []


def test_refusal_names_flag_value_reason_and_remedy() -> None:
    """Golden lines, of each kind of row."""
    known: dict[str, dict[str, Any]] = {
        "--softmax-type learnable does not work with --wlb-packing: packed attention has the plain "
        "softmax; use vanilla": {"softmax_type": "learnable"},
        "--mock-data does not work with --wlb-packing: it stands for a corpus, and one is given; "
        "leave one of them out": {"mock_data": True},
        "no corpus is given; give --data-path with the prefix of a .bin/.idx corpus, or "
        "--mock-data": {"data_path": None},
        "--log-interval 0 does not work with --wlb-packing: Megatron-LM counts or divides by it; "
        "use 1 or more": {"log_interval": 0},
        "20 processes do not divide by TP × PP × CP = 12; start a multiple of that": {
            "world_size": 20
        },
        "--optimizer muon does not work with --wlb-strategies: weights and optimizer state are in "
        "a store that is sharded over all ranks; use adam or sgd": WITH_STRATEGIES
        | {"optimizer": "muon"},
    }
    assert [lines(FINE | given) for given in known.values()] == [[line] for line in known]


def test_what_the_store_does_already_is_turned_off_with_strategies() -> None:
    given = argparse.Namespace(**FINE | {"overlap_grad_reduce": True})
    refusals.turn_off(given)
    assert given.use_distributed_optimizer and given.overlap_grad_reduce
    given.wlb_strategies = "auto"
    refusals.turn_off(given)
    assert not (given.use_distributed_optimizer or given.overlap_grad_reduce)


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
        {"ckpt_step": 2, "load": "ck"},
        {"ckpt_step": 2, "load": "ck", "ckpt_format": "torch", "no_load_optim": True},
        {"eval_interval": None, "train_iters": None, "lr": None, "skip_train": True},
        {"log_interval": 1, "weight_decay": 0.0, "loss_scale": -1, "lr_warmup_fraction": 0.0},
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2},
        {"tokenizer_type": "NullTokenizer", "vocab_size": 255},
        {"defer_embedding_wgrad_compute": True, "sequence_parallel": False},
        # Megatron turns sequence parallelism off.
        {"defer_embedding_wgrad_compute": True, "tensor_model_parallel_size": 1},
    ],
)
def test_what_only_looks_alike_passes(fine: dict[str, Any]) -> None:
    assert lines(FINE | fine) == []


@pytest.mark.parametrize(
    ("given", "packing", "said"),
    [
        ({"defer_embedding_wgrad_compute": True, "sequence_parallel": False}, "hold", None),
        (
            {"defer_embedding_wgrad_compute": True, "sequence_parallel": False}, "slim",
            "^--defer-embedding-wgrad-compute does not .*slices.*; leave it out$",
        ),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "slim", None),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, "slim", None),
    ],
)  # fmt: skip
def test_a_packing_refuses_what_it_cannot_run(
    given: dict[str, Any], packing: str, said: str | None
) -> None:
    own = {"num_virtual_stages_per_pipeline_rank": None, "wlb_packing": packing}
    found = "".join(lines(FINE | own | given))
    assert re.match(said, found) if said else found == ""


WARNED: dict[str, tuple[dict[str, Any], str]] = {
    # What a row counts with, where no value of its flag alone does, and the value in the line.
    "--hierarchical-context-parallel-sizes": (
        {"hierarchical_context_parallel_sizes": [2, 2]}, " 2 2"
    ),
    "--cp-comm-type": ({"cp_comm_type": ["a2a", "p2p"]}, " a2a p2p"),
    "--moe-token-dispatcher-type": (
        {"moe_token_dispatcher_type": "allgather", "num_experts": 8}, " allgather"
    ),
    "--disable-gloo-process-groups": ({"enable_gloo_process_groups": False}, ""),
    "--fp8-format": ({"fp8": "hybrid", "fp8_recipe": "delayed"}, " hybrid"),
    "--hybrid-layer-pattern": (
        {"hybrid_layer_pattern": "M-*-", "fp8": "hybrid", "fp8_recipe": "tensorwise"}, " M-*-"
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", [*refusals.NO_EFFECT, *refusals.TOLD], ids=lambda row: row.name)
def test_each_flag_without_effect_or_at_a_cost_is_one_warning(
    row: Refusal[refusals.Given], caplog: pytest.LogCaptureFixture
) -> None:
    given, shown = WARNED.get(row.name, ({refusals.attribute(row.name): "cyclic"}, " cyclic"))
    if row in refusals.TOLD and row.name == "--moe-token-dispatcher-type":
        given, shown = {"moe_token_dispatcher_type": "flex"}, " flex"
    refusals.check(argparse.Namespace(**FINE | given))
    form = ":" if row in refusals.TOLD else " has no effect with --wlb-packing:"
    assert caplog.messages == [f"{row.name}{shown}{form} {row.reason}; {row.remedy}"]


@pytest.mark.parametrize(
    "given",
    [
        {"cp_comm_type": ["p2p"]},
        {"attention_dropout": 0.0},
        {"enable_gloo_process_groups": True},
        {"fp8": "hybrid", "fp8_recipe": "delayed", "world_size": 12},  # one replica
        {"fp8": "hybrid", "fp8_recipe": "tensorwise", "hybrid_layer_pattern": "*-"},
        {"hybrid_layer_pattern": "G-"},
        {"cuda_graph_impl": "none"},
        {"num_experts": None, "moe_token_dispatcher_type": "allgather"},
        {"num_experts": 8, "moe_token_dispatcher_type": "alltoall"},
        {"dataloader_type": "single"},
    ],
)
def test_what_works_is_no_warning(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    refusals.check(argparse.Namespace(**FINE | given))
    assert not caplog.messages


@pytest.mark.parametrize(("given", "runs"), [("flex", "flex"), ("allgather", "alltoall")])
def test_the_dispatcher_of_deepep_stays(given: str, runs: str) -> None:
    args = argparse.Namespace(moe_token_dispatcher_type=given, num_experts=8)
    refusals.turn_off(args)
    assert args.moe_token_dispatcher_type == runs


def test_flags_that_cannot_run_are_told_at_once() -> None:
    given = FINE | {"use_varlen_dataset": True, "fp4": "e2m1", "world_size": 20, "qk_clip": True}
    with pytest.raises(ConfigError) as raised:
        refusals.check(argparse.Namespace(**given), ["--this is another"])
    told = [line.split()[0] for line in str(raised.value).splitlines()]
    assert told == ["20", "--qk-clip", "--fp4-format", "--use-varlen-dataset", "--this"]


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
