from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers.index import write_index

from megatron_wlb.cost.attention_latency import AttentionProfile
from megatron_wlb.cost.hardware import read_hardware
from megatron_wlb.settings.config import DEFAULT_MACHINE

SIZES = {
    "hidden_size": 256, "ffn_hidden_size": 640, "num_layers": 8, "num_attention_heads": 8,
    "group_query_attention": True, "num_query_groups": 8, "kv_channels": 32,
    "vocab_size": 1000, "swiglu": True,
}  # fmt: skip
SETTINGS = {
    "num-layers": 8, "hidden-size": 256, "ffn-hidden-size": 640, "num-attention-heads": 8,
    "swiglu": True, "seq-length": 2048, "global-batch-size": 6,
    "pipeline-model-parallel-size": 2, "context-parallel-size": 2,
}  # fmt: skip
VPP = {"num-virtual-stages-per-pipeline-rank": 2}
QUICK = "simulate --distribution reference --steps 3 --num-seeds 1"
SMALL = f"{QUICK} --model small.yaml --window 4096 --hardware prompt.yaml"
CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture
def rows(wlb):
    def run(*words: object) -> list[dict[str, Any]]:
        result = wlb.json(*words)
        assert result["simulated"] is True
        return result["rows"]

    return run


def write(name: str, content: dict[str, Any]) -> None:
    Path(name).write_text(yaml.safe_dump(content))


@pytest.fixture(autouse=True)
def folder(wlb) -> None:
    write("small.yaml", SIZES)
    write("settings.yaml", SETTINGS)
    # A host that launches at once: on an H100 so small a model lasts as long as its launches.
    write("prompt.yaml", {**read_hardware("h100-sxm")[1], "launch_us": {"value": 0, "source": ""}})


def test_json_has_a_row_for_each_packing_and_sharding(rows) -> None:
    sizes = "--cp-size 2 --pp-size 2 --dp-size 2 --num-micro-batches 8"
    found = rows(SMALL, sizes, "--packing wlb:3,hold+shape --sharding hybrid")
    assert [(row["packing"], row["shaped"], row["sharding"]) for row in found] == [
        (packing, shaped, sharding)
        for packing, shaped in (("original", False), ("wlb", False), ("hold", True))
        for sharding in ("per-sequence", "hybrid")
    ]
    assert found[0]["speedup"] < found[1]["speedup"] == 1 < found[-1]["speedup"]
    for row in found:
        assert row["step_ms"] > 0 and row["tokens_per_s"] > 0 and row["peak_gib"] > 0
        assert 0 < row["mfu"] < 1 and 0 < row["bubble_share"] < 1
        assert min(row[f"{level}_imbalance"] for level in ("pp", "cp", "dp")) >= 1
        assert row["speedup_lowest"] <= row["speedup"] <= row["speedup_highest"]


def test_default_compares_shaped_steps_where_there_are_stages(rows) -> None:
    one, two = rows(SMALL), rows(SMALL, "--pp-size 2")
    titles = [row["title"] for row in one]
    assert {"original", "fixed-greedy, 4 batches", "wlb", "hold", "slim"} < {*titles}
    assert [row["title"] for row in two] == [*titles, "hold, shaped"]
    assert {row["sharding"] for row in two} == {"per-sequence"}
    assert one[0]["speedup"] == 1 and {row["num_micro_batches"] for row in (*one, *two)} == {4}


