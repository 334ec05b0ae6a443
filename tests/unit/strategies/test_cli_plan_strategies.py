from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_wlb.cost.hardware import read_hardware
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.balance.replica_costs import Scheme
from megatron_wlb.settings.command_line import parse
from megatron_wlb.strategies.plan.strategy import read_strategies
from megatron_wlb.strategies.plan.strategy_run import StrategyRun

SIZES = {
    "hidden_size": 1024, "ffn_hidden_size": 2816, "num_layers": 4, "num_attention_heads": 8,
    "group_query_attention": True, "num_query_groups": 8, "kv_channels": 128,
    "vocab_size": 8000, "swiglu": True,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
WINDOW = 32768
SMALL = (
    f"plan --model small.yaml --num-devices 8 --strategies --steps 6 --window {WINDOW} "
    "--num-micro-batches 2 --memory-gib 2.4 --hardware prompt.yaml"
)
MIXED = f"{SMALL} --lengths mixed.npy"


@pytest.fixture(autouse=True)
def folder(wlb) -> None:
    Path("small.yaml").write_text(yaml.safe_dump(SIZES))
    # A host that launches at once: so small a model lasts as long as its launches.
    machine = {**read_hardware("a100")[1], "launch_us": {"value": 0, "source": ""}}
    Path("prompt.yaml").write_text(yaml.safe_dump(machine))
    random = np.random.default_rng(3)
    lengths = np.clip(random.lognormal(np.log(700), 1.0, 4000), 16, 6000).astype(np.int64)
    lengths[::400] = 30000  # in some steps
    np.save("mixed.npy", lengths)


def test_strategies_are_shown_with_their_gain_and_documents(wlb) -> None:
    found = wlb.json(MIXED, "--out found.yaml")
    assert found["simulated"] is True and found["speedup"] > 1
    assert found["speedup"] == pytest.approx(found["equal_ms"] / found["dynamic_ms"])
    rows = found["strategies"]
    assert sum(row["num_chosen"] for row in rows) == found["num_steps"] == 6
    assert rows[0]["max_tokens"] >= 30000 and rows[0]["speedup_alone"] > 0
    for row in rows:
        shares = [use["token_share"] for use in row["documents"]]
        assert sum(shares) == pytest.approx(1 if row["num_chosen"] else 0)
        limits = [int(use["replicas"].partition(":")[2].replace("k", "") or 0)
                  * (1024 if use["replicas"].endswith("k") else 1)
                  for use in row["documents"]]  # fmt: skip
        longest = [use["longest"] for use in row["documents"]]
        assert all(a <= b for a, b in zip(longest, limits, strict=True))
    read = read_strategies("found.yaml")
    assert [str(strategy) for strategy in read] == [row["strategy"] for row in rows]
    shown = wlb(MIXED).out
    assert "Which documents go where" in shown and "simulated" in shown
    assert found["best_equal"] in shown and rows[0]["strategy"] in shown
    assert wlb.json(MIXED) == found  # the same each time


def test_strategies_of_fp32_fit_a_run_without_bf16(wlb) -> None:
    command = f"{MIXED} --memory-gib 4"
    schemes = {}
    for dtype, more in {"bf16": "", "fp32": "--fp32"}.items():
        found = wlb.json(command, more, f"--out {dtype}.yaml")
        schemes[dtype] = found["schemes"]
        assert found["bf16"] is (dtype == "bf16")
    shared = schemes["bf16"].keys() & schemes["fp32"].keys()
    whole = [name for name in shared if "sliced" not in name]  # slices take the longest in both
    assert whole and all(schemes["fp32"][name] < schemes["bf16"][name] for name in whole)
    # The line that is shown can be trained, and says all that it depends on.
    words = shlex.split(wlb(command, "--fp32 --out fp32.yaml").out.splitlines()[-1])
    config = parse(words[words.index("megatron_wlb.launch") + 1 :])
    assert not config.training.bf16 and config.wlb.wlb_strategies == "fp32.yaml"
    corpora: Any = SimpleNamespace(vocab_size=SIZES["vocab_size"])
    run = StrategyRun.of(config, corpora, 8)
    assert run.strategies == read_strategies("fp32.yaml")
    wlb = dataclasses.replace(config.wlb, wlb_strategies="bf16.yaml")
    with pytest.raises(ConfigError, match=r"^--wlb-strategies bf16.yaml: .* memory holds"):
        StrategyRun.of(dataclasses.replace(config, wlb=wlb), corpora, 8)


def test_no_gain_is_said_plainly(wlb) -> None:
    np.save("long.npy", np.full(400, WINDOW, dtype=np.int64))  # each step has the same
    shown = " ".join(wlb(SMALL, "--lengths long.npy").out.split())
    assert "Strategies gain nothing on these documents, simulated" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{MIXED} --num-micro-batches 2 4", "--num-micro-batches 2 4 are several sizes of a step"),
        (f"{MIXED} --tp-size 4", "--tp-size gives all replicas one size"),
        (f"{MIXED} --memory-gib 0.3", "no replica on 8 devices takes a document of 30000 tokens"),
        (f"{MIXED.replace('--strategies', '--fp32')}", "--fp32 is for --strategies"),
    ],
)
def test_strategies_that_cannot_be_are_refused(words: str, said: str, wlb) -> None:
    assert said in wlb.refusal(words)


def test_experts_are_divided_inside_replicas(wlb) -> None:
    Path("small.yaml").write_text(
        yaml.safe_dump(SIZES | {"num_experts": 4, "disable_bias_linear": True})
    )
    words = shlex.split(wlb(MIXED, "--out found.yaml").out.splitlines()[-1])
    config = parse(words[words.index("megatron_wlb.launch") + 1 :])
    corpora: Any = SimpleNamespace(vocab_size=SIZES["vocab_size"])
    run = StrategyRun.of(config, corpora, 8)
    assert run.expert_sizes(Scheme(tp_size=2)) == (2, 1)
    assert run.expert_sizes(Scheme(tp_size=2, cp_size=4)) == (4, 1)


def test_models_that_do_not_run_with_strategies_are_refused(wlb) -> None:
    run = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "bf16": True}
    sizes = "num_layers: 4\nhidden_size: 1024\nnum_attention_heads: 8\n"
    Path("small.yaml").write_text(sizes + yaml.safe_dump(run))
    assert "has --fp8-format, whose rates" in wlb.refusal(MIXED)


def test_command_has_what_settings_say_of_the_model(wlb) -> None:
    sizes = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 8, "vocab_size": 8000}
    more = {"rotary_base": 500000, "norm_epsilon": 1e-6, "lr": 3e-4, "swiglu": True}
    Path("small.yaml").write_text(yaml.safe_dump(sizes | more))
    shown = wlb(MIXED, "--memory-gib 4 --out found.yaml").out
    words = shlex.split(shown.splitlines()[-1])
    config = parse(words[words.index("megatron_wlb.launch") + 1 :])
    assert {name: config.flat()[name] for name in sizes | more} == sizes | more
    assert "train with them, --data-path, --tokenizer-type, --train-iters, --eval-int" in shown
