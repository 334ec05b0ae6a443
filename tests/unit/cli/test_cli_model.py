"""``--model`` and lists mean the same in every command."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helpers.index import write_index

from megatron_wlb.cli.model import read_model
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.from_config import model_shape
from megatron_wlb.planning.from_words import settings_of_script
from megatron_wlb.planning.models import load_model, model_names
from megatron_wlb.settings.config import DEFAULT_MACHINE

TRAINING = {
    "num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 2048,
    "global-batch-size": 6, "vocab-size": 500,
}  # fmt: skip
RECIPE = {"MODEL_ARGS": {f"--{name}": value for name, value in TRAINING.items()}}
SHAPES = Path(__file__).parents[3] / "configs" / "model"
LENGTHS = [100, 900, 30, 2000, 700, 50, 1500, 60] * 20


@pytest.fixture(autouse=True)
def folder(wlb) -> None:
    write_index("corpus", LENGTHS)
    Path("training.yaml").write_text(yaml.safe_dump(TRAINING))
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))


COMMANDS = {
    "pack": "--steps 2 --packing original",
    "tune": "--steps 2 --packing hold",
    "simulate": "--steps 2 --num-seeds 1 --packing original",
    "plan": "--steps 1 --refine 1 --packing original --num-devices 4",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("model", ["550m", SHAPES / "550m.yaml", "training.yaml", "recipe.yaml"])
def test_model_is_a_name_or_any_file_of_one(command: str, model: str | Path, wlb) -> None:
    batch = "--num-micro-batches 4 --window 2048"
    wlb.json(command, "corpus --model", model, batch, COMMANDS[command])


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_model_lists_all_names(command: str, wlb) -> None:
    error = wlb.refusal(command, "corpus --model 7bb", COMMANDS[command])
    assert "unknown model 7bb; did you mean 7b? There are 550m, " in error and " 7b, " in error


def test_name_and_its_file_are_the_same_model() -> None:
    assert read_model("7b").shape == read_model(str(SHAPES / "7b.yaml")).shape == load_model("7b")


@pytest.mark.parametrize("name", model_names())
def test_flags_of_a_named_model_make_it(name: str) -> None:
    model = read_model(name)
    flags = {flag: x for told in model.flags.values() for flag, x in told.items()}
    assert flags["--vocab-size"] == model.shape.vocab_size
    words = [str(word) for flag, x in flags.items() for word in (flag, x) if word is not True]
    if pattern := model.config.parallel.hybrid_layer_pattern:  # which the layout divides
        words += ["--hybrid-layer-pattern", pattern]
    config = settings_of_script([*words, "--bf16"])
    assert model_shape(config, model.shape.vocab_size) == model.shape


@pytest.mark.parametrize("model", ["training.yaml", "recipe.yaml"])
def test_settings_give_window_and_batch_to_every_command(model: str, wlb) -> None:
    assert {"seq_length", "global_batch_size"} <= set(read_model(model).written)
    for command in ("pack", "simulate"):
        assert "window 2,048" in wlb(command, "corpus --model", model, COMMANDS[command]).out


@pytest.mark.parametrize(
    "setting",
    [
        {"num-attention-heads": 0},
        {"tensor-model-parallel-size": 0},
        {"pipeline-model-parallel-size": 0},
        {"make-vocab-size-divisible-by": 0},
        {"num-layers": 10**11},
    ],
)
def test_settings_that_cannot_be_are_refused_before_they_are_used(setting) -> None:
    Path("odd.yaml").write_text(yaml.safe_dump(TRAINING | setting))
    with pytest.raises(ConfigError, match=f"--{next(iter(setting))} is .*; give at"):
        read_model("odd.yaml")


@pytest.mark.parametrize("words", ["2,3", "2 3", "2, 3", "2,3 corpus"])
def test_lists_are_written_with_blanks_or_commas(words: str, wlb) -> None:
    corpus = "" if "corpus" in words else "corpus"
    given = "--window 2048 --steps 2 --packing original hold --num-micro-batches"
    rows = wlb.json("pack", corpus, given, words)["rows"]
    assert [(row["num_micro_batches"], row["packing"]) for row in rows] == [
        (2, "original"), (2, "hold"), (3, "original"), (3, "hold"),
    ]  # fmt: skip


@pytest.mark.parametrize("given", ["--bf16", "--fp16", "--disable-bias-linear"])
def test_numbers_beside_fp8_have_16_bits(given: str) -> None:
    """As of every model that is simulated; fp16 is read so for measured and analytic costs too."""
    path = Path("fp8.yaml")
    said = {"--fp8-format": "hybrid", "--disable-bias-linear": True, given: True}
    path.write_text(yaml.safe_dump({"MODEL_ARGS": RECIPE["MODEL_ARGS"] | said}))
    model = read_model(str(path))
    assert model.config.training.bf16 == ("16" in given)
    ((_, layer),) = model.shape.runs
    assert layer.precisions is not None
    assert layer.precisions.elementwise.element_bytes == 2
    assert layer.precisions.matrix.weight_bytes == 4


def test_batches_that_grow_by_a_schedule_are_those_of_its_end(wlb) -> None:
    path = Path("grows.yaml")
    given = {**RECIPE["MODEL_ARGS"], "--step-batch-size-schedule": "0:8 1M:16"}
    del given["--global-batch-size"]
    path.write_text(yaml.safe_dump({"MODEL_ARGS": given}))
    assert read_model(str(path)).num_micro_batches == 16
    error = wlb.refusal(f"pack corpus --model {path} --micro-batch-size 3")
    assert "--step-batch-size-schedule of --model leads to a batch of 16" in error


def test_slices_are_tried_with_delayed_scaling(wlb) -> None:
    given = {"--fp8-format": "e4m3", "--fp8-recipe": "delayed", "--pipeline-model-parallel-size": 2}
    Path("fp8.yaml").write_text(yaml.safe_dump({"MODEL_ARGS": RECIPE["MODEL_ARGS"] | given}))
    words = "corpus --model fp8.yaml"
    for command in ("pack", "tune", "simulate"):
        assert '"slim' in wlb(command, words, "--steps 2 --json").out, command
    wlb(f"plan {words} --packing slim --pp-size 2 --num-devices 2 --steps 1 --refine 1")


def test_flags_of_megatron_and_short_ones_are_the_same(wlb) -> None:
    short = "--window 1024 --tp-size 2 --num-micro-batches 4 --max-age 1 --hardware a100"
    long = "--seq-length 1024 --tensor-model-parallel-size 2 --global-batch-size 4 --wlb-max-age 1 "
    one, other, plain = (
        wlb.json("pack corpus --model training.yaml --steps 2 --packing hold", words)
        for words in (short, f"{long} --wlb-hardware a100", "")
    )
    for found in (one, other):
        for row in found["rows"]:
            row.pop("ms_per_step")
    assert one == other and one["layout"]["tp_size"] == 2
    assert one["frame"]["hardware"] == "a100" and plain["frame"]["hardware"] == DEFAULT_MACHINE