def test_seed_decides_the_figures(rows) -> None:
    first, again, other = (
        [row["mfu"] for row in rows(SMALL, "--seed", seed)] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_training_settings_give_model_window_batch_and_layout(rows) -> None:
    words = f"{QUICK} --model settings.yaml --packing hold"

    def figures(*words: str) -> list[dict[str, Any]]:
        return [row | {"ms_per_step": 0} for row in rows(*words)]

    ours = figures(words)
    assert ours == figures(words, "--window 2048 --cp-size 2 --pp-size 2 --num-micro-batches 6")
    assert {row["sharding"] for row in ours} == {"per-sequence", "adaptive"}
    assert {row["sharding"] for row in rows(words, "--cp-size 1")} == {"per-sequence"}


def test_training_settings_give_recomputation_and_group_size(rows) -> None:
    def of(more: str = "", **settings: object) -> dict[str, Any]:
        write("some.yaml", SETTINGS | VPP | settings)
        words = QUICK, "--model some.yaml --packing original --cp-size 1", more
        return rows(*words)[0] | {"ms_per_step": 0}

    block = {"recompute-granularity": "full", "recompute-method": "block"}
    first = of(**block, **{"recompute-num-layers": 1})
    both = of(**block, **{"recompute-num-layers": 2})
    plain = of()
    assert plain["peak_gib"] > first["peak_gib"] > both["peak_gib"]
    assert plain["step_ms"] < first["step_ms"] < both["step_ms"]
    assert of("--recompute none", **block, **{"recompute-num-layers": 1}) == plain
    grouped = of(**{"microbatch-group-size-per-virtual-pipeline-stage": 6})
    assert grouped["peak_gib"] > plain["peak_gib"]


def test_report_leaves_documents_without_tokens_out(wlb) -> None:
    write_index("gaps", [0, 5, 0, *range(100, 3000, 7)])
    words = SMALL.replace("--distribution reference", "gaps")
    wlb(words, "--packing hold --report gaps.html")
    data = re.search(r'id="data">(.*?)</script>', Path("gaps.html").read_text(), re.DOTALL)
    assert data is not None
    assert "416 documents" in json.loads(data[1])["lengths"]["text"]


def test_recipe_of_the_paper_is_simulated_as_it_stands(wlb) -> None:
    out = wlb(QUICK, "--packing hold --model", CONFIGS / "experiment/7b-128k.yaml").out
    assert "7b-128k on 64 × h100-sxm, TP 8 × CP 2 × PP 4 × VPP 2, window 131,072, N 4" in " ".join(
        out.split()
    )


def test_devices_of_a_recipe_give_its_data_parallel_ranks(wlb) -> None:
    given = QUICK, "--packing original --model", CONFIGS / "experiment/550m-64k.yaml"
    assert "on 32 × h100-sxm, TP 2 × CP 2 × PP 4 × VPP 2 × DP 2," in wlb(*given).out
    one = wlb(*given, "--dp-size 1").out
    assert "on 16 × h100-sxm, TP 2 × CP 2 × PP 4 × VPP 2," in one
    assert "the 32 devices of --model" in wlb.refusal(*given, "--cp-size 3")


def test_attention_table_that_does_not_fit_is_said_to_be_left_out(wlb) -> None:
    figures = yaml.safe_load((CONFIGS / "hardware/cpu.yaml").read_text())
    row = (1.0, 9.0)
    table = AttentionProfile(
        "sdpa", "here", "float32", 8, 8, 32, 1, 1, (1, 8192), (row, (9.0,)), (row, (9.0,)), row, row
    )
    for dtype, said in (("float32", 1), ("bfloat16", 0)):
        one = replace(table, dtype=dtype).as_dict()
        write("ours.yaml", figures | {"attention": [one]})
        err = wlb(SMALL, "--hardware ours.yaml --packing original").err
        assert err.count("has no attention table of bfloat16 heads of 32") == said


def test_sentences_are_whole_lines_with_names_as_they_are(wlb) -> None:
    Path("[b]").mkdir()
    lines = wlb(SMALL, "--memory-gib 0.1 --report [b]/step.html").out.splitlines()
    assert "report: [b]/step.html" in lines
    (line,) = (line for line in lines if "out of memory" in line)
    assert line.endswith("use more TP, CP or PP")


def test_files_are_written_whole(wlb) -> None:
    files = "--report new/r.html --trace t.json --plot p.png"
    out = wlb(SMALL, "--pp-size 2 --packing hold", files).out
    assert "simulated: 3 steps of each" in out and "report: new/r.html" in out
    assert Path("new/r.html").read_text().endswith("</html>\n")
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"original, per-sequence", "hold, per-sequence"}
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    wlb(SMALL, "--pp-size 2 --plot p.svg")
    assert "</svg>" in Path("p.svg").read_text()
    assert not [*Path().rglob(".*")]


