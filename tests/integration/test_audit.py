"""A run that is killed and goes on passes its audit; a ledger that is changed does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from megatron_lm_runs import BOTH, DP2, launch
from rank_runs import Flags, finish, num_lines, read_metrics, tracked

from megatron_wlb.cli.main import main
from megatron_wlb.errors import CheckpointError
from megatron_wlb.planning.ledger.lines import LENGTH, NAME, decode, encode, read, seal

pytestmark = pytest.mark.launcher

FLAGS: Flags = BOTH | {
    "train_iters": 8,
    "wlb_packing": "hold",
    "wlb_look_ahead": 1,
    "eval_interval": 4,
    "eval_iters": 1,
    "save": "checkpoints",
    "load": "checkpoints",
    "save_interval": 3,
    "wlb_metrics": "metrics",
}
FORMATS: dict[str, Flags] = {
    "torch_dist": DP2 | {"bf16": True}, "torch": {"iterations_to_skip": [1]},
}  # fmt: skip


def audited(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = main(["audit", str(folder), "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def killed_and_finished(folder: Path, corpus: Path, ckpt_format: str) -> int:
    """Kills a run after a step that it has not saved, tears its ledger, and runs it to its end;
    where that can be, at half the ranks. The step that it went on from.
    """
    flags = FLAGS | FORMATS[ckpt_format] | {"data_path": corpus, "ckpt_format": ckpt_format}
    killed, ledger = launch(folder, 2, flags), folder / "checkpoints" / NAME
    killed.wait_until(lambda: tracked(ledger.parent) > 0 and num_lines(ledger) >= 1 + 4)
    killed.kill()
    with ledger.open("ab") as stream:
        stream.write(b"0badc0de {torn")
    resumed = tracked(ledger.parent)
    finish(launch(folder, 1 if ckpt_format == "torch_dist" else 2, flags))
    return resumed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The folder of such a run."""
    folder = tmp_path_factory.mktemp("audited")
    (folder / "resumed").write_text(str(killed_and_finished(folder, corpus, "torch_dist")))
    return folder


def assert_each_token_once(
    folder: Path,
    resumed: int,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    num_skipped: int = 0,
) -> None:
    code, report = audited(capsys, folder / "checkpoints", "--replay")
    assert code == 0, report
    assert (report["lost"]["number"], report["twice"]["number"]) == (0, 0)
    assert (report["steps"], report["restarts"], report["proven_until"]) == (8, 1, 8)
    assert report["rolled_back"] >= 4 - resumed
    assert (report["skipped"], report["replayed"]) == (num_skipped, 8)
    last = {m["iteration"]: m for m in read_metrics(folder / "metrics")}
    assert report["tokens"] >= sum(step["tokens"] for step in last.values())  # one is skipped
    assert report["waiting"] >= last[8]["waiting_documents"]
    assert list(report["epochs"]) == [str(corpus)]


def test_killed_run_trains_each_token_once(
    run: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_each_token_once(run, int((run / "resumed").read_text()), corpus, capsys)


@pytest.mark.long
def test_killed_run_of_the_other_format_trains_each_token_once(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = killed_and_finished(tmp_path, corpus, "torch")
    assert_each_token_once(tmp_path, resumed, corpus, capsys, num_skipped=1)


def test_audit_tells_what_it_found_in_a_few_lines(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run / "checkpoints")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("steps      8 (1 to 8), 1 restarts, which ran ")
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
        (remove_document, "lost", "document "),
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
    finish(launch(tmp_path, 1, flags))
    assert not (tmp_path / "checkpoints" / NAME).exists()
    assert main(["audit", str(tmp_path / "checkpoints")]) == CheckpointError.exit_code
    assert "give the folder of a --save" in capsys.readouterr().err
