"""Every command that advises says the same of one corpus, one recipe and one layout."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from helpers.index import write_index

from megatron_wlb.cli.plan import HEADROOM

RECIPE = """
TEST_TYPE: release
ENV_VARS:
  NUM_NODES: 2
  GPUS_PER_NODE: 8
MODEL_ARGS:
  --num-layers: 16
  --hidden-size: 2048
  --ffn-hidden-size: 5504
  --num-attention-heads: 16
  --normalization: RMSNorm
  --swiglu: true
  --disable-bias-linear: true
  --untie-embeddings-and-output-weights: true
  --position-embedding-type: rope
  --tensor-model-parallel-size: 2
  --sequence-parallel: true
  --pipeline-model-parallel-size: 4
  --use-distributed-optimizer: true
  --overlap-grad-reduce: true
  --seq-length: 8192
  --max-position-embeddings: 8192
  --micro-batch-size: 1
  --eval-interval: 1000
  --global-batch-size: 16
  --hidden-dropout: 0.0
  --attention-dropout: 0.0
  --bf16: true
  --vocab-size: 1024
  --data-path: corpus
  --split: 100,0,0
  --train-iters: 10
  --lr: 1.0e-4
  --wlb-packing: hold
"""
SIZES = ("tp_size", "cp_size", "pp_size", "vpp_size", "dp_size", "ep_size")
LAYOUT = (
    "--num-devices 16 --num-micro-batches 16 --tp-size 2 --cp-size 1 --pp-size 4 --vpp-size 1 "
    "--dp-size 2 --recompute none"
)


@pytest.fixture(autouse=True)
def folder(wlb, dry_runs) -> None:
    lengths = np.random.default_rng(1).lognormal(7.2, 1.7, 3000).astype(int).clip(1, 40_000)
    write_index("corpus", lengths.tolist())
    Path("recipe.yaml").write_text(RECIPE)


def test_all_commands_say_the_same_gain(wlb) -> None:
    """They fill queues over 10 to 50 steps before 40 that count, so they see other documents."""
    one = "corpus --model recipe.yaml --steps 40 --packing"
    packed = wlb.json("pack", one, "original,hold")["rows"]
    simulated = wlb.json("simulate", one, "original,hold --num-seeds 1")["rows"]
    tuned = wlb.json("tune", one, "hold")["defaults"]
    planned = wlb.json("plan", one, "original,hold", LAYOUT)["ranked"]
    forecast = wlb.json("recipe run recipe.yaml --dry-run")
    assert all(row["stage_layers"] is None for row in planned)
    (of_plan,) = (
        row["speedup"] for row in planned if (row["packing"], row["max_tokens"]) == ("hold", 16384)
    )
    gains = [packed[1]["work_speedup"], simulated[1]["speedup"], tuned[0]["work_speedup"]]
    gains += [of_plan, forecast["speedup"]]
    assert max(gains) / min(gains) < 1.02, gains
    assert min(gains) > 1.03, gains
    assert {forecast["dp_size"], planned[0]["dp_size"]} == {2}


@pytest.fixture
def max_tokens(wlb):
    def of(command: str, words: str) -> set[int]:
        """S_max of `hold`."""
        rows = wlb.json(command, "--model recipe.yaml --steps 3", words)["rows"]
        return {row["max_tokens"] for row in rows if row["packing"] == "hold"}

    return of


def test_s_max_is_what_fits_wherever_the_layout_is_known(max_tokens) -> None:
    text = RECIPE.replace("16\n  --hidden-size: 2048", "64\n  --hidden-size: 8192")
    text = text.replace("--seq-length: 8192", "--seq-length: 65536")
    Path("recipe.yaml").write_text(text.replace("--max-position-embeddings: 8192", ""))
    words = "--dp-size 16 --distribution reference --packing original,hold --hardware h200"
    (packed,), (simulated,) = max_tokens("pack", words), max_tokens("simulate --num-seeds 1", words)
    assert packed == simulated and 65536 <= packed < 2 * 65536


def test_flags_of_a_recipe_count_unless_others_are_given(wlb, max_tokens) -> None:
    ours = "--wlb-max-tokens: 12288\n  --wlb-hardware: a100\n  --wlb-memory-gib: 50\n  --seq-length"
    Path("recipe.yaml").write_text(RECIPE.replace("--seq-length", ours))
    for command in ("pack", "simulate --num-seeds 1"):
        assert max_tokens(command, "corpus --packing hold") == {12288}
        assert max_tokens(command, "corpus --packing hold --max-windows 2") == {16384}
    words = "corpus --model recipe.yaml --packing hold --steps 3"
    others = "--hardware h100-sxm --memory-gib 60"
    for command, share in ((f"simulate {words}", 1.0), (f"plan {words} {LAYOUT}", 1 - HEADROOM)):
        for more, machine, gib in (("", "16 × a100", 50), (others, "16 × h100-sxm", 60)):
            out = " ".join(wlb(command, more).out.split())
            assert machine in out and f"{share * gib:.1f} GiB" in out


def test_layout_of_flags_is_the_one_that_is_priced_and_said(wlb) -> None:
    """Of a model by name as of one of settings: cost, S_max and what slices recompute."""
    words = "pack --distribution reference --model 7b --num-micro-batches 8 --pp-size 2 --steps 3"
    words += " --packing hold,slim"
    narrow, wide = (wlb.json(words, more) for more in ("", "--tp-size 8 --cp-size 2 --dp-size 2"))
    assert narrow["layout"] == dict.fromkeys(SIZES, 1) | {"pp_size": 2, "ep_size": None}
    assert wide["layout"] == narrow["layout"] | {"tp_size": 8, "cp_size": 2, "dp_size": 2}
    (hold, slim), (other_hold, other_slim) = narrow["rows"], wide["rows"]
    assert hold["max_tokens"] == 131072 < other_hold["max_tokens"]
    assert slim["efficiency"] != other_slim["efficiency"]
    out = " ".join(wlb(words).out.split())
    assert "cost of 7b on h100-sxm, TP 1 × CP 1 × PP 2 × DP 1" in out


def test_s_max_of_pack_and_simulate_is_the_same_in_a_layout_of_flags(max_tokens) -> None:
    Path("recipe.yaml").write_text(RECIPE.replace("--seq-length: 8192", "--seq-length: 131072"))
    words = "--distribution reference --packing hold --dp-size 2 --tp-size 2 --pp-size 2 --cp-size"
    packed, simulated = (
        [max_tokens(command, f"{words} {cp}") for cp in (1, 2)]
        for command in ("pack", "simulate --num-seeds 1")
    )
    assert packed == simulated and packed[0] != packed[1]


def test_gains_over_what_does_not_fit_memory_say_so(wlb) -> None:
    """In sentences, JSON and report; where it fits, nothing is said."""
    one = "--distribution reference --model recipe.yaml --steps 2"
    commands = {
        "pack": f"pack {one} --packing original,slim",
        "simulate": f"simulate {one} --packing slim --num-seeds 1 --report r.html",
        "plan": f"plan {one} --packing original,slim --refine 1 {LAYOUT}",
        "dry run": "recipe run recipe.yaml --dry-run",
    }
    unfit = {
        "plan": "no gain over original is told, which fits memory in no layout here",
        "dry run": "original does not fit memory",
    }
    for gib, fits in ((20, False), (60, True)):
        more = f"--wlb-packing: slim\n  --wlb-memory-gib: {gib}"
        text = RECIPE.replace("8192", "65536").replace("--wlb-packing: hold", more)
        Path("recipe.yaml").write_text(text)
        for command, words in commands.items():
            assert wlb.json(words)["original_fits"] is fits, command
            out = re.sub("[\\s│]+", " ", wlb(words).out)
            said = unfit.get(command, "original, which does not fit memory") in out
            assert said is not fits, out
        assert ("the work a second of original, which" in Path("r.html").read_text()) is not fits
