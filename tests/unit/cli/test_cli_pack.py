from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers.index import write_index

KEYS = {
    "packing", "num_micro_batches", "max_windows", "imbalance_mean", "imbalance_time_weighted",
    "imbalance_p95", "delay_mean", "delay_p99", "delay_max", "tokens_cv", "padding", "ms_per_step",
    "documents",
}  # fmt: skip
PACK = "pack --distribution reference"


@pytest.fixture
def rows(wlb):
    def run(*words: object) -> list[dict[str, Any]]:
        result = wlb.json(*words)
        assert result.keys() == {"frame", "layout", "rows"}
        assert all(row.keys() >= KEYS for row in result["rows"])
        return result["rows"]

    return run


@pytest.fixture(autouse=True)
def folder(wlb) -> None:
    lengths = np.random.default_rng(1).lognormal(5, 1.6, 900).astype(int).clip(1, 9000)
    write_index("corpus", lengths.tolist())
    Path("lengths.txt").write_text("".join(f"{length}\n" for length in lengths))
    np.save("lengths.npy", lengths)


def write(name: str, content: dict[str, Any]) -> None:
    Path(name).write_text(yaml.safe_dump(content))


def test_json_has_a_row_for_each_packing_and_n(rows) -> None:
    found = rows(PACK, "--steps 8 --num-micro-batches 4,6")
    by_n = {n: [row for row in found if row["num_micro_batches"] == n] for n in (4, 6)}
    for of_n in by_n.values():
        shown = [(row["packing"], row["fixed_batches"]) for row in of_n]
        usual = [("original", 1), *(("fixed-greedy", k) for k in (1, 2, 4, 8)), ("wlb", 1)]
        assert shown == [*usual, ("hold", 1), ("slim", 1)]
        original, hold = of_n[0], of_n[6]
        assert original["imbalance_mean"] > hold["imbalance_mean"] >= 1
        assert original["delay_mean"] == 0 < hold["delay_mean"] <= hold["delay_max"]
        assert original["speedup"] == 1 < hold["speedup"]
        assert all(row["steps"] == 8 for row in of_n)
        assert original["max_windows"] is None and 1 < hold["max_windows"] < 2  # what fits


def test_all_sources_of_the_same_lengths_give_the_same_figures(rows) -> None:
    options = "--window 4096 --steps 8 --packing hold,original"
    found = [
        [row["imbalance_mean"] for row in rows("pack", source, options)]
        for source in ("corpus", "--lengths lengths.txt", "--lengths lengths.npy")
    ]
    assert found[0] == found[1] == found[2] and len(found[0]) == 2


def test_settings_of_packings_are_passed_on(rows) -> None:
    def of(words: str) -> dict[str, Any]:
        return rows(PACK, "--steps 30 --window 8192 --packing", words)[-1]

    free, priced = (of(f"hold --delay-price {price}") for price in ("0.02", "3"))
    assert free["delay_mean"] > priced["delay_mean"]
    low, high = (of(f"wlb --queue-thresholds {at}") for at in (1000, 8000))
    assert low["delay_mean"] != high["delay_mean"] and low["queue_thresholds"] == [1000]
    tight = of("hold --max-windows 1.25")
    assert tight["max_tokens"] == 10240 >= tight["longest_micro_batch_tokens"]
    assert of("hold --max-step-tokens 33000")["tokens_cv"] < free["tokens_cv"]
    assert of("wlb --max-age 2")["delay_max"] <= 3


def test_padding_is_shown_where_there_is_any(wlb) -> None:
    options = "--steps 4 --packing hold --window 4096 --tp-size 1 --cp-size 1"
    assert "padding" in wlb(PACK, options, "--length-multiple 512").out
    assert "padding" not in wlb(PACK, options).out


def test_numbers_chosen_by_step_are_over_original_as_megatron_runs_it(rows) -> None:
    options = "--steps 12 --num-micro-batches 4"
    found = rows(PACK, options, "--pp-size 4 --packing original,original+auto,hold,hold+auto")
    original, own, hold, chosen = (row["speedup"] for row in found)
    assert original == 1 < own and hold < chosen
    assert [row["title"] for row in found] == [
        "original", "original, auto N", "hold", "hold, auto N",
    ]  # fmt: skip
    assert found[3]["flags"][-2:] == ["--wlb-micro-batches", "auto"]
    _, *alone = rows(PACK, options, "--packing hold,hold+auto")
    assert alone[0]["imbalance_mean"] == alone[1]["imbalance_mean"]  # without a pipeline


