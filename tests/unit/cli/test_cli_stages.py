"""Uneven stages in commands: by flags, and as a file of settings or a recipe has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megatron_wlb.cli.main import main
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import parallelism
from megatron_wlb.planning.from_words import settings_of

SETTINGS = {
    "num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 4096,
    "global_batch_size": 8, "vocab_size": 64000, "pipeline_model_parallel_size": 4,
}  # fmt: skip
LAST = "decoder_last_pipeline_num_layers"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, more in {
        "even": {}, "uneven": {"num_layers": 8, LAST: 2, "decoder_first_pipeline_num_layers": 1},
        "last": {LAST: 5}, "layout": {"pipeline_model_parallel_layout": "Et|t|t|t*5L"},
    }.items():  # fmt: skip
        Path(f"{name}.yaml").write_text(yaml.safe_dump(SETTINGS | more))


def step_ms(capsys: pytest.CaptureFixture[str], *arguments: str) -> float:
    common = ["simulate", "--distribution", "reference", "--packing", "original", "--json"]
    assert main([*common, "--steps", "3", "--num-seeds", "1", *arguments]) == 0
    return float(json.loads(capsys.readouterr().out)["rows"][0]["step_ms"])


def test_flags_say_what_a_file_of_settings_says(capsys: pytest.CaptureFixture[str]) -> None:
    even = step_ms(capsys, "--model", "even.yaml")
    last = step_ms(capsys, "--model", "last.yaml")
    # The head and five layers run on one rank.
    assert last > 1.05 * even
    assert step_ms(capsys, "--model", "layout.yaml") == last
    five = ["--decoder-last-pipeline-num-layers", "5"]
    assert step_ms(capsys, "--model", "even.yaml", *five) == last
    whole = ["--pipeline-model-parallel-layout", "Et*2|tt|tt|ttL"]
    assert step_ms(capsys, "--model", "last.yaml", *whole) == even
    # Of another pipeline the file says nothing.
    two = ["--pp-size", "2", "--dp-size", "1"]
    assert step_ms(capsys, "--model", "last.yaml", *two) == step_ms(
        capsys, "--model", "even.yaml", *two
    )


def test_layout_gives_virtual_stages(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--pipeline-model-parallel-layout", "Et|t|t|t|t|t|t|tL"]
    assert step_ms(capsys, "--model", "even.yaml", *layout) == step_ms(
        capsys, "--model", "even.yaml", "--vpp-size", "2"
    )


def test_packings_are_tried_on_the_stages_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    gains = []
    for name in ("even", "last", "layout"):
        argv = ["pack", "--distribution", "reference", "--model", f"{name}.yaml", "--steps", "3"]
        assert main([*argv, "--packing", "original", "hold", "--json"]) == 0
        gains.append(json.loads(capsys.readouterr().out)["rows"][1]["work_speedup"])
        assert main([*argv, "--packing", "original", "hold", "--json", "--pp-size", "4"]) == 0
        asked = json.loads(capsys.readouterr().out)["rows"][1]["work_speedup"]
        assert asked == gains[-1]  # the pipeline of the file, said again
    assert gains[0] != gains[1] == gains[2]


def test_stages_that_divide_nothing_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "--distribution", "reference", "--model"]
    assert main([*argv, "even.yaml", "--decoder-first-pipeline-num-layers", "3"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--decoder-first-pipeline-num-layers 3 of --num-layers 8 leave 5 layers" in error
    assert main([*argv, "uneven.yaml"]) == 2
    assert "leave 5 layers for 2 other stages of PP 4" in capsys.readouterr().err


def test_layers_of_a_virtual_stage_count_the_ends() -> None:
    words = "--num-layers 6 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-"
    words += "split --account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 1"
    layout = parallelism(settings_of(words.split()))
    assert layout.vpp_size == 2
    assert layout.stage_layers == (0, 1, 1, 1, 1, 1, 1, 0)
    both = "--num-layers 8 --decoder-first-pipeline-num-layers 2 "
    both += "--num-layers-per-virtual-pipeline-stage 1"
    with pytest.raises(ConfigError, match="use --num-virtual-stages-per-pipeline-rank"):
        settings_of(both.split())
