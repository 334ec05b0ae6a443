"""Settings: the command line, the YAML file under it, and what both refuse."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_wlb.errors import ConfigError
from megatron_wlb.settings.command_line import build_parser, megatron_flags, parse
from megatron_wlb.settings.config import Config, flag_of

SETTINGS = Config().flat()


def read(flags: str) -> Config:
    return parse(shlex.split(flags))


def with_yaml(tmp_path: Path, text: str | bytes, *flags: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return parse(["--wlb-config", str(path), *flags])


def error_of(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def error_of_yaml(tmp_path: Path, text: str | bytes) -> str:
    """The message after the file's name."""
    with pytest.raises(ConfigError) as caught:
        with_yaml(tmp_path, text)
    start, found, message = str(caught.value).partition(f"--wlb-config {tmp_path}/run.yaml: ")
    assert (start, bool(found)) == ("", True)
    assert "\n" not in message
    return message


# Values.


def test_no_flags_give_the_defaults() -> None:
    assert parse([]) == Config()
    assert parse([]).flat() == SETTINGS


def test_flags_of_all_types_are_read() -> None:
    config = read(
        "--num-layers 6 --lr=3e-4 --bf16 --normalization RMSNorm --data-path a b --save out "
        "--wlb-queue-thresholds 100 300"
    )
    assert config.model.num_layers == 6
    assert config.training.lr == 3e-4
    assert config.training.bf16
    assert config.model.normalization == "RMSNorm"
    assert config.data.data_path == ("a", "b")
    assert config.checkpoint.save == "out"
    assert config.wlb.wlb_queue_thresholds == (100, 300)
    changed = {k for k, v in config.flat().items() if v != SETTINGS[k]}
    assert changed == {
        "num_layers", "lr", "bf16", "normalization", "data_path", "save", "wlb_queue_thresholds"
    }  # fmt: skip


# What is refused.


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--num-layer", "--num-layers"),  # no abbreviations
        ("--wlb-pack", "--wlb-packing"),
        ("--adam_eps", "--adam-eps"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
    ],
)
def test_unknown_flag_names_the_nearest_one(flag: str, nearest: str) -> None:
    assert error_of(flag, "1") == f"unknown flag {flag}; did you mean {nearest}?"
    assert error_of(f"{flag}=1") == f"unknown flag {flag}; did you mean {nearest}?"


@pytest.mark.parametrize("flag", ["--moe-use-upcycling", "--fp4-format", "--tp-comm-overlap"])
def test_megatron_flag_that_is_not_honoured_says_so(flag: str) -> None:
    message = error_of("--num-layers", "2", flag)
    assert message.startswith(f"{flag} is a Megatron flag that is not honoured here; ")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--wlb-packing", "best"], ["--wlb-packing", "'best'", "'fixed-solver', 'wlb', 'hold'"]),
        (["--num-layers", "two"], ["--num-layers", "int", "'two'"]),
        (["--num-layers", "2.5"], ["--num-layers", "int", "'2.5'"]),
        (["--lr", "high"], ["--lr", "'high'"]),
        (["--num-layers"], ["--num-layers", "expected one argument"]),
        (["--data-path"], ["--data-path", "expected at least one argument"]),
        (["--bf16", "yes"], ["unrecognized arguments: yes"]),
        (["corpus"], ["unrecognized arguments: corpus"]),
    ],
)
def test_bad_value_names_flag_value_and_what_is_possible(
    arguments: list[str], parts: list[str]
) -> None:
    message = error_of(*arguments)
    assert all(part in message for part in parts), message


# The file.


def test_yaml_settings_are_those_of_the_command_line(tmp_path: Path) -> None:
    text = """
        num_layers: 6
        lr: 3e-4
        bf16: true
        swiglu: false
        ffn_hidden_size: null
        --hidden-size: 128
        seq-length: 512
        data_path: [a, b]
        wlb_queue_thresholds: [100, 300]
        save: runs/with space
    """
    config = with_yaml(tmp_path, text)
    same = read(
        "--num-layers 6 --lr 3e-4 --bf16 --hidden-size 128 --seq-length 512 --data-path a b "
        "--wlb-queue-thresholds 100 300 --save 'runs/with space' "
        f"--wlb-config {tmp_path / 'run.yaml'}"
    )
    assert config.flat() == same.flat()


