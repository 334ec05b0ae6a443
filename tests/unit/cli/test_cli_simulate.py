from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers.index import write_index

from megatron_wlb.cli.main import main
from megatron_wlb.cost.attention import AttentionProfile

SIZES = {
    "hidden_size": 256, "ffn_hidden_size": 640, "num_layers": 8, "num_attention_heads": 8,
    "num_query_groups": 8, "kv_channels": 32, "vocab_size": 1000, "gated": True,
}  # fmt: skip
SETTINGS = {
    "num-layers": 8, "hidden-size": 256, "ffn-hidden-size": 640, "num-attention-heads": 8,
    "swiglu": True, "seq-length": 2048, "global-batch-size": 6,
    "pipeline-model-parallel-size": 2, "context-parallel-size": 2,
}  # fmt: skip
VPP = {"num-virtual-stages-per-pipeline-rank": 2}
QUICK = ["--steps", "3", "--num-seeds", "1"]
SMALL = ["--model", "small.yaml", "--window", "4096", *QUICK]
REFERENCE = ["--distribution", "reference"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump(SIZES))
    Path("settings.yaml").write_text(yaml.safe_dump(SETTINGS))
    lengths = np.random.default_rng(1).lognormal(6, 1.4, 900).astype(int).clip(1, 9000)
    write_index("corpus", lengths.tolist())
    Path("lengths.txt").write_text("".join(f"{length}\n" for length in lengths))
    return tmp_path


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    assert main(["simulate", *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["simulated"] is True
    return result["rows"]


def test_json_has_a_row_for_each_packing_and_sharding(capsys) -> None:
    found = rows(
        capsys, *REFERENCE, *SMALL, "--cp-size", "2", "--pp-size", "2", "--dp-size", "2",
        "--num-micro-batches", "8", "--packing", "wlb:3,hold+shape", "--sharding", "hybrid",
    )  # fmt: skip
    assert [(row["packing"], row["shaped"], row["sharding"]) for row in found] == [
        (packing, shaped, sharding)
        for packing, shaped in (("original", False), ("wlb", False), ("hold", True))
        for sharding in ("per-sequence", "hybrid")
    ]
    assert found[0]["speedup"] == 1 < found[-1]["speedup"]
    for row in found:
        assert row["step_ms"] > 0 and row["tokens_per_s"] > 0 and row["peak_gib"] > 0
        assert 0 < row["mfu"] < 1 and 0 < row["bubble_share"] < 1
        assert min(row[f"{level}_imbalance"] for level in ("pp", "cp", "dp")) >= 1
        assert row["speedup_lowest"] <= row["speedup"] <= row["speedup_highest"]


def test_default_compares_shaped_steps_where_there_are_stages(capsys) -> None:
    one = rows(capsys, *REFERENCE, *SMALL, "--num-micro-batches", "4")
    assert [row["title"] for row in one] == ["original", "fixed-greedy, 1 batch", "wlb", "hold"]
    two = rows(capsys, *REFERENCE, *SMALL, "--pp-size", "2")
    assert [row["title"] for row in two] == [*(row["title"] for row in one), "hold, shaped", "slim"]
    chunks = rows(capsys, *REFERENCE, *SMALL, "--pp-size", "2", "--vpp-size", "2")
    assert "slim" not in {row["title"] for row in chunks}  # slices have no virtual stages
    assert {row["sharding"] for row in two} == {"per-sequence"}


def test_all_sources_of_the_same_lengths_give_the_same_figures(capsys) -> None:
    found = [
        [row["mfu"] for row in rows(capsys, *source, *SMALL, "--packing", "hold")]
        for source in (["corpus"], ["--lengths", "lengths.txt"])
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_help_teaches_with_examples(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    assert f"wlb {command} --distribution reference --model" in out
    assert "90% of what context" in out and "All of it is simulated" in out


def test_seed_decides_the_figures(capsys) -> None:
    first, again, other = (
        [row["mfu"] for row in rows(capsys, *REFERENCE, *SMALL, "--seed", seed)]
        for seed in ("1", "1", "2")
    )
    assert first == again != other


def test_training_settings_give_model_window_batch_and_layout(capsys) -> None:
    ours = rows(capsys, *REFERENCE, "--model", "settings.yaml", *QUICK, "--packing", "hold")
    given = rows(
        capsys, *REFERENCE, "--model", "settings.yaml", "--window", "2048", "--cp-size", "2",
        "--pp-size", "2", "--num-micro-batches", "6", *QUICK, "--packing", "hold",
    )  # fmt: skip
    assert ours == given
    assert {row["sharding"] for row in ours} == {"per-sequence", "adaptive"}
    other = rows(
        capsys,
        *REFERENCE,
        "--model",
        "settings.yaml",
        "--cp-size",
        "1",
        *QUICK,
        "--packing",
        "hold",
    )
    assert {row["sharding"] for row in other} == {"per-sequence"}


def test_training_settings_give_recomputation_and_group_size(capsys) -> None:
    def of(*arguments: str, **settings: object) -> dict:
        Path("some.yaml").write_text(yaml.safe_dump(SETTINGS | VPP | settings))
        given = ["--model", "some.yaml", "--packing", "original", "--cp-size", "1", *arguments]
        (row,) = rows(capsys, *REFERENCE, *given, *QUICK)
        return row

    block = {"recompute-granularity": "full", "recompute-method": "block"}
    first = of(**block, **{"recompute-num-layers": 1})
    both = of(**block, **{"recompute-num-layers": 2})
    plain = of()
    assert plain["peak_gib"] > first["peak_gib"] > both["peak_gib"]
    assert plain["step_ms"] < first["step_ms"] < both["step_ms"]
    assert of("--recompute", "none", **block, **{"recompute-num-layers": 1}) == plain
    grouped = of(**{"microbatch-group-size-per-virtual-pipeline-stage": 6})
    assert grouped["peak_gib"] > plain["peak_gib"]


def test_no_micro_batches_are_refused_though_the_settings_have_some(capsys) -> None:
    given = ["--model", "settings.yaml", "--num-micro-batches", "0", *QUICK]
    assert main(["simulate", *REFERENCE, *given]) == 2
    assert "num_micro_batches is 0; give at least 1" in capsys.readouterr().err


def test_report_leaves_documents_without_tokens_out(capsys) -> None:
    write_index("gaps", [0, 5, 0, *range(100, 3000, 7)])
    assert main(["simulate", "gaps", *SMALL, "--packing", "hold", "--report", "gaps.html"]) == 0
    data = re.search(r'id="data">(.*?)</script>', Path("gaps.html").read_text(), re.DOTALL)
    assert data is not None
    assert "416 documents" in json.loads(data[1])["lengths"]["text"]


def test_recipe_of_the_paper_is_simulated_as_it_stands(capsys) -> None:
    recipe = str(_configs() / "experiment" / "7b-128k.yaml")
    assert main(["simulate", *REFERENCE, "--model", recipe, *QUICK, "--packing", "hold"]) == 0
    out = capsys.readouterr().out
    assert "7b-128k on 64 × h100-sxm, TP 8 × CP 2 × PP 4 × VPP 2, window 131,072, N 4" in out


def test_devices_of_a_recipe_give_its_data_parallel_ranks(capsys) -> None:
    recipe = str(_configs() / "experiment" / "550m-64k.yaml")
    given = ["simulate", *REFERENCE, "--model", recipe, *QUICK, "--packing", "original"]
    assert main(given) == 0
    assert "on 32 × h100-sxm, TP 2 × CP 2 × PP 4 × VPP 2 × DP 2," in capsys.readouterr().out
    assert main([*given, "--dp-size", "1"]) == 0
    assert "on 16 × h100-sxm, TP 2 × CP 2 × PP 4 × VPP 2," in capsys.readouterr().out
    assert main([*given, "--cp-size", "3"]) == 2
    assert "the 32 devices of --model" in capsys.readouterr().err


def test_attention_table_that_does_not_fit_is_said_to_be_left_out(capsys) -> None:
    figures = yaml.safe_load((_configs() / "hardware" / "cpu.yaml").read_text())
    row = (1.0, 9.0)
    table = AttentionProfile(
        "sdpa", "here", "float32", 8, 8, 32, 1, 1, (1, 8192), (row, (9.0,)), (row, (9.0,)), row, row
    )
    for dtype, said in (("float32", 1), ("bfloat16", 0)):
        one = replace(table, dtype=dtype).as_dict()
        Path("ours.yaml").write_text(yaml.safe_dump(figures | {"attention": [one]}))
        given = [*SMALL, "--hardware", "ours.yaml", "--packing", "original"]
        assert main(["simulate", *REFERENCE, *given]) == 0
        err = capsys.readouterr().err
        assert err.count("has no attention table of bfloat16 heads of 32") == said


def test_sentences_are_whole_lines_with_names_as_they_are(capsys) -> None:
    Path("[b]").mkdir()
    given = [*SMALL, "--memory-gib", "0.1", "--report", "[b]/step.html"]
    assert main(["simulate", *REFERENCE, *given]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "report: [b]/step.html" in lines
    (line,) = (line for line in lines if "out of memory" in line)
    assert line.endswith("use more TP, CP or PP")


def test_files_are_written_whole(capsys, folder: Path) -> None:
    status = main(
        ["simulate", *REFERENCE, *SMALL, "--pp-size", "2", "--packing", "hold", "--report",
         "new/r.html", "--trace", "t.json", "--plot", "p.png"]
    )  # fmt: skip
    assert status == 0
    out = capsys.readouterr().out
    assert "simulated: 3 steps of each" in out and "report: new/r.html" in out
    assert Path("new/r.html").read_text().endswith("</html>\n")
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"original, per-sequence", "hold, per-sequence"}
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    assert main(["simulate", *REFERENCE, *SMALL, "--pp-size", "2", "--plot", "p.svg"]) == 0
    assert "</svg>" in Path("p.svg").read_text()
    assert not [path.name for path in folder.rglob(".*")]


def test_memory_that_is_too_small_is_said_not_refused(capsys) -> None:
    assert main(["simulate", *REFERENCE, *SMALL, "--memory-gib", "0.2"]) == 0
    captured = capsys.readouterr()
    assert "note: S_max is one window" in captured.err
    assert re.search(r"out of memory: pipeline rank 0 at .*above the limit of 0.20 GiB",
                     " ".join(captured.out.split()))  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--pp-size", "3"], 2, "8 layers do not divide over 3"),
        (["--tp-size", "3"], 2, "does not divide over TP 3"),
        (["--dp-size", "2", "--num-micro-batches", "3"], 2, "3 micro-batches a step do not divide"),
        (["--pp-size", "4", "--vpp-size", "2", "--num-micro-batches", "3"], 2, "group_size"),
        (["--dp-size", "0"], 2, "--dp-size is 0; give at least 1"),
        (["--num-micro-batches", "-1"], 2, "num_micro_batches is -1"),
        (["--memory-gib", "-3"], 2, "--memory-gib is -3.0"),
        (["--hardware", "h1000"], 2, "unknown hardware h1000"),
        (["--hardware", "slow.yaml"], 2, "tp_overlap, cp_overlap are missing; add them"),
        (["--hardware", "negative.yaml"], 2, "latency_us is -5"),
        (["--cost", "cost.yaml"], 2, "forward_linear_us is -1"),
        (["--model", "9b"], 2, "unknown model 9b; use"),
        (["--model", "typo.yaml"], 2, "typo.yaml"),
        (["--packing", "hodl"], 2, "did you mean hold"),
        (["--packing", "original+shape"], 2, "cannot be shaped"),
        (["--packing", "hold,fixed-greedy+shape"], 2, "cannot be shaped"),
        (["--sharding", "adaptive"], 2, "needs context parallelism"),
        (["--cp-size", "2", "--sharding", "zigzag"], 2, "unknown sharding zigzag"),
        (["--max-windows", "0.5"], 2, "--max-windows is 0.5"),
        (["--steps", "0"], 2, "--steps is 0"),
        (["--plot", "p.jpg"], 2, "is no picture; call it .png or .svg"),
        (["--report", "."], 2, "is a folder"),
        (["--trace", "small.yaml/t.json"], 2, "cannot write --trace"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_file(
    arguments: list[str], status: int, says: str, capsys, folder: Path
) -> None:
    Path("slow.yaml").write_text("memory_gb_s: {value: 3, source: guess}\n")
    figures = yaml.safe_load((_configs() / "hardware" / "cpu.yaml").read_text())
    figures["latency_us"]["value"] = -5
    Path("negative.yaml").write_text(yaml.safe_dump(figures))
    Path("cost.yaml").write_text(
        "{forward_linear_us: -1, forward_quadratic_us: 1, backward_linear_us: 1, "
        "backward_quadratic_us: 1}"
    )
    Path("typo.yaml").write_text(yaml.safe_dump(SIZES | {"gate": True}))
    before = sorted(folder.rglob("*"))
    output = ["--report", "r.html", "--trace", "t.json", "--plot", "p.png"]
    assert main(["simulate", *REFERENCE, *SMALL, *output, *arguments]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    error = captured.err.splitlines()[-1]
    assert error.startswith("error: ") and says in error, error
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ([], 2, "no documents"),
        (["nowhere"], 3, "nowhere"),
        (["--lengths", "empty.txt"], 3, "no lengths"),
        (["corpus", "--long-documents", "error"], 3, "above the window"),
    ],
)
def test_bad_documents_are_one_line(arguments: list[str], status: int, says: str, capsys) -> None:
    Path("empty.txt").write_text("")
    assert main(["simulate", *SMALL, *arguments]) == status
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_corpus_is_not_read_whole(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten million documents only those of the simulated steps are drawn."""
    from megatron_wlb.data import length_source

    drawn = []
    real = length_source.DocumentStream
    monkeypatch.setattr(
        length_source, "DocumentStream",
        lambda lengths, **options: drawn.append(len(lengths[0])) or real(lengths, **options),
    )  # fmt: skip
    np.save("many.npy", np.full(10_000_000, 700, dtype=np.int32))
    rows(capsys, "--lengths", "many.npy", *SMALL, "--packing", "hold")
    assert drawn and max(drawn) < 50_000


def _configs() -> Path:
    return Path(__file__).parents[3] / "configs"


def test_replicas_that_share_experts_wait_for_each_other(capsys) -> None:
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 320}
    Path("experts.yaml").write_text(yaml.safe_dump(SIZES | experts))
    sizes = ["--pp-size", "2", "--dp-size", "4", "--num-micro-batches", "16", "--window", "4096"]
    command = [*REFERENCE, "--model", "experts.yaml", *QUICK, *sizes, "--packing", "wlb"]
    alone, _ = rows(capsys, *command)
    shared, balanced = rows(capsys, *command, "--ep-size", "4")
    assert alone["expert_wait_share"] == 0 < balanced["expert_wait_share"]
    assert balanced["expert_wait_share"] < 0.5 * shared["expert_wait_share"]
    assert shared["peak_gib"] < alone["peak_gib"]  # a quarter of the experts
    uneven, _ = rows(capsys, *command, "--ep-size", "4", "--expert-imbalance", "3")
    assert uneven["peak_gib"] > shared["peak_gib"]
    assert uneven["step_ms"] == shared["step_ms"]
    assert main(["simulate", *command, "--ep-size", "4"]) == 0
    assert "DP 4 × EP 4" in (out := capsys.readouterr().out) and "experts" in out
    assert main(["simulate", *command, "--ep-size", "3"]) == 2
    assert "EP 3" in capsys.readouterr().err
    assert main(["simulate", *REFERENCE, *SMALL, "--dp-size", "2", "--ep-size", "2"]) == 2
    assert "EP is 2, but the model has no experts" in capsys.readouterr().err


def test_recipe_says_how_experts_are_divided(capsys) -> None:
    experts = {
        "num-experts": 8, "moe-router-topk": 2, "moe-layer-freq": "[0]*2+[1]*6",
        "expert-model-parallel-size": 4, "disable-bias-linear": True,
    }  # fmt: skip
    Path("experts.yaml").write_text(yaml.safe_dump(SETTINGS | experts))
    command = [*REFERENCE, "--model", "experts.yaml", *QUICK, "--dp-size", "2"]
    said, *_ = rows(capsys, *command, "--num-micro-batches", "8")
    given, *_ = rows(capsys, *command, "--num-micro-batches", "8", "--ep-size", "4")
    other, *_ = rows(capsys, *command, "--num-micro-batches", "8", "--ep-size", "1")
    assert said == given and said["expert_wait_share"] > 0 == other["expert_wait_share"]