def test_memory_that_is_too_small_is_said_not_refused(wlb) -> None:
    out, err = wlb(SMALL, "--memory-gib 0.2")
    assert "note: S_max is 4,096 tokens (1.00 windows), though even so many do not fit" in err
    assert re.search(r"out of memory: pipeline rank 0 of .* at .*above the limit of 0.20 GiB",
                     " ".join(out.split()))  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--pp-size 3", "8 layers do not divide over 3"),
        ("--tp-size 3", "does not divide over TP 3"),
        ("--dp-size 2 --num-micro-batches 3", "3 micro-batches a step do not divide"),
        ("--pp-size 4 --vpp-size 2 --num-micro-batches 3", "group_size"),
        ("--dp-size 0", "--dp-size is 0; give at least 1"),
        ("--dp-size 2 --ep-size 2", "EP is 2, but the model has no experts"),
        ("--num-micro-batches -1", "--num-micro-batches is -1"),
        (
            "--num-micro-batches 0 --model settings.yaml",
            "--num-micro-batches is 0; give at least 1",
        ),
        ("--memory-gib -3", "--memory-gib is -3.0"),
        ("--hardware h1000", "unknown hardware h1000"),
        ("--hardware slow.yaml", "tp_overlap, cp_overlap are missing; add them"),
        ("--hardware negative.yaml", "latency_us is -5"),
        ("--cost cost.yaml", "forward_linear_us is -1"),
        ("--model 9b", "unknown model 9b; use"),
        ("--model typo.yaml", "typo.yaml"),
        ("--packing hodl", "did you mean hold"),
        ("--packing original+shape", "cannot be shaped"),
        ("--packing hold,fixed-greedy+shape", "cannot be shaped"),
        ("--sharding adaptive", "needs context parallelism"),
        ("--cp-size 2 --sharding zigzag", "unknown sharding zigzag"),
        ("--max-windows 0.5", "--max-windows is 0.5"),
        ("--steps 0", "--steps is 0"),
        ("--plot p.jpg", "is not a picture; name it .png or .svg"),
        ("--report .", "is a folder"),
        ("--trace small.yaml/t.json", "cannot write --trace"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_file(words: str, says: str, wlb) -> None:
    write("slow.yaml", {"memory_gb_s": {"value": 3, "source": "guess"}})
    figures = yaml.safe_load((CONFIGS / "hardware/cpu.yaml").read_text())
    figures["latency_us"]["value"] = -5
    write("negative.yaml", figures)
    passes = [
        f"{way}_{part}_us" for way in ("forward", "backward") for part in ("linear", "quadratic")
    ]
    write("cost.yaml", dict.fromkeys(passes, 1) | {"forward_linear_us": -1})
    write("typo.yaml", SIZES | {"gate": True})
    before = sorted(Path().rglob("*"))
    output = "--report r.html --trace t.json --plot p.png"
    assert says in wlb.refusal(SMALL, output, words)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ("", 2, "no documents"),
        ("nowhere", 3, "nowhere"),
        ("--lengths empty.txt", 3, "no lengths"),
        ("long --long-documents error", 3, "above the window"),
    ],
)
def test_bad_documents_are_one_line(words: str, status: int, says: str, wlb) -> None:
    Path("empty.txt").write_text("")
    write_index("long", [5, 9000])
    given = SMALL.replace("--distribution reference", words)
    assert says in wlb.refusal(given, status=status)


def test_corpus_is_not_read_whole(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten million documents only those of the simulated steps are drawn."""
    from megatron_wlb.data import length_source

    drawn = []
    real = length_source.DocumentStream
    monkeypatch.setattr(
        length_source, "DocumentStream",
        lambda lengths, **options: drawn.append(len(lengths[0])) or real(lengths, **options),
    )  # fmt: skip
    np.save("many.npy", np.full(10_000_000, 700, dtype=np.int32))
    rows(SMALL.replace("--distribution reference", "--lengths many.npy"), "--packing hold")
    assert drawn and max(drawn) < 50_000


def test_replicas_that_share_experts_wait_for_each_other(wlb, rows) -> None:
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 320}
    write("small.yaml", SIZES | experts)
    words = f"{SMALL} --pp-size 2 --dp-size 4 --num-micro-batches 16 --packing wlb"
    alone, _ = rows(words)
    shared, balanced = rows(words, "--ep-size 4")
    assert alone["expert_wait_share"] == 0 < balanced["expert_wait_share"]
    assert balanced["expert_wait_share"] < 0.5 * shared["expert_wait_share"]
    assert shared["peak_gib"] < alone["peak_gib"]  # a quarter of the experts
    uneven, _ = rows(words, "--ep-size 4 --expert-imbalance 3")
    assert uneven["peak_gib"] > shared["peak_gib"]
    assert uneven["step_ms"] == shared["step_ms"]
    out = wlb(words, "--ep-size 4").out
    assert "DP 4 × EP 4" in out and "experts" in out
    assert "EP 3" in wlb.refusal(words, "--ep-size 3")


def test_recipe_says_how_experts_are_divided(rows) -> None:
    experts = {
        "num-experts": 8, "moe-router-topk": 2, "moe-layer-freq": "[0]*2+[1]*6",
        "expert-model-parallel-size": 4, "disable-bias-linear": True,
    }  # fmt: skip
    write("experts.yaml", SETTINGS | experts)
    words = f"{QUICK} --model experts.yaml --hardware prompt.yaml --dp-size 2 --num-micro-batches 8"
    (said, *_), (given, *_), (other, *_) = (
        rows(words, more) for more in ("", "--ep-size 4", "--ep-size 1")
    )
    said, given = ({**row, "ms_per_step": 0} for row in (said, given))
    assert said == given and said["expert_wait_share"] > 0 == other["expert_wait_share"]


def test_default_machine_goes_on_beyond_its_tables(wlb) -> None:
    """They end at 163,840 tokens; another table is refused there unless it is allowed."""
    words = "simulate --distribution reference --model 7b --window 262144 --tp-size 8 --cp-size 8"
    words += " --num-micro-batches 2 --steps 1 --packing original"
    assert wlb.json(words)["frame"]["hardware"] == DEFAULT_MACHINE
    measured = read_hardware(DEFAULT_MACHINE)[1]
    tables = [table | {"extrapolate": False} for table in measured["attention"]]
    Path("short.yaml").write_text(yaml.safe_dump({**measured, "attention": tables}))
    told = wlb.refusal(words, "--hardware short.yaml")
    assert "ends at 163840 tokens" in told and "--wlb-cost-extrapolate" in told