def test_micro_batches_stand_for_the_windows_of_the_recipe_or_the_flag(wlb, rows) -> None:
    """N is what they divide the batch into; S_max is twice their windows."""
    sizes = {"num_layers": 4, "hidden_size": 64, "seq-length": 2048, "global_batch_size": 6}
    write("model.yaml", sizes | {"micro_batch_size": 2})
    words = "pack corpus --model model.yaml --steps 5 --packing original,hold"
    for row in rows(words):
        assert (row["num_micro_batches"], row["micro_batch_size"]) == (3, 2)
        assert row["max_tokens"] == 4 * 2048
        assert row["tokens"] == pytest.approx(5 * 6 * 2048, rel=0.3)
    for row in rows(words, "--micro-batch-size 3 --max-windows 3")[1:]:
        assert (row["num_micro_batches"], row["micro_batch_size"]) == (2, 3)
        assert row["max_tokens"] == 3 * 2048
    for size, said in (
        (4, "is 6, which --micro-batch-size 4 does not divide"),
        (0, "--micro-batch-size is 0; give at least 1"),
    ):
        assert said in wlb.refusal(words, "--micro-batch-size", size)


def test_recipe_with_mock_data_needs_no_documents_beside_it(wlb, rows) -> None:
    arguments = {"--num-layers": 4, "--seq-length": 2048, "--global-batch-size": 6}
    words = "pack --model recipe.yaml --steps 5 --packing original"
    write("recipe.yaml", {"MODEL_ARGS": arguments})
    assert "no documents; give one of" in wlb.refusal(words)
    write("recipe.yaml", {"MODEL_ARGS": arguments | {"--mock-data": True}})
    (drawn,), (same,) = rows(words), rows(words, "--distribution reference")
    assert {**drawn, "ms_per_step": 0} == {**same, "ms_per_step": 0}
    Path("lengths.txt").write_text("2048\n")
    mock = {"--mock-data": True, "--wlb-mock-lengths": "lengths.txt"}
    write("recipe.yaml", {"MODEL_ARGS": arguments | mock})
    (even,) = rows(words)
    assert even["imbalance_mean"] == pytest.approx(1) != pytest.approx(drawn["imbalance_mean"])


def test_model_file_also_says_the_window_the_batch_and_the_pipeline(wlb, rows) -> None:
    model = {
        "num_layers": 4, "hidden_size": 64, "seq-length": 2048, "--global-batch-size": 6,
        "pipeline_model_parallel_size": 2,
    }  # fmt: skip
    words = "pack corpus --steps 5 --packing original --model"

    def of(content: dict[str, Any], more: str = "") -> dict[str, Any]:
        write("model.yaml", content)
        return {**rows(words, "model.yaml", more)[-1], "ms_per_step": 0}

    row = of(model)
    assert (row["window"], row["num_micro_batches"]) == (2048, 6)
    assert row["bubble_share"] > of(model, "--pp-size 1 --dp-size 1")["bubble_share"]
    other = of(model, "--window 4096 --num-micro-batches 3")
    assert (other["window"], other["num_micro_batches"]) == (4096, 3)
    arguments = {
        "--num-layers": 4, "--hidden-size": 64, "--use-mcore-models": True, "--seq-length": 2048,
        "--global-batch-size": 6, "--pipeline-model-parallel-size": 2,
        "--data-path": "${DATA_PATH}", "--position-embedding-type": "rope",
        "--hidden-dropout": 0, "--attention-dropout": 0,  # Megatron's defaults are others
    }  # fmt: skip
    arguments |= {"--bf16": True, "--use-distributed-optimizer": True}  # as commands assume
    arguments["--overlap-grad-reduce"] = True
    recipe = {"ENV_VARS": {"A": 1}, "MODEL_ARGS": arguments}
    assert of(recipe) == row
    chunks = of(model, "--pp-size 2 --vpp-size 2")
    assert row["mfu"] != chunks["mfu"]  # so small, sends eat what chunks spare
    arguments["--num-layers-per-virtual-pipeline-stage"] = 1
    assert of(recipe)["mfu"] == chunks["mfu"]
    arguments["--use-megatron-fsdp"] = True
    write("model.yaml", recipe)
    said = "model.yaml: --use-megatron-fsdp is not modelled"
    assert said in wlb.refusal(words, "model.yaml")
    # Said, though training has these sizes by default.
    row = of({"seq_length": 8192, "global_batch_size": 8, "wlb_shape": "on"})
    assert (row["window"], row["num_micro_batches"]) == (8192, 8)
    write("model.yaml", {"hidden": 64})
    error = wlb.refusal(words, "model.yaml")
    assert error.startswith("--model model.yaml: unknown flag --hidden")


def test_what_becomes_of_long_documents_is_said(wlb) -> None:
    words = "pack corpus --window 1024 --steps 3 --packing hold"
    said = "documents are longer than the window of 1,024 tokens and cut into pieces"
    assert said in wlb(words).err
    assert "truncated to it, which drops" in wlb(words, "--long-documents truncate").err
    error = wlb.refusal(words, "--long-documents error", status=3)
    assert "above the window of 1024" in error