def test_command_line_goes_before_the_file(tmp_path: Path) -> None:
    text = "{lr: 0.1, min_lr: 0.01, data_path: [a, b], num_layers: 6}"
    default = str(SETTINGS["num_layers"])
    config = with_yaml(tmp_path, text, "--lr", "0.5", "--data-path", "c", "--num-layers", default)
    assert (config.training.lr, config.training.min_lr) == (0.5, 0.01)
    assert config.data.data_path == ("c",)
    assert config.model.num_layers == SETTINGS["num_layers"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_layer: 6", "unknown flag --num-layer; did you mean --num-layers?"),
        ("fp4_format: e2m1", "--fp4-format is a Megatron flag that is not honoured here"),
        ("wlb_packing: best", "argument --wlb-packing: invalid choice: 'best'"),
        ("num_layers: true", "argument --num-layers: expected one argument"),
        ("num_layers: {a: 1}", "argument --num-layers: invalid int value"),
        ("bf16: 1", "unrecognized arguments: 1"),
        ("data_path: []", "argument --data-path: expected at least one argument"),
        ("a: [", "while parsing a flow node"),
        ("- num_layers", "expected names and values as `name: value`"),
        ("", "expected names and values as `name: value`"),
        ("wlb_config: other.yaml", "--wlb-config belongs on the command line"),
        ("help: true", "--help belongs on the command line"),
        (b"\xff\xfe\x00", "'utf-8' codec can't decode"),
    ],
)
def test_yaml_that_is_wrong_names_the_file_and_why(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    assert error_of_yaml(tmp_path, text).startswith(message)


# Names and help.


def test_every_flag_is_megatrons_or_begins_with_wlb() -> None:
    """A name of our own could come to mean something else in Megatron."""
    ours = [flag_of(name) for name in SETTINGS]
    assert len(megatron_flags()) > 500
    assert [f for f in ours if not f.startswith("--wlb-") and f not in megatron_flags()] == []
    assert [f for f in megatron_flags() if f.startswith("--wlb-")] == []


def help_of(name: str) -> str:
    """The help of one flag, on one line."""
    (action,) = (a for a in build_parser()._actions if a.dest == name)
    assert action.help is not None
    return action.help.replace("%%", "%")


@pytest.mark.parametrize(("name", "default"), SETTINGS.items())
def test_help_shows_the_default(name: str, default: Any) -> None:
    # Flags that are off, and settings that are derived or absent, say so in words.
    shown = default is not None and default is not False and default != ()
    text = " ".join(map(str, default)) if isinstance(default, tuple) else default
    assert help_of(name).endswith(f" (default: {text})") == shown


def test_help_is_printed_and_exits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # Narrow lines would break at hyphens.
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name in SETTINGS:
        assert flag_of(name) in printed
        assert " ".join(help_of(name).split()) in printed


@pytest.mark.parametrize(("text", "shape"), [("on", "on"), ("off", "off"), ('"on"', "on")])
def test_switch_in_the_file_may_be_what_yaml_calls_a_boolean(tmp_path, text, shape):
    path = tmp_path / "run.yaml"
    path.write_text(f"wlb_shape: {text}\n")
    assert parse(["--wlb-config", str(path)]).wlb.wlb_shape == shape
    assert parse(["--wlb-config", str(path), "--wlb-shape", "off"]).wlb.wlb_shape == "off"


def test_numbers_of_ours_that_may_be_left_out_take_auto() -> None:
    flags = ["--wlb-units", "auto", "--wlb-max-tokens", "auto", "--wlb-delay-price", "auto"]
    assert parse(flags).wlb == parse([]).wlb
    assert parse(["--wlb-units", "24"]).wlb.wlb_units == 24
    for wrong in (["--wlb-units", "many"], ["--wlb-hold-tau", "auto"], ["--train-iters", "auto"]):
        with pytest.raises(ConfigError, match=wrong[0]):
            parse(wrong)
