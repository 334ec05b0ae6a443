"""Every command that advises says the same of one model, layout, machine and documents."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_wlb.cli import inputs
from megatron_wlb.planning.from_words import settings_of_script
from megatron_wlb.settings.recipe import read_recipe
from megatron_wlb.simulator import forecast as forecasts
from megatron_wlb.simulator.choose import choose_packing
from megatron_wlb.simulator.trial import Steps
from megatron_wlb.study import tune as tuning

COMMON = {
    "normalization": "RMSNorm", "swiglu": True, "disable-bias-linear": True, "bf16": True,
    "untie-embeddings-and-output-weights": True, "position-embedding-type": "rope",
    "use-distributed-optimizer": True, "overlap-grad-reduce": True, "sequence-parallel": True,
    "micro-batch-size": 1, "max-position-embeddings": 131072, "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
}  # fmt: skip
EXPERTS = {
    "moe-token-dispatcher-type": "alltoall", "moe-grouped-gemm": True,
    "expert-tensor-parallel-size": 1, "moe-router-load-balancing-type": "aux_loss",
    "moe-aux-loss-coeff": 0.001,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "num-layers": 32, "hidden-size": 4096, "ffn-hidden-size": 14336,
        "num-attention-heads": 32, "group-query-attention": True, "num-query-groups": 8,
        "vocab-size": 128256, "rotary-base": 500000, "seq-length": 65536, "global-batch-size": 8,
        "tensor-model-parallel-size": 4, "context-parallel-size": 2,
        "pipeline-model-parallel-size": 4,
    },
    "llama-3-70b": {
        "num-layers": 80, "hidden-size": 8192, "ffn-hidden-size": 28672,
        "num-attention-heads": 64, "group-query-attention": True, "num-query-groups": 8,
        "vocab-size": 128256, "seq-length": 65536, "global-batch-size": 8,
        "tensor-model-parallel-size": 8, "context-parallel-size": 2,
        "pipeline-model-parallel-size": 4, "num-virtual-stages-per-pipeline-rank": 2,
        "recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1,
    },
    "qwen3-30b-a3b": EXPERTS | {
        "num-layers": 48, "hidden-size": 2048, "ffn-hidden-size": 6144,
        "num-attention-heads": 32, "group-query-attention": True, "num-query-groups": 4,
        "kv-channels": 128, "qk-layernorm": True, "vocab-size": 151936, "num-experts": 128,
        "moe-router-topk": 8, "moe-ffn-hidden-size": 768, "seq-length": 32768,
        "global-batch-size": 16, "tensor-model-parallel-size": 2,
        "context-parallel-size": 1, "pipeline-model-parallel-size": 2,
        "expert-model-parallel-size": 8,
    },
    "deepseek-v3": EXPERTS | {
        "num-layers": 61, "hidden-size": 7168, "ffn-hidden-size": 18432,
        "num-attention-heads": 128, "multi-latent-attention": True, "q-lora-rank": 1536,
        "kv-lora-rank": 512, "qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128,
        "rope-type": "rope", "qk-layernorm": True, "vocab-size": 129280, "num-experts": 256,
        "moe-router-topk": 8, "moe-ffn-hidden-size": 2048, "moe-layer-freq": "([0]*3+[1]*58)",
        "moe-shared-expert-intermediate-size": 2048, "seq-length": 32768,
        "global-batch-size": 32, "tensor-model-parallel-size": 8,
        "pipeline-model-parallel-size": 16, "expert-model-parallel-size": 16,
        "recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1,
    },
}  # fmt: skip
DEVICES = {"llama-3-8b": 32, "llama-3-70b": 64, "qwen3-30b-a3b": 32, "deepseek-v3": 256}
DOCUMENTS = "--distribution reference --steps 2"


@pytest.fixture(autouse=True)
def few(wlb, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps of each, and few settings to tune."""
    monkeypatch.setattr(inputs, "WARM_UP_STEPS", 2)
    monkeypatch.setattr(forecasts, "Steps", functools.partial(Steps, num=2, warm_up=2))
    for name, values in (("DELAY_PRICES", (0.3,)), ("TAUS", (1.0,)), ("NUM_REFINED", 0)):
        monkeypatch.setattr(tuning, name, values)


