from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.index import write_index

from megatron_wlb.cli.main import main

KEYS = {
    "packing", "num_micro_batches", "max_windows", "imbalance_mean", "imbalance_time_weighted",
    "imbalance_p95", "delay_mean", "delay_p99", "delay_max", "tokens_cv", "padding", "ms_per_step",
    "documents",
}  # fmt: skip
REFERENCE = ["--distribution", "reference"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lengths = np.random.default_rng(1).lognormal(5, 1.6, 900).astype(int).clip(1, 9000)
    write_index("corpus", lengths.tolist())
    Path("lengths.txt").write_text("".join(f"{length}\n" for length in lengths))
    np.save("lengths.npy", lengths)
    return tmp_path


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    assert main(["pack", *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result.keys() == {"rows"}
    assert all(row.keys() >= KEYS for row in result["rows"])
    return result["rows"]


def test_json_has_a_row_for_each_packing_and_n(capsys) -> None:
    found = rows(capsys, *REFERENCE, "--steps", "8", "--num-micro-batches", "4,6")
    by_n = {n: [row for row in found if row["num_micro_batches"] == n] for n in (4, 6)}
    for of_n in by_n.values():
        shown = [(row["packing"], row["fixed_batches"]) for row in of_n]
        usual = [("original", 1), *(("fixed-greedy", k) for k in (1, 2, 4, 8)), ("wlb", 1)]
        assert shown[:7] == [*usual, ("hold", 1)]
        original, hold = of_n[0], of_n[6]
        assert original["imbalance_mean"] > hold["imbalance_mean"] >= 1
        assert original["delay_mean"] == 0 < hold["delay_mean"] <= hold["delay_max"]
        assert original["work_speedup"] == 1 < hold["work_speedup"]
        assert all(row["steps"] == 8 and row["max_windows"] == 2 for row in of_n)
    spaced = rows(capsys, *REFERENCE, "--steps", "8", "--num-micro-batches", "4", "6")
    assert [r["imbalance_mean"] for r in spaced] == [r["imbalance_mean"] for r in found]


def test_all_sources_of_the_same_lengths_give_the_same_figures(capsys) -> None:
    options = ["--window", "4096", "--steps", "8", "--packing", "hold,original"]
    found = [
        [row["imbalance_mean"] for row in rows(capsys, *source, *options)]
        for source in (["corpus"], ["--lengths", "lengths.txt"], ["--lengths", "lengths.npy"])
    ]
    assert found[0] == found[1] == found[2] and len(found[0]) == 2


def test_table_ends_with_advice(capsys) -> None:
    assert main(["pack", *REFERENCE, "--steps", "40", "--packing", "original,wlb:1,hold"]) == 0
    out, err = capsys.readouterr()
    assert all(line.startswith("packing: ") for line in err.splitlines())
    assert "wlb, L 65536" in out
    advice = out[out.rindex("At N=4 ") :]
    assert "train with --wlb-packing" in advice and "--wlb-max-tokens 262144" in advice
    assert "modelled" in advice


def test_solver_runs_only_when_asked_and_over_fewer_steps(capsys) -> None:
    pytest.importorskip("ortools")
    arguments = ["--window", "2048", "--steps", "2", "--solver-limit", "0.05"]
    (row,) = rows(capsys, *REFERENCE, *arguments, "--packing", "fixed-solver")
    assert row["packing"] == "fixed-solver" and row["steps"] == 2
    assert row["work_speedup"] is None


def test_settings_of_packings_are_passed_on(capsys) -> None:
    options = [*REFERENCE, "--steps", "30", "--window", "8192"]
    free, priced = (
        rows(capsys, *options, "--packing", "hold", "--delay-price", price)[0]
        for price in ("0.02", "3")
    )
    assert free["delay_mean"] > priced["delay_mean"]
    low, high = (
        rows(capsys, *options, "--packing", "wlb", "--queue-thresholds", at)[0]
        for at in ("1000", "8000")
    )
    assert low["delay_mean"] != high["delay_mean"] and low["queue_thresholds"] == [1000]
    tight = rows(capsys, *options, "--packing", "hold", "--max-windows", "1.25")[0]
    assert tight["max_tokens"] == 10240 and tight["imbalance_mean"] > free["imbalance_mean"]
    capped = rows(capsys, *options, "--packing", "hold", "--max-step-tokens", "33000")[0]
    assert capped["tokens_cv"] < free["tokens_cv"]
    aged = rows(capsys, *options, "--packing", "wlb", "--max-age", "2")[0]
    assert aged["delay_max"] <= 3


def test_padding_is_shown_where_there_is_any(capsys) -> None:
    options = ["pack", *REFERENCE, "--steps", "4", "--packing", "hold", "--window", "4096"]
    assert main([*options, "--length-multiple", "512"]) == 0
    padded = capsys.readouterr().out
    assert main(options) == 0
    assert "padding" in padded and "padding" not in capsys.readouterr().out


def test_pipeline_raises_the_price_of_imbalance(capsys) -> None:
    options = [*REFERENCE, "--steps", "30", "--packing", "original,hold"]
    plain = rows(capsys, *options)[1]
    piped = rows(capsys, *options, "--pp-size", "2", "--dp-size", "2")[1]
    assert piped["efficiency"] < plain["efficiency"]
    assert 1 < piped["work_speedup"] != plain["work_speedup"]


def test_numbers_chosen_by_step_are_over_original_as_megatron_runs_it(capsys) -> None:
    packings = "original,original+auto,hold,hold+auto"
    options = ["--steps", "12", "--num-micro-batches", "4", "--pp-size", "4", "--packing", packings]
    found = rows(capsys, *REFERENCE, *options)
    original, own, hold, chosen = (row["work_speedup"] for row in found)
    assert original == 1 < own and hold < chosen
    assert [row["title"] for row in found] == [
        "original", "original, auto N", "hold", "hold, auto N",
    ]  # fmt: skip
    assert found[3]["flags"][-2:] == ["--wlb-micro-batches", "auto"]
    alone = rows(capsys, *REFERENCE, *options[:4], "--packing", "hold,hold+auto")
    assert alone[0]["imbalance_mean"] == alone[1]["imbalance_mean"]  # without a pipeline


def test_model_and_hardware_make_another_cost(capsys) -> None:
    Path("model.yaml").write_text(
        "num_layers: 32\nhidden_size: 4096\nnum_attention_heads: 32\nffn_hidden_size: 11008\n"
        "swiglu: true\nbf16: true\nvocab_size: 32000\n"
    )
    options = [*REFERENCE, "--steps", "10", "--packing", "original"]
    ours = rows(capsys, *options, "--model", "model.yaml")[0]["imbalance_mean"]
    default = rows(capsys, *options)[0]["imbalance_mean"]
    slow = rows(capsys, *options, "--model", "model.yaml", "--hardware", "cpu")[0]["imbalance_mean"]
    assert len({ours, default, slow}) == 3
    # The reference is the same model at other rates: attention weighs alike, within a third.
    assert (ours - 1) == pytest.approx(default - 1, rel=1 / 3)


def test_micro_batches_stand_for_the_windows_of_the_recipe_or_the_flag(capsys) -> None:
    """N is what they divide the batch into; S_max is twice their windows."""
    sizes = "num_layers: 4\nhidden_size: 64\nseq-length: 2048\nglobal_batch_size: 6\n"
    Path("model.yaml").write_text(sizes + "micro_batch_size: 2\n")
    options = ["corpus", "--model", "model.yaml", "--steps", "5", "--packing", "original,hold"]
    for row in rows(capsys, *options):
        assert (row["num_micro_batches"], row["micro_batch_size"]) == (3, 2)
        assert row["max_windows"] == 4
        assert row["tokens"] == pytest.approx(5 * 6 * 2048, rel=0.3)
    for row in rows(capsys, *options, "--micro-batch-size", "3", "--max-windows", "3"):
        assert (row["num_micro_batches"], row["micro_batch_size"]) == (2, 3)
        assert row["max_windows"] == 3
    assert main(["pack", *options, "--micro-batch-size", "4"]) == 2
    assert "is 6, which --micro-batch-size 4 does not divide" in capsys.readouterr().err
    assert main(["pack", *options, "--micro-batch-size", "0"]) == 2
    assert "--micro-batch-size is 0; give at least 1" in capsys.readouterr().err


def test_recipe_with_mock_data_needs_no_documents_beside_it(capsys) -> None:
    text = "MODEL_ARGS:\n  --num-layers: 4\n  --seq-length: 2048\n  --global-batch-size: 6\n"
    Path("recipe.yaml").write_text(text)
    options = ["--model", "recipe.yaml", "--steps", "5", "--packing", "original"]
    assert main(["pack", *options]) == 2
    assert "no documents; give one of" in capsys.readouterr().err
    Path("recipe.yaml").write_text(text + "  --mock-data: true\n")
    (drawn,) = rows(capsys, *options)
    (same,) = rows(capsys, *options, "--distribution", "reference")
    assert {**drawn, "ms_per_step": 0} == {**same, "ms_per_step": 0}
    Path("lengths.txt").write_text("2048\n")
    Path("recipe.yaml").write_text(
        text + "  --mock-data: true\n  --wlb-mock-lengths: lengths.txt\n"
    )
    (even,) = rows(capsys, *options)
    assert even["imbalance_mean"] == pytest.approx(1) != pytest.approx(drawn["imbalance_mean"])


def test_model_file_also_says_the_window_the_batch_and_the_pipeline(capsys) -> None:
    Path("model.yaml").write_text(
        "num_layers: 4\nhidden_size: 64\nseq-length: 2048\n--global-batch-size: 6\n"
        "pipeline_model_parallel_size: 2\n"
    )
    options = ["corpus", "--model", "model.yaml", "--steps", "5", "--packing", "original"]
    (row,) = rows(capsys, *options)
    assert (row["window"], row["num_micro_batches"]) == (2048, 6)
    (alone,) = rows(capsys, *options, "--pp-size", "1")
    assert row["efficiency"] < 0.95 < alone["efficiency"]  # without bubbles
    (row,) = rows(capsys, *options, "--window", "4096", "--num-micro-batches", "3")
    assert (row["window"], row["num_micro_batches"]) == (4096, 3)
    Path("recipe.yaml").write_text(
        "ENV_VARS: {A: 1}\nMODEL_ARGS:\n  --num-layers: 4\n  --hidden-size: 64\n"
        "  --use-mcore-models: true\n  --seq-length: 2048\n  --global-batch-size: 6\n"
        "  --pipeline-model-parallel-size: 2\n  --data-path: ${DATA_PATH}\n"
    )
    (recipe,) = rows(capsys, *options[:2], "recipe.yaml", *options[3:])
    (again,) = rows(capsys, *options)
    assert {**recipe, "ms_per_step": 0} == {**again, "ms_per_step": 0}
    (chunks,) = rows(capsys, *options, "--pp-size", "2", "--vpp-size", "2")
    assert again["efficiency"] != chunks["efficiency"]  # so small, sends eat what chunks spare
    Path("recipe.yaml").write_text(
        Path("recipe.yaml").read_text() + "  --num-layers-per-virtual-pipeline-stage: 1\n"
    )
    (recipe,) = rows(capsys, *options[:2], "recipe.yaml", *options[3:])
    assert recipe["efficiency"] == chunks["efficiency"]
    Path("recipe.yaml").write_text(
        Path("recipe.yaml").read_text() + "  --use-megatron-fsdp: true\n"
    )
    assert main(["pack", *options[:2], "recipe.yaml", *options[3:]]) == 2
    assert "recipe.yaml: --use-megatron-fsdp is not modelled" in capsys.readouterr().err
    Path("model.yaml").write_text("seq_length: 8192\nglobal_batch_size: 8\nwlb_shape: on\n")
    (row,) = rows(capsys, *options)  # said, though training has these sizes by default
    assert (row["window"], row["num_micro_batches"]) == (8192, 8)
    Path("model.yaml").write_text("pipeline_model_parallel_size: 1\n")
    (row,) = rows(capsys, *options, "--window", "2048")
    assert row["efficiency"] == pytest.approx(1 / row["imbalance_time_weighted"])
    Path("model.yaml").write_text("hidden: 64\n")
    assert main(["pack", *options]) == 2
    assert capsys.readouterr().err.startswith("error: --model model.yaml: unknown flag --hidden")


def test_what_becomes_of_long_documents_is_said(capsys) -> None:
    command = ["pack", "corpus", "--window", "1024", "--steps", "3", "--packing", "hold"]
    assert main(command) == 0
    err = capsys.readouterr().err
    assert "documents are longer than the window of 1,024 tokens and cut into pieces" in err
    assert main([*command, "--long-documents", "truncate"]) == 0
    assert "truncated to it, which drops" in capsys.readouterr().err
    assert main([*command, "--long-documents", "error"]) == 3
    assert "above the window of 1024" in capsys.readouterr().err


def test_documents_that_are_all_alike_are_left_as_they_are(capsys) -> None:
    Path("equal.txt").write_text("256\n" * 500)
    assert main(["pack", "--lengths", "equal.txt", "--window", "1024", "--steps", "5"]) == 0
    assert "is faster than original, which has imbalance 1.000: keep it" in capsys.readouterr().out


def test_plot_is_written_whole_and_alone(folder: Path, capsys) -> None:
    before = {path.name for path in folder.iterdir()}
    command = ["pack", *REFERENCE, "--steps", "3", "--packing", "original,hold"]
    assert main([*command, "--plot", "new/plot.png"]) == 0
    assert [path.name for path in (folder / "new").iterdir()] == ["plot.png"]
    assert (folder / "new/plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert {path.name for path in folder.iterdir()} == before | {"new"}
    assert "picture: new/plot.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "no documents; give one of a corpus PREFIX, --distribution NAME and --lengths"),
        (["corpus", *REFERENCE], 2, "several sources of documents; give one"),
        (
            ["--distribution", "refrence"],
            2,
            "unknown distribution refrence; did you mean",
        ),
        (["nowhere"], 3, "no such corpus file: nowhere.idx"),
        (["--lengths", "none.txt"], 3, "cannot read none.txt: No such file"),
        ([*REFERENCE, "--packing", "hodl"], 2, "unknown packing hodl; did you mean hold?"),
        ([*REFERENCE, "--packing", ","], 2, "--packing names none"),
        ([*REFERENCE, "--packing", "wlb:0"], 2, "packing wlb:0: '0' is no number"),
        ([*REFERENCE, "--max-windows", "0.5"], 2, "--max-windows is 0.5; give at least 1"),
        ([*REFERENCE, "--window", "1"], 2, "--window is 1; give at least 2"),
        (
            [*REFERENCE, "--window", "9999999999"],
            2,
            "--window is 9999999999; give at most 268435456",
        ),
        (
            [*REFERENCE, "--num-micro-batches", "4,x"],
            2,
            "--num-micro-batches 4,x is no list of whole",
        ),
        ([*REFERENCE, "--num-micro-batches", ","], 2, "--num-micro-batches names none"),
        ([*REFERENCE, "--steps", "0"], 2, "--steps is 0; give at least 1"),
        ([*REFERENCE, "--seed", "-1"], 2, "--seed is -1; give at least 0"),
        ([*REFERENCE, "--hardware", "h200"], 2, "--hardware is the machine of --model FILE"),
        ([*REFERENCE, "--cost", "none.json"], 2, "--cost none.json: No such file"),
        ([*REFERENCE, "--model", "none.yaml"], 2, "model none.yaml: No such file"),
        ([*REFERENCE, "--plot", "/proc/none/x.png"], 2, "cannot write --plot /proc/none/x.png"),
        ([*REFERENCE, "--plot", "."], 2, "--plot . is a folder; add a file name"),
        ([*REFERENCE, "--dp-size", "3"], 2, "4 micro-batches a step do not divide over 3"),
    ],
)
def test_bad_input_is_one_line_before_any_work(
    arguments: list[str], status: int, message: str, capsys, monkeypatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("packed all the same")

    monkeypatch.setattr("megatron_wlb.cli.pack.evaluate", work)
    assert main(["pack", *arguments]) == status
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1


def test_truncated_index_is_one_line(capsys) -> None:
    index = Path("corpus.idx")
    index.write_bytes(index.read_bytes()[:-7])
    assert main(["pack", "corpus"]) == 3
    assert capsys.readouterr().err.startswith("error: corpus.idx is truncated: ")


def test_measured_table_that_ends_too_soon_is_one_line(capsys) -> None:
    rows = [{"tokens": n, "forward_us": 2.0 * n, "backward_us": 4.0 * n} for n in (16, 4096)]
    tables = {"model": {}, "tp_size": 1, "cp_size": 1, "attention": rows, "linear": rows}
    Path("cost.json").write_text(json.dumps(tables))
    command = ["pack", "corpus", "--cost", "cost.json", "--steps", "2", "--packing", "hold"]
    assert main([*command, "--window", "4096"]) == 2
    assert "ends at 4096 tokens, but 8192" in capsys.readouterr().err
    assert main([*command, "--window", "4096", "--cost-extrapolate"]) == 0
    assert main([*command, "--window", "2048"]) == 0


def test_help_teaches_by_examples(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["pack", "--help"])
    out = capsys.readouterr().out
    assert "examples:\n  wlb pack --distribution reference" in out
    assert "fixed-greedy:4" in out and "--num-micro-batches" in out


def test_pipeline_is_advised_to_cut_slices(capsys) -> None:
    arguments = ["pack", "--distribution", "reference", "--pp-size", "4", "--steps", "6"]
    assert main([*arguments, "--packing", "original,hold,slim"]) == 0
    advice = capsys.readouterr().out.splitlines()[-1]
    assert "train with --wlb-packing slim" in advice and "run in slices" in advice
    assert "memory for micro-batches" not in advice and "delays a token by 0.000" in advice


def test_replicas_that_share_experts_keep_each_other_waiting(capsys) -> None:
    options = ["--distribution", "reference", "--model", "mixtral-8x7b", "--steps", "4"]
    options += ["--num-micro-batches", "16", "--dp-size", "4", "--pp-size", "2"]
    both, divided = ["--packing", "original,hold"], ["--ep-size", "4"]
    alone, even = rows(capsys, *options, *both)
    shared, balanced = rows(capsys, *options, *both, *divided)
    lost = shared["efficiency"] / alone["efficiency"]
    assert lost < 0.98 and lost < balanced["efficiency"] / even["efficiency"]
    assert main(["pack", *options, *divided]) == 0
    assert "slim" not in capsys.readouterr().out
    assert main(["pack", *options, "--packing", "slim", *divided]) == 2
    assert "exchange tokens with experts" in capsys.readouterr().err
    assert main(["pack", *options, "--ep-size", "3"]) == 2
    assert "does not divide" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "said"),
    [([], "--ep-size divides the experts of --model"), (["--model", "7b"], "EP is 4, but the")],
)
def test_experts_that_no_model_has_are_not_divided(model: list[str], said: str, capsys) -> None:
    assert main(["pack", "--distribution", "reference", *model, "--ep-size", "4"]) == 2
    assert said in capsys.readouterr().err


def test_flag_that_no_packing_reads_is_told(capsys) -> None:
    given = ["--queue-thresholds", "100", "--hold-tau", "1.1", "--steps", "2"]
    assert main(["pack", *REFERENCE, *given, "--packing", "original,hold"]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "no effect" in line] == [
        "note: --queue-thresholds has no effect: original, hold do not read it"
    ]
