"""Whatever stands in a file or a flag, a command ends soon, and with one line if it is wrong."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from helpers.fuzz import (
    ATTENTION,
    COEFFICIENTS,
    LENGTHS,
    NOTE,
    RECIPE,
    SIZES,
    TABLE,
    TRAINING,
)
from helpers.index import write_index

from megatron_wlb.cli.main import main
from megatron_wlb.cost.hardware import read_hardware
from megatron_wlb.errors import ConfigError, WLBError
from megatron_wlb.planning import guards
from megatron_wlb.reading import read_mapping
from megatron_wlb.settings.command_line import parse

MAX_S = 10.0
"""Of the processor, so that a busy machine fails nothing."""
STRIDE = int(os.environ.get("WLB_FUZZ_STRIDE", "29"))
"""Every so many-th pair of a place and a value is tried; 1 tries all, in some minutes."""
LONG_NAME = "n" * 5000
ODD_VALUES = (
    "0", "-1", "1", "1.5", "true", "null", "''", "x", "[]", "{}", "[1, 2]", "{a: 1}", "{1: 2}",
    ".inf", "-.inf", ".nan", "1.0e308", "1.0e-320", "100000000000", "1" + "0" * 400, "9" * 5000,
    "0x" + "f" * 5000, "2024-05-40", "2024-05-04", "!!int foo", "!!bool foo", "!!float foo",
    "!!timestamp foo", "!!binary a", "!!set {a}", "!!python/object:os.system x", '"\\0"',
    '"a/\\0/b.yaml"', LONG_NAME, f"{LONG_NAME}.yaml", "[" * 3000, "[" * 30 + "]" * 30, "&a [*a]",
    "*b", '"\\ud800"', "1:59:59:59",
)  # fmt: skip
ODD_FILES = {
    "empty": b"", "number": b"3", "list": b"- 1", "open": b"a: [", "not utf-8": b"\xff\xfe\x00a",
    "nul": b"a: \0", "deep": b"a: " + b"[" * 1000,
    "deep json": b'{"a": ' * 100_000, "large": b"a: 1\n" * 100_000, "number key": b"1: 2",
    "list key": b"? [1, 2]\n: 3", "null key": b"~: 3", "date key": b"2024-05-40: 3",
}  # fmt: skip
RUN = ["--steps", "1", "--packing", "original", "--num-micro-batches", "2", "--window", "4096"]
PACK = ["pack", "corpus", *RUN]
SIMULATE = ["simulate", "corpus", *RUN, "--num-seeds", "1"]
HARDWARE = {name: 1 for name in ("peak_tflops", "latency_us", "devices_per_node", "linear_share")}

KINDS: dict[str, tuple[dict, list[str]]] = {
    # What a right file holds, and the command that reads it.
    "model.yaml": (SIZES, [*PACK, "--model", "model.yaml"]),
    "shape.yaml": (SIZES, [*SIMULATE, "--model", "shape.yaml"]),
    "training.yaml": (TRAINING, [*PACK, "--model", "training.yaml"]),
    "recipe.yaml": (RECIPE, [*SIMULATE, "--model", "recipe.yaml"]),
    "shown.yaml": (RECIPE, ["recipe", "show", "shown.yaml", "--run-number", "2"]),
    "cost.yaml": (COEFFICIENTS, [*PACK, "--cost", "cost.yaml"]),
    "table.yaml": (TABLE, [*PACK, "--cost", "table.yaml"]),
    "hardware.yaml": (HARDWARE, [*PACK, "--model", "550m", "--hardware", "hardware.yaml"]),
    "attention.yaml": (
        ATTENTION,
        [*SIMULATE, "--model", "model.yaml", "--hardware", "hw.yaml", "--cost-extrapolate"],
    ),
    "config.yaml": (TRAINING, ["--wlb-config", "config.yaml"]),
    "corpus.json": (NOTE, [*PACK, "--model", "training.yaml"]),
}
FLAGS = (
    "--window", "--seed", "--num-micro-batches", "--max-windows", "--max-age", "--max-step-tokens",
    "--length-multiple", "--dp-size", "--pp-size", "--vpp-size", "--steps", "--packing",
    "--queue-thresholds", "--hold-tau", "--delay-price", "--solver-limit", "--distribution",
    "--lengths", "--model", "--hardware", "--cost", "--plot", "--tp-size", "--cp-size",
    "--memory-gib", "--num-seeds", "--sharding", "--report", "--trace", "--num-devices", "--max-tp",
    "--refine", "--rows", "--out", "--max-delay", "--look-ahead",
)  # fmt: skip
ODD_FLAGS = (
    "0", "-1", "1", "nan", "inf", "-inf", "1e308", "1e-320", "100000000000", "9" * 5000, "²", "x",
    "", ",", "1,2", "a\0b", LONG_NAME, f"{LONG_NAME}.yaml", "/", ".", "hold:1000000",
    "fixed-greedy:100000", "wlb:100000000", f"hold:{'9' * 5000}", "hold:²",
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_index("corpus", LENGTHS)
    for name, (content, _) in KINDS.items():
        write(name, content)
    return tmp_path


def write(name: str, content: dict, changed: str = "", text: str = "") -> None:
    """A file of that kind in which the entry ``changed`` is the YAML ``text``."""
    lines = [
        f"{key}: {text if key == changed else json.dumps(value)}\n"
        for key, value in content.items()
    ]
    if name == "corpus.json":
        entries = [f'"{line}'.replace(":", '":', 1).rstrip() for line in lines]
        lines = ["{", ", ".join(entries), "}"]
    if name == "hardware.yaml":
        known = dict(read_hardware("h100-sxm")[1])
        known = {key: value for key, value in known.items() if key != changed}
        lines = [yaml.safe_dump(known)]
        lines += [f"{changed}: {{value: {text}, source: x}}\n"] if changed else []
    if name == "attention.yaml":
        table = "".join(f"  {line}" for line in lines)
        known = yaml.safe_dump(dict(read_hardware("h100-sxm")[1]))
        Path("hw.yaml").write_text(f"{known}attention:\n-\n{table}", "utf-8", "surrogatepass")
    Path(name).write_text("".join(lines), "utf-8", "surrogatepass")


def end(argv: list[str]) -> int:
    """The exit status. Any error but our own fails the test, and so does a long wait."""
    begin = time.process_time()
    try:
        if argv[0].startswith("--"):
            guards.check(parse(argv), 1)
            status = 0
        else:
            status = main(argv)
    except WLBError as error:
        assert all(line.strip() for line in str(error).split("\n")), error  # one, or a line each
        status = error.exit_code
    except SystemExit as usage:
        status = int(usage.code or 0)
    assert time.process_time() - begin < MAX_S, argv
    return status


@pytest.mark.parametrize("name", KINDS)
def test_right_files_are_taken(name: str) -> None:
    assert end(KINDS[name][1]) == 0


@pytest.mark.parametrize("name", KINDS)
def test_odd_entries_are_refused_or_taken(name: str) -> None:
    content, argv = KINDS[name]
    pairs = [(key, text) for text in ODD_VALUES for key in content]
    for key, text in pairs[::STRIDE]:
        write(name, content, key, text)
        end(argv)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("odd", ODD_FILES)
def test_odd_files_are_refused(name: str, odd: str) -> None:
    if name == "corpus.json":  # another program's file, unless it says what it is
        text = b'{"format": "megatron-wlb corpus 1", "x": ' + ODD_FILES[odd]
        Path(name).write_bytes(text)
    else:
        Path("hw.yaml" if name == "attention.yaml" else name).write_bytes(ODD_FILES[odd])
    status = end(KINDS[name][1])
    # An empty training file says nothing, which is no error; nor is a note that is not ours.
    assert status in (1, 2, 3) if name != "corpus.json" else status in (0, 3)


@pytest.mark.parametrize("command", ["pack", "tune", "simulate", "plan", "corpus"])
def test_odd_flags_are_refused_or_taken(command: str) -> None:
    words = {
        "pack": PACK,
        "tune": ["tune", "corpus", "--window", "4096", "--num-micro-batches", "2", "--steps", "1"],
        "simulate": [*SIMULATE, "--model", "model.yaml"],
        "plan": ["plan", "corpus", "--model", "model.yaml", "--num-devices", "2", "--steps", "1",
                 "--refine", "1", "--packing", "original", "--num-micro-batches", "2"],
        "corpus": ["corpus", "stats", "corpus", "--windows", "2"],
    }[command]  # fmt: skip
    pairs = [(flag, text) for text in ODD_FLAGS for flag in FLAGS]
    for flag, text in pairs[::STRIDE]:
        end([*words, f"{flag}={text}"])


@pytest.mark.parametrize("path", ["a\0b", LONG_NAME, "n" * 253, "/".join(["n"] * 3000), "none"])
@pytest.mark.parametrize(
    "argv",
    [
        ["corpus", "build", "training.yaml", "--out"], ["corpus", "build", "--out", "x"],
        ["corpus", "build", "training.yaml", "--out", "x", "--tokenizer"], ["corpus", "stats"],
        ["corpus", "stats", "corpus", "--plot"], ["doctor", "--megatron"],
        ["recipe", "show"], ["recipe", "run", "recipe.yaml", "--megatron"],
        ["profile", "--out", "x.yaml", "--base"], ["pack", "--lengths"], [*PACK, "--cost"],
        [*PACK, "--model"], [*PACK, "--model", "550m", "--hardware"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_odd_paths_are_refused_or_taken(argv: list[str], path: str) -> None:
    end([*argv, path])


@pytest.mark.parametrize(
    "argv",
    [
        [*PACK, "--num-micro-batches", "100000000000"],
        [*PACK, "--packing", "hold:1000000"],
        [*PACK, "--packing", "fixed-greedy:100000"],
        ["pack", "--distribution", "reference", "--num-micro-batches", "100000"],
        [*SIMULATE, "--model", "550m", "--memory-gib", "inf"],
        [*SIMULATE, "--model", "550m", "--memory-gib", "nan"],
        [*SIMULATE, "--model", "550m", "--pp-size", "24", "--num-micro-batches", "120000"],
        ["plan", "corpus", "--model", "550m", "--num-devices", "100000000000"],
        ["--num-layers", "100000000000"],
        ["--global-batch-size", "100000000000"],
        ["--wlb-memory-gib", "inf"],
        ["--data-path", "a\0b"],
        ["--save", LONG_NAME],
    ],
    ids=lambda argv: " ".join(argv)[-60:],
)
def test_absurd_sizes_are_refused(argv: list[str]) -> None:
    assert end(argv) == 2


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(10, 10)", "(-3,)", "()", f"({'9' * 40},)"])
@pytest.mark.parametrize("kind", ["<i8", "<f8", "|O", "x"])
def test_npy_header_that_claims_what_is_not_there_is_refused(shape: str, kind: str) -> None:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    for length in (len(content), len(content) - 30, 8, 3):
        Path("lengths.npy").write_bytes(content[:length] + bytes(16))
        assert end(["pack", "--lengths", "lengths.npy", *RUN]) == 3


def texts() -> Iterator[tuple[str, str]]:
    yield "a: !!int foo", "invalid literal"
    yield "a: " + "[" * 1000, "nested too deep"
    yield "a: 2024-05-40", "day is out of range"
    yield "1: 2", "the name 1 is not a text"
    yield "a: 1" + "0" * 400, "hundreds of digits"


@pytest.mark.parametrize(("text", "says"), [*texts()])
def test_reader_says_what_is_wrong(text: str, says: str) -> None:
    Path("a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says) as error:
        read_mapping("a.yaml", "file")
    assert str(error.value).startswith("file a.yaml: ") and "\n" not in str(error.value)
