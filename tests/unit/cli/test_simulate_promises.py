"""What `wlb simulate` promises, training takes: over models, layouts and packings, at random."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_wlb.cli.main import main
from megatron_wlb.cost.memory import GIB
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning import guards
from megatron_wlb.planning.from_config import max_tokens, run_of
from megatron_wlb.planning.from_words import settings_of
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.slicing.cut import Slicer

DENSE: dict[str, Any] = {
    "num_layers": 8, "hidden_size": 512, "ffn_hidden_size": 1024, "num_attention_heads": 8,
    "swiglu": True, "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope", "bf16": True, "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 256,
    "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
}  # fmt: skip
LATENTS = {
    "multi_latent_attention": True, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32, "v_head_dim": 64, "qk_layernorm": True, "rope_type": "rope",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "grouped": DENSE | {"group_query_attention": True, "num_query_groups": 2},
    "experts": DENSE | EXPERTS,
    "deepseek": DENSE | EXPERTS | LATENTS | {"mtp_num_layers": 1},
}
WINDOW = 8192


def case_of(seed: int) -> tuple[dict[str, Any], dict[str, int], str, int]:
    """A model's settings, its layout, a packing, and N of a data-parallel rank."""
    draw = random.Random(seed)
    layout = {
        "tp": draw.choice((1, 2, 4)), "cp": draw.choice((1, 1, 2)), "pp": draw.choice((1, 2, 4)),
        "vpp": 1, "dp": draw.choice((1, 2, 4)), "ep": 1, "etp": 1,
    }  # fmt: skip
    if layout["pp"] > 1 or draw.random() < 0.1:
        layout["vpp"] = draw.choice((1, 2))
    name = draw.choice([*MODELS])
    settings = dict(MODELS[name])
    if "num_experts" in settings:
        layout |= {"ep": draw.choice((1, 2, 4)), "etp": draw.choice((1, layout["tp"]))}
    if draw.random() < 0.3:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform",
                     "recompute_num_layers": 1}  # fmt: skip
    settings["wlb_memory_gib"] = draw.choice((None, 0.1, 0.2, 0.4))
    packing = draw.choice(("original", "hold", "wlb", "slim", "slim"))
    return settings, layout, packing, draw.choice((2, 4, 6))


def promises(settings: dict[str, Any], layout: dict[str, int], packing: str, num: int,
             folder: Path, capsys: pytest.CaptureFixture[str]) -> bool:  # fmt: skip
    path = folder / "model.yaml"
    given = {name: value for name, value in settings.items() if value is not None}
    path.write_text(yaml.safe_dump(given | {"vocab_size": 1024}))
    words = [
        "simulate", "--distribution", "reference", "--model", str(path), "--window", str(WINDOW),
        "--num-micro-batches", str(num * layout["dp"]), "--packing", packing, "--steps", "1",
        "--num-seeds", "1", "--sharding", "per-document" if layout["cp"] > 1 else "per-sequence",
        "--json",
    ]  # fmt: skip
    for name, size in layout.items():
        if name not in ("ep", "etp") or "num_experts" in settings:
            words += [f"--{name}-size", str(size)]
    if main(words):
        return False
    rows = json.loads(capsys.readouterr().out)["rows"]
    again = settings.get("recompute_granularity", "none")  # `original` may need more to fit
    kept = (row for row in rows if (row["packing"], row["recompute"]) == (packing, again))
    return any(not row["out_of_memory"] for row in kept)


def training_refuses(
    settings: dict[str, Any], layout: dict[str, int], packing: str, num: int
) -> list[str]:
    world = layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"]
    more: dict[str, Any] = {
        "tensor_model_parallel_size": layout["tp"], "context_parallel_size": layout["cp"],
        "pipeline_model_parallel_size": layout["pp"], "seq_length": WINDOW,
        "max_position_embeddings": WINDOW, "global_batch_size": num * layout["dp"],
        "micro_batch_size": 1, "sequence_parallel": layout["tp"] > 1, "mock_data": True,
        "use_distributed_optimizer": True, "wlb_packing": packing, "vocab_size": 1024,
        "overlap_grad_reduce": True, "distributed_backend": "nccl",
    }  # fmt: skip
    if layout["vpp"] > 1:
        more["num_virtual_stages_per_pipeline_rank"] = layout["vpp"]
    if "num_experts" in settings:
        more |= {"expert_model_parallel_size": layout["ep"],
                 "expert_tensor_parallel_size": layout["etp"]}  # fmt: skip
    words: list[str] = []
    for name, value in (settings | more).items():
        if value is not False and value is not None:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    config = settings_of(words)
    found = list(guards.refusals(config, world))
    try:
        run = run_of(config, 1024, layout["dp"])
        setting = PackingSettings.of_config(config.wlb, max_tokens(config, run))
        workload = run.workload(LengthSource.of_distribution("reference"), seed=1)
        planner = workload.planner(setting, 1, costs=run.costs)
        planner.next_plan()
        if isinstance(planner.slicing, Slicer) and run.memory_gib:
            needed_gib = planner.slicing.peak_bytes / GIB
            if needed_gib > run.memory_gib:
                found.append(f"needs {needed_gib:.2f} GiB")
    except ConfigError as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_training_takes_what_is_promised(
    first: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = refused = 0
    for seed in range(first, first + 20):
        case = case_of(seed)
        found = training_refuses(*case)
        promised = promises(*case, tmp_path, capsys)
        assert promised == (not found), (case, found)
        kept, refused = kept + promised, refused + bool(found)
    assert kept >= 5 and refused >= 1
