"""Uneven stages in commands: by flags, and as a file of settings or a recipe has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import parallelism
from megatron_wlb.planning.from_words import settings_of
from megatron_wlb.settings.recipe import read_recipe
from megatron_wlb.settings.split import PipelineSplit, remedy

SETTINGS = {
    "num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 4096,
    "global_batch_size": 8, "vocab_size": 64000, "pipeline_model_parallel_size": 4,
}  # fmt: skip
LAST = "decoder_last_pipeline_num_layers"


@pytest.fixture(autouse=True)
def folder(wlb) -> None:
    for name, more in {
        "even": {}, "uneven": {"num_layers": 8, LAST: 2, "decoder_first_pipeline_num_layers": 1},
        "last": {LAST: 5}, "layout": {"pipeline_model_parallel_layout": "Et|t|t|t*5L"},
    }.items():  # fmt: skip
        Path(f"{name}.yaml").write_text(yaml.safe_dump(SETTINGS | more))


@pytest.fixture
def step_ms(wlb):
    def run(words: str) -> float:
        common = "simulate --distribution reference --packing original --steps 3 --num-seeds 1"
        return float(wlb.json(common, "--model", words)["rows"][0]["step_ms"])

    return run


def test_flags_say_what_a_file_of_settings_says(step_ms) -> None:
    even, last = step_ms("even.yaml"), step_ms("last.yaml")
    # The head and five layers run on one rank.
    assert last > 1.05 * even
    assert step_ms("layout.yaml") == last
    assert step_ms("even.yaml --decoder-last-pipeline-num-layers 5") == last
    assert step_ms("last.yaml --pipeline-model-parallel-layout 'Et*2|tt|tt|ttL'") == even
    # Of another pipeline the file says nothing.
    two = "--pp-size 2 --dp-size 1"
    assert step_ms(f"last.yaml {two}") == step_ms(f"even.yaml {two}")


def test_layout_gives_virtual_stages(step_ms) -> None:
    layout = "--pipeline-model-parallel-layout 'Et|t|t|t|t|t|t|tL'"
    assert step_ms(f"even.yaml {layout}") == step_ms("even.yaml --vpp-size 2")


def test_packings_are_tried_on_the_stages_of_a_file(wlb) -> None:
    gains = []
    for name in ("even", "last", "layout"):
        words = f"pack --distribution reference --model {name}.yaml --steps 3"
        found, asked = (
            wlb.json(words, "--packing original hold", more)["rows"][1]["speedup"]
            for more in ("", "--pp-size 4")
        )
        assert asked == found  # the pipeline of the file, said again
        gains.append(found)
    assert gains[0] != gains[1] == gains[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("even.yaml --decoder-first-pipeline-num-layers 3",
         "--decoder-first-pipeline-num-layers 3 of --num-layers 8 leave 5 layers"),
        ("uneven.yaml", "leave 5 layers for 2 other stages of PP 4"),
    ],
)  # fmt: skip
def test_stages_that_divide_nothing_are_one_line(words: str, said: str, wlb) -> None:
    assert said in wlb.refusal("simulate --distribution reference --model", words)


@pytest.mark.parametrize("command", ["simulate --num-seeds 1", "pack"])
def test_layers_that_do_not_divide_name_flags_that_do(command: str, wlb) -> None:
    words = f"{command} --distribution reference --model deepseek-v3 --pp-size 16 --ep-size 8"
    words += " --dp-size 8 --num-micro-batches 128 --steps 1 --packing original"
    error = wlb.refusal(words)
    assert "61 layers do not divide over 16 model chunks (PP × VPP); choose a multiple" in error
    (flag,) = re.findall(r"or give (--decoder-\S+ \d+), or other stages by --decoder-first", error)
    assert wlb.json(words, flag)["rows"]
    assert "or give stages that are not alike by --pipeline-model-p" in wlb.refusal(
        words, "--vpp-size 2"
    )


@pytest.mark.parametrize("num_layers", range(2, 70))
def test_flags_that_are_named_divide_the_layers(num_layers: int) -> None:
    for pp_size in range(2, num_layers + 1):
        said = remedy(num_layers, pp_size, 1)
        if number := re.match(r"--decoder-last-pipeline-num-layers (\d+)", said):
            layers = PipelineSplit(None, int(number[1])).layers(num_layers, pp_size)
            assert sum(layers) == num_layers and 0 < layers[-1] <= 2 * layers[0]
        assert number or "--pipeline-model-parallel-layout" in said


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


HYBRID = {
    "hybrid_layer_pattern": "*-*-|*-*E", "num_experts": 4, "hidden_size": 512, "swiglu": True,
    "ffn_hidden_size": 1536, "num_attention_heads": 8, "seq_length": 4096, "global_batch_size": 8,
    "vocab_size": 64000, "pipeline_model_parallel_size": 2,
}  # fmt: skip


@pytest.fixture
def hybrid() -> str:
    Path("hybrid.yaml").write_text(yaml.safe_dump(HYBRID))
    return "hybrid.yaml"


def test_other_stages_leave_a_hybrid_model_the_layers_that_it_has(step_ms, hybrid) -> None:
    whole = HYBRID | {"hybrid_layer_pattern": "*-*-*-*E", "pipeline_model_parallel_size": 4}
    Path("whole.yaml").write_text(yaml.safe_dump(whole))
    assert step_ms(f"{hybrid} --pp-size 4") == step_ms("whole.yaml")
    last = step_ms(f"{hybrid} --decoder-last-pipeline-num-layers 2")
    assert last == step_ms(f"{hybrid} --hybrid-layer-pattern *-*-*-|*E")


@pytest.mark.parametrize(("pp_size", "vpp_size"), [(1, 1), (4, 1), (2, 2)])
def test_plan_says_a_hybrid_models_layers_and_stages(wlb, hybrid, pp_size, vpp_size) -> None:
    flags = wlb.json(
        "plan --distribution reference --num-devices 4 --tp-size 1 --cp-size 1 --ep-size 1",
        "--steps 2 --refine 1 --num-micro-batches 8 --packing hold --out found.yaml --model",
        hybrid, f"--pp-size {pp_size} --vpp-size {vpp_size}",
    )["flags"]  # fmt: skip
    stages = flags["--hybrid-layer-pattern"].split("|")
    assert "".join(stages) == "*-*-*-*E"
    assert len(stages) == pp_size * vpp_size
    # Megatron takes the rest from the pattern, and refuses most of it.
    assert not {"--num-layers", "--num-virtual-stages-per-pipeline-rank"} & flags.keys()
    assert not any("pipeline-num-layers" in flag or "layout" in flag for flag in flags)
    said = settings_of(read_recipe("found.yaml", {}).arguments).parallel
    assert said.hybrid_layer_pattern == flags["--hybrid-layer-pattern"]


def test_strategies_of_a_hybrid_model_are_refused_at_once(wlb, hybrid) -> None:
    said = wlb.refusal("plan --distribution reference --num-devices 4 --strategies --model", hybrid)
    assert said.startswith("--strategies is for a GPT") and "leave it out" in said
