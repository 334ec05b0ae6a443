"""A run that is killed and goes on passes its audit; a ledger that is changed does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import Flags, finish, num_lines, read_metrics, start, tracked

from megatron_wlb.cli.main import main
from megatron_wlb.errors import CheckpointError
from megatron_wlb.planning.ledger.lines import LENGTH, NAME, decode, encode, read, seal

FLAGS: Flags = {
    "train_iters": 9,
    "global_batch_size": 4,
    "seq_length": 512,
    "hidden_size": 16,
    "num_layers": 2,
    "num_attention_heads": 2,
    "wlb_look_ahead": 2,
    "eval_interval": 3,
    "eval_iters": 1,
    "split": "90,10,0",
    "save": "checkpoints",
    "load": "checkpoints",
    "save_interval": 2,
    "wlb_metrics": "metrics",
}


def audited(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = main(["audit", str(folder), "--json", *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The folder of a run that was killed after a step that it had not saved, and finished."""
    folder = tmp_path_factory.mktemp("audited")
    flags = FLAGS | {"data_path": corpus}
    killed = start(folder, 1, flags | {"save_interval": 4})
    ledger = folder / "checkpoints" / NAME

    killed.wait_until(lambda: tracked(ledger.parent) > 0 and num_lines(ledger) >= 1 + 6)
    killed.kill()
    assert tracked(ledger.parent) == 4
    with ledger.open("ab") as stream:
        stream.write(b"0badc0de {torn")
    finish(start(folder, 1, flags))
    return folder


def test_killed_run_trains_each_token_once(
    run: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = audited(capsys, run / "checkpoints", "--replay")
    assert code == 0, report
    assert (report["lost"]["number"], report["twice"]["number"]) == (0, 0)
    assert (report["steps"], report["restarts"], report["proven_until"]) == (9, 1, 9)
    assert report["rolled_back"] >= 2
    assert report["replayed"] == 9
    last = {m["iteration"]: m for m in read_metrics(run / "metrics") if "loss" in m}
    assert report["tokens"] == sum(step["tokens"] for step in last.values())
    assert report["waiting"] >= last[9]["waiting_documents"]
    assert list(report["epochs"]) == [str(corpus)]


def test_audit_tells_what_it_found_in_a_few_lines(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run / "checkpoints")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("steps      9 (1 to 9), 1 restarts, which ran ")
    assert lines[-2:] == ["lost       0", "twice      0"]
    assert len(lines) == 6


def remove_document(lines: list[dict[str, Any]]) -> None:
    pieces = decode(lines[3]["documents"])
    lines[3]["documents"] = encode(pieces[1:])
    lines[3]["tokens"] -= int(pieces[0, LENGTH])


def double_step(lines: list[dict[str, Any]]) -> None:
    lines.insert(3, lines[3])


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (remove_document, "lost", "of the stream (counted from 0)"),
        (double_step, "twice", ": ran in step 3, ran in step 3"),
    ],
    ids=["document", "step"],
)
def test_audit_finds_what_is_not_there_or_twice(
    change: Any, kind: str, said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Negative control; the checksums are made anew."""
    path = run / "checkpoints" / NAME
    original = path.read_bytes()
    lines = [line.values for line in read(path) if line is not None]
    change(lines)
    path.write_bytes(b"".join(map(seal, lines)))
    try:
        code, report = audited(capsys, run / "checkpoints")
    finally:
        path.write_bytes(original)
    assert code == CheckpointError.exit_code
    assert report[kind]["number"]
    assert said in report[kind]["first"][0]
    assert report["lost" if kind == "twice" else "twice"]["number"] == 0


def test_damaged_line_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "checkpoints" / NAME
    original = path.read_bytes()
    changed = bytearray(original)
    changed[original.index(b"\n") + 20] ^= 1
    path.write_bytes(changed)
    try:
        assert main(["audit", str(run / "checkpoints")]) == CheckpointError.exit_code
    finally:
        path.write_bytes(original)
    assert "line 2, from byte" in capsys.readouterr().err


def test_run_without_a_ledger_has_nothing_to_audit(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = FLAGS | {"data_path": corpus, "train_iters": 2, "wlb_no_ledger": True}
    finish(start(tmp_path, 1, flags))
    assert not (tmp_path / "checkpoints" / NAME).exists()
    assert main(["audit", str(tmp_path / "checkpoints")]) == CheckpointError.exit_code
    assert "give the folder of a --save" in capsys.readouterr().err