def test_plot_is_written_whole_and_alone(wlb) -> None:
    before = {path.name for path in Path().iterdir()}
    out = wlb(PACK, "--steps 3 --packing original,hold --plot new/plot.png").out
    assert [path.name for path in Path("new").iterdir()] == ["plot.png"]
    assert Path("new/plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert {path.name for path in Path().iterdir()} == before | {"new"}
    assert "picture: new/plot.png" in out


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("", 2, "no documents; give one of a corpus PREFIX, --distribution NAME and --lengths"),
        ("corpus --distribution reference", 2, "several sources of documents; give one"),
        ("--distribution refrence", 2, "unknown distribution refrence; did you mean"),
        ("nowhere", 3, "no such corpus file: nowhere.idx"),
        ("--lengths none.txt", 3, "cannot read none.txt: No such file"),
        ("corpus --packing hodl", 2, "unknown packing hodl; did you mean hold?"),
        ("corpus --packing ,", 2, "--packing names none"),
        ("corpus --packing wlb:0", 2, "packing wlb:0: '0' is not a number"),
        ("corpus --max-windows 0.5", 2, "--max-windows is 0.5; give at least 1"),
        ("corpus --window 1", 2, "--window is 1; give at least 2"),
        ("corpus --window 9999999999", 2, "--window is 9999999999; give at most 268435456"),
        ("corpus --num-micro-batches 4,x", 2, "--num-micro-batches 4,x is not a list of whole"),
        ("corpus --num-micro-batches ,", 2, "--num-micro-batches names none"),
        ("corpus --steps 0", 2, "--steps is 0; give at least 1"),
        ("corpus --num-micro-batches 2 --global-batch-size 4", 2, "--num-micro-batches is 2, and"),
        ("corpus --seed -1", 2, "--seed is -1; give a number in [0, 4294967296)"),
        ("corpus --cost none.json", 2, "--cost none.json: No such file"),
        ("corpus --model none.yaml", 2, "--model none.yaml: No such file"),
        ("corpus --plot /proc/none/x.png", 2, "cannot write --plot /proc/none/x.png"),
        ("corpus --plot .", 2, "--plot . is a folder; add a file name"),
        (
            "corpus --dp-size 3 --num-micro-batches 4",
            2,
            "4 micro-batches a step do not divide over 3",
        ),
        ("corpus --tp-size 3 --model 7b", 2, "num_attention_heads 32 does not divide over TP 3"),
        ("corpus --ep-size 4 --model 7b", 2, "EP is 4, but the"),
    ],
)
def test_bad_input_is_one_line_before_any_work(
    words: str, status: int, message: str, wlb, monkeypatch
) -> None:
    monkeypatch.setattr("megatron_wlb.cli.inputs.baseline", lambda *_, **__: pytest.fail("packed"))
    assert wlb.refusal("pack", words, status=status).startswith(message)


def test_truncated_index_is_one_line(wlb) -> None:
    index = Path("corpus.idx")
    index.write_bytes(index.read_bytes()[:-7])
    assert wlb.refusal("pack corpus", status=3).startswith("corpus.idx is truncated: ")


def test_measured_table_that_ends_too_soon_is_one_line(wlb) -> None:
    rows = [{"tokens": n, "forward_us": 2.0 * n, "backward_us": 4.0 * n} for n in (16, 4096)]
    tables = {"model": {}, "tp_size": 8, "cp_size": 2, "attention": rows, "linear": rows}
    Path("cost.json").write_text(json.dumps(tables))
    words = "pack corpus --cost cost.json --steps 2 --packing hold --window"
    assert "ends at 4096 tokens, but 8192" in wlb.refusal(words, 4096)
    wlb(words, 4096, "--cost-extrapolate")
    wlb(words, 2048)


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        ("pack", ["fixed-greedy:4", "--num-micro-batches"]),
        ("tune", []),
        ("simulate", ["90% of what context", "All of it is simulated"]),
        ("plan", ["90% of what context", "All of it is simulated"]),
    ],
)
def test_help_teaches_by_examples(command: str, texts: list[str], wlb) -> None:
    out = " ".join(wlb.help(command).split())
    assert f"wlb {command} --distribution reference" in out.partition("examples: ")[2]
    assert all(text in out for text in texts)


def test_replicas_that_share_experts_keep_each_other_waiting(wlb, rows) -> None:
    words = f"{PACK} --model mixtral-8x7b --steps 4 --num-micro-batches 16 --dp-size 4 --pp-size 2"
    alone, even = rows(words, "--packing original,hold")
    shared, balanced = rows(words, "--packing original,hold --ep-size 4")
    lost = shared["mfu"] / alone["mfu"]
    assert lost < 0.98 and lost < balanced["mfu"] / even["mfu"]
    assert "does not divide" in wlb.refusal(words, "--ep-size 3")


def test_flag_that_no_packing_reads_is_told(wlb) -> None:
    words = "--queue-thresholds 100 --hold-tau 1.1 --steps 2 --packing original,hold"
    err = wlb(PACK, words).err
    assert [line for line in err.splitlines() if "no effect" in line] == [
        "note: --queue-thresholds has no effect: original, hold do not read it"
    ]
