from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_wlb.cli.main import main
from megatron_wlb.errors import ConfigError
from megatron_wlb.plan.strategy.layout import read_strategies
from megatron_wlb.planning.strategy_run import StrategyRun
from megatron_wlb.settings.command_line import parse

SIZES = {
    "hidden_size": 1024, "ffn_hidden_size": 2816, "num_layers": 4, "num_attention_heads": 8,
    "num_query_groups": 8, "kv_channels": 128, "vocab_size": 8000, "gated": True,
    "tied_embeddings": False,
}  # fmt: skip
WINDOW = 32768
SMALL = ["plan", "--model", "small.yaml", "--num-devices", "8", "--strategies", "--steps", "6",
         "--window", str(WINDOW), "--num-micro-batches", "2", "--memory-gib", "2.4",
         "--hardware", "a100"]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump(SIZES))
    random = np.random.default_rng(3)
    lengths = np.clip(random.lognormal(np.log(700), 1.0, 4000), 16, 6000).astype(np.int64)
    lengths[::400] = 30000  # in some steps
    np.save("mixed.npy", lengths)


def test_strategies_are_shown_with_their_gain_and_documents(capsys) -> None:
    command = [*SMALL, "--lengths", "mixed.npy"]
    assert main([*command, "--json", "--out", "found.yaml"]) == 0
    found = json.loads(capsys.readouterr().out)
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
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "Which documents go where" in shown and "simulated" in shown
    assert found["best_equal"] in shown and rows[0]["strategy"] in shown
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found  # the same each time


def test_strategies_of_fp32_fit_a_run_without_bf16(capsys) -> None:
    command = [*SMALL, "--lengths", "mixed.npy", "--memory-gib", "4"]
    schemes = {}
    for dtype, more in {"bf16": [], "fp32": ["--fp32"]}.items():
        assert main([*command, *more, "--json", "--out", f"{dtype}.yaml"]) == 0
        found = json.loads(capsys.readouterr().out)
        schemes[dtype] = found["schemes"]
        assert found["bf16"] is (dtype == "bf16")
    shared = schemes["bf16"].keys() & schemes["fp32"].keys()
    assert shared and all(schemes["fp32"][name] < schemes["bf16"][name] for name in shared)
    assert main([*command, "--fp32", "--out", "fp32.yaml"]) == 0
    # The line that is shown can be trained, and says all that it depends on.
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    config = parse(words[words.index("megatron_wlb.pretrain_gpt") + 1 :])
    assert not config.training.bf16 and config.wlb.wlb_strategies == "fp32.yaml"
    corpora: Any = SimpleNamespace(vocab_size=SIZES["vocab_size"])
    run = StrategyRun.of(config, corpora, 8)
    assert run.strategies == read_strategies("fp32.yaml")
    wlb = dataclasses.replace(config.wlb, wlb_strategies="bf16.yaml")
    with pytest.raises(ConfigError, match=r"^--wlb-strategies bf16.yaml: .* memory holds"):
        StrategyRun.of(dataclasses.replace(config, wlb=wlb), corpora, 8)


def test_no_gain_is_said_plainly(capsys) -> None:
    np.save("long.npy", np.full(400, WINDOW, dtype=np.int64))  # each step has the same
    assert main([*SMALL, "--lengths", "long.npy"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Strategies gain nothing on these documents, simulated" in shown


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--num-micro-batches", "2", "4"], "--num-micro-batches 2 4 are several sizes of a step"),
        (["--tp-size", "4"], "--tp-size gives all replicas one size"),
        (["--memory-gib", "0.3"], "no replica on 8 devices takes a document of 30000 tokens"),
    ],
)
def test_strategies_that_cannot_be_are_refused(more: list[str], said: str, capsys) -> None:
    assert main([*SMALL, "--lengths", "mixed.npy", *more]) == 2
    error = capsys.readouterr().err.splitlines()
    assert said in error[-1] and error[-1].startswith("error: ")


def test_models_that_do_not_run_with_strategies_are_refused(capsys) -> None:
    latent = {"kv_lora_rank": 64, "qk_head_dim": 96, "qk_pos_emb_head_dim": 32, "v_head_dim": 96}
    more = {"num_experts": 4, "mtp_num_layers": 1, "latent": latent, "dropout": True}
    Path("small.yaml").write_text(yaml.safe_dump(SIZES | more))
    assert main([*SMALL, "--lengths", "mixed.npy"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "strategies: " in line]
    names = ["num-experts", "multi-latent-attention", "mtp-num-layers", "hidden-dropout"]
    for name, line in zip(names, lines, strict=True):
        assert f"--model small.yaml has --{name}, which does not work with strategies" in line
    run = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "bf16": True}
    sizes = "num_layers: 4\nhidden_size: 1024\nnum_attention_heads: 8\n"
    Path("small.yaml").write_text(sizes + yaml.safe_dump(run))
    assert main([*SMALL, "--lengths", "mixed.npy"]) == 2
    assert "has --fp8-format, which does not" in capsys.readouterr().err


def test_fp32_without_strategies_is_refused(capsys) -> None:
    command = [word for word in SMALL if word != "--strategies"]
    assert main([*command, "--lengths", "mixed.npy", "--fp32"]) == 2
    assert "--fp32 is for --strategies" in capsys.readouterr().err.splitlines()[-1]
