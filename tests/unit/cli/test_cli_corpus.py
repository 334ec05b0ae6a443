from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_wlb import __version__
from megatron_wlb.cli.main import COMMANDS, main


@pytest.fixture(autouse=True)
def texts(wlb) -> Path:
    folder = Path("texts")
    (folder / "old").mkdir(parents=True)
    (folder / "a.txt").write_text("first\n")
    (folder / "b.jsonl").write_text('{"body": "second one"}\n{"body": "third, the longest"}\n')
    (folder / "old/c.txt").write_text("fourth\n")
    (folder / "d.bin").write_bytes(b"\0")
    return folder


def test_workers_are_threads_of_the_tokenizers_library(wlb, monkeypatch) -> None:
    monkeypatch.setenv("RAYON_NUM_THREADS", "7")  # and it is put back
    wlb("corpus build texts --out c --json-key body --workers 2")
    assert os.environ["RAYON_NUM_THREADS"] == "2"
    assert wlb.refusal("corpus build texts --out d --workers 0") == (
        "--workers is 0; give at least 1"
    )


def test_build_prints_a_table_of_what_it_wrote(wlb) -> None:
    said = wlb("corpus build texts --out c --json-key body")
    assert all(line.startswith("building: ") for line in said.err.splitlines())
    rows = {cells[1]: cells[2] for cells in said.cells if len(cells) == 4}
    assert rows["documents"] == "4"
    assert rows["tokens"] == str(7 + 11 + 19 + 8)
    assert rows["length in tokens, max"] == "19"
    assert (rows["vocabulary"], rows["skipped: binary files"]) == ("256", "1")
    to_train = "to train: --data-path c --tokenizer-type NullTokenizer --vocab-size 256"
    assert said.out.splitlines()[-1] == to_train


def test_build_json_is_one_object_and_nothing_else(wlb) -> None:
    out, err = wlb("corpus build texts --out c --json-key body --exclude old new --json")
    result = json.loads(out)
    assert all(line.startswith("building: ") for line in err.splitlines())
    assert out.count("\n") == 1
    assert (result["prefix"], result["num_documents"], result["num_tokens"]) == ("c", 3, 37)
    lengths = result["length_tokens"]
    assert (lengths["mean"], lengths["p50"], lengths["max"]) == (37 / 3, 11, 19)


def test_build_passes_every_option_on(texts: Path, wlb) -> None:
    (texts / "e.py").write_text("X = 1\ndef f(): pass\ndef g(): pass\n")
    command = "corpus build texts/e.py --out c --python-definitions"
    bpe = f"{command} --tokenizer bpe --vocab-size 258"
    built = wlb.json(bpe)
    assert (built["num_documents"], built["vocab_size"]) == (2, 258)
    assert wlb.refusal(bpe, status=3).startswith("c.tokenizer.json exists")
    assert wlb.json(bpe, "--reuse") == built
    assert wlb.json(command, "--force")["vocab_size"] == 256


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("nowhere --out c", 3, "no such file or folder: nowhere"),
        ("texts --out c --vocab-size 512", 2, "a vocabulary size is for "),
        ("texts --out c", 3, "texts/b.jsonl:1 has no key 'text' (it has 'body')"),
    ],
)
def test_errors_are_one_line_with_the_status_of_their_class(
    words: str, status: int, message: str, wlb
) -> None:
    assert wlb.refusal("corpus build", words, status=status).startswith(message)


def test_traceback_is_shown_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WLB_TRACEBACK", "1")
    with pytest.raises(Exception, match="no such file or folder"):
        main(["corpus", "build", "nowhere", "--out", "c"])


def test_interrupt_exits_with_130_and_one_line(wlb, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_wlb.cli.corpus.configure", interrupt)
    assert wlb("corpus", status=130) == ("", "error: interrupted\n")


def test_closed_pipe_is_quiet() -> None:
    command = ["corpus", "build", "texts/a.txt", "--out", "c", "--reuse", "--json"]
    assert main(command) == 0
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_wlb.cli.main", *command],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_help_lists_every_command_with_an_example_and_imports_none(wlb) -> None:
    text = wlb.help("")
    assert "example" in text
    assert all(f"\n    {name}" in text for name in COMMANDS)
    code = (
        "import sys; from megatron_wlb.cli.main import main\n"
        "try: main(['--help'])\n"
        "finally: print([name for name in ('numpy', 'rich', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n")


def test_version_and_wrong_usage(wlb, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"megatron-wlb {__version__}\n"
    assert wlb.refusal("corpse").startswith("argument COMMAND: invalid choice: 'corpse'")
    assert "COMMAND" in wlb(status=2).err


def test_wrong_flags_are_a_line_each_that_names_the_nearest(wlb) -> None:
    words = "pack corpus --num-micro-batchs 4 --windw=8 --window 64"
    assert wlb(words, status=2).err.splitlines() == [
        "error: unknown flag --num-micro-batchs; did you mean --num-micro-batches?",
        "error: unknown flag --windw; did you mean --window?",
    ]
