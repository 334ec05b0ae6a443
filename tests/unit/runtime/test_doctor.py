"""``wlb doctor``: findings, exit status, and what makes it say that something is wrong."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from megatron_wlb.cli.main import main
from megatron_wlb.runtime import findings
from megatron_wlb.runtime.compat import hooks
from megatron_wlb.runtime.compat.source import MegatronSource
from megatron_wlb.runtime.findings import Finding, examine

P2P = "megatron/core/pipeline_parallel/p2p_communication.py"


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def test_this_installation_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"]
    found = {finding["subject"]: finding for finding in shown["findings"]}
    assert found["megatron-core"]["found"] == MegatronSource.installed().version
    assert found["torch-cpu"]["level"] == found["sdpa"]["level"] == "ok"
    number = len(hooks.problems(MegatronSource.installed()))
    assert found["hooked names"]["found"].startswith(f"{number} of {number} names")


def test_notes_are_not_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding("machine", "GPUs", "note", "none"), Finding("package", "a[b]", "ok", "1")]
    monkeypatch.setattr("megatron_wlb.cli.doctor.examine", lambda _: findings)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "Everything that is needed is there and fits." in out and "a[b]" in out


def test_everything_wrong_has_a_remedy(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (tree / P2P).read_text()
    (tree / P2P).write_text(text.replace("def _communicate_shapes", "def _exchange_shapes"))
    findings = by_subject(examine(tree))
    wrong = {name: f for name, f in findings.items() if f.level == "wrong"}
    name = "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate_shapes"
    assert set(wrong) == {name, "hooked names"}
    assert wrong[name].found == "is missing" and wrong[name].remedy
    assert main(["doctor", "--megatron", str(tree)]) == 7
    assert "2 wrong" in capsys.readouterr().out


def test_unknown_version_is_wrong(tree: Path) -> None:
    info = tree / "megatron/core/package_info.py"
    info.write_text(info.read_text().replace("MINOR = 19", "MINOR = 99"))
    findings = by_subject(examine(tree))
    assert findings["megatron.core"].level == "wrong"
    assert "--wlb-allow-untested-megatron" in findings["megatron.core"].remedy


def test_folder_without_megatron_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--megatron", str(tmp_path)]) == 7
    assert "give the folder that has megatron/core in it" in capsys.readouterr().err


def test_missing_packages_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(findings.importlib.metadata, "version", version)
    monkeypatch.setattr(
        findings.importlib.util,
        "find_spec",
        lambda name: None if name in ("torch", "megatron", "apex") else find_spec(name),
    )
    found = by_subject(examine(MegatronSource.installed().core_root))
    assert (found["torch"].level, found["apex"].level) == ("wrong", "note")
    assert found["torch"].remedy == "pip install -c constraints.txt torch"
    assert found["megatron-core"].level == "wrong"
    assert "sdpa" not in found  # kernels need torch
    assert found["hooked names"].level == "ok"