def written(model: str, **more: Any) -> str:
    """The name of a recipe of a model."""
    path = Path(f"{model}.yaml")
    arguments = {f"--{name}": value for name, value in (COMMON | MODELS[model] | more).items()}
    machine = {"NUM_NODES": DEVICES[model] // 8, "GPUS_PER_NODE": 8}
    path.write_text(yaml.safe_dump({"ENV_VARS": machine, "MODEL_ARGS": arguments}))
    return str(path)


def forecast_of(path: str, packing: str) -> dict[str, Any]:
    recipe = read_recipe(path, {})
    config = settings_of_script([*recipe.arguments, "--wlb-packing", packing])
    return forecasts.forecast(config, recipe.num_nodes * recipe.devices_per_node)


def figures(row: dict[str, Any]) -> tuple[float, ...]:
    names = "speedup", "net_speedup", "step_ms", "mfu", "peak_gib", "imbalance_mean", "delay_mean"
    return tuple(round(row[name], 9) for name in names)


@pytest.mark.parametrize("model", MODELS)
def test_all_commands_say_the_same(model: str, wlb) -> None:
    own = MODELS[model]
    path, packings = written(model), "--packing original,hold,slim"
    given = f"--model {path} {DOCUMENTS}"
    sizes = {
        f"--{axis}-size": own.get(name, 1)
        for axis, name in (
            ("tp", "tensor-model-parallel-size"), ("cp", "context-parallel-size"),
            ("pp", "pipeline-model-parallel-size"), ("ep", "expert-model-parallel-size"),
            ("vpp", "num-virtual-stages-per-pipeline-rank"),
        )
    }  # fmt: skip
    searched = " ".join(f"{flag} {size}" for flag, size in sizes.items())
    planned = wlb.json(
        "plan", given, packings, searched, "--num-devices", DEVICES[model], "--headroom 0",
        "--num-micro-batches", own["global-batch-size"],
        "--recompute", own.get("recompute-granularity", "none"),
    )  # fmt: skip
    stages = planned["ranked"][0]["stage_layers"]
    parts = re.compile("stages|layout|num-layers")
    flags = {flag: x for flag, x in planned["flags"].items() if parts.search(flag)}
    path = written(model, **{flag.removeprefix("--"): x for flag, x in flags.items()})
    packed = wlb.json("pack", given, packings)
    simulated = wlb.json("simulate", given, packings, "--report r.html")
    tuned = wlb.json("tune", given, "--packing hold --max-delay 9")
    recipe = read_recipe(path, {})
    config = settings_of_script([*recipe.arguments, "--wlb-packing", "auto"])
    auto = choose_packing(config, DEVICES[model])
    report = re.search(r'id="data">(.*?)</script>', Path("r.html").read_text(), re.DOTALL)
    assert report is not None
    page = {row["cells"][0]: row["cells"] for row in json.loads(report[1])["table"]}
    frames = [found["frame"] for found in (packed, simulated, tuned, planned)]
    for packing in ("hold", "slim"):
        rows = [
            next(row for row in reversed(rows) if row["title"] == packing)
            for rows in (packed["rows"], simulated["rows"], tuned["judged"])
        ]
        rows += [
            row for row in planned["ranked"]
            if (row["title"], row["max_tokens"]) == (packing, rows[0]["max_tokens"])
            and row["stage_layers"] == stages
        ]  # fmt: skip
        if rows[0]["out_of_memory"] is None:
            rows.append(forecast_of(path, packing))
            frames.append(rows[-1]["frame"])
            assert auto.gains[packing] == pytest.approx(rows[0]["speedup"], rel=1e-12)
        else:
            assert packing in auto.refused
        said = 3 if rows[0]["out_of_memory"] else 5
        assert [figures(row) for row in rows] == [figures(rows[0])] * said
        cells = page[f"{packing}, {rows[0]['sharding']}"]
        assert cells[1:3] == [f"{rows[0][name]:.3f}×" for name in ("speedup", "net_speedup")]
    assert frames == [frames[0]] * len(frames)
    assert auto.base.as_dict() == frames[0] and frames[0]["original_fits"]
    assert {"slim", "hold", "original"} == {*auto.gains, *auto.refused}
