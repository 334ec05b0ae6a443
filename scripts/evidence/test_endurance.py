from __future__ import annotations

import json
import sys
from pathlib import Path

import endurance
import pytest
from endurance import PARTS, Result, page_of, parsed


def test_output_is_one_list_or_a_line_each() -> None:
    assert parsed('[{"a": 1}, {"a": 2}]\n') == [{"a": 1}, {"a": 2}]
    assert parsed('{"a": 1}\nsaid\n{"a": 2}\n') == [{"a": 1}, {"a": 2}]


def test_page_has_what_ran_and_says_what_did_not() -> None:
    found = [{"target": "flags", "executions": 1234, "edges": 56, "findings": [], "error": ""}]
    result = Result("0123abcd", "2026-01-02", "2 cores of a CPU", 600.0, 0, found)
    page = " ".join(page_of({"steps": None, "fuzz": result}).split())
    assert "**Not run yet by this command: Planned steps.**" in page
    assert "2026-01-02, commit `0123abcd`, 2 cores of a CPU, 10 minutes, status 0." in page
    assert "| flags | 1,234 | 56 | 0 | none |" in page
    assert "Not run. `scripts/evidence/soak.py --steps 100000 --seed 1 --json`" in page


def test_parts_that_ran_are_kept_and_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    given = {"steps": 10, "slices": 8, "rss_mib": [1.0] * 10, "tensors": [3] * 10, "refusal": ""}

    def result(words: list[str]) -> Result:
        ran.append([*words])
        return Result("0123abcd", "2026-01-02", "a CPU", 1.0, 0, [given])

    monkeypatch.setattr(endurance, "_result", result)
    page = tmp_path / "page.md"
    words = ["endurance.py", "--out", str(tmp_path), "--parts", "trained", "--page", str(page)]
    monkeypatch.setattr(sys, "argv", words)
    assert endurance.main() == 0 == endurance.main()
    assert ran == [["soak.py", "--train", "2000"]]
    assert "| 10 | 8 | 1.0 to 1.0 | 3 to 3 | nothing |" in page.read_text()
    monkeypatch.setattr(sys, "argv", [*words, "--again"])
    assert endurance.main() == 0 and len(ran) == 2


def test_faults_go_on_in_the_file_that_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def result(words: list[str]) -> Result:
        ran.append([*words])
        return Result("0123abcd", "2026-01-02", "a CPU", 1.0, 1, [])

    monkeypatch.setattr(endurance, "_result", result)
    monkeypatch.setattr(
        sys, "argv", ["endurance.py", "--out", str(tmp_path), "--parts", "launcher-2"]
    )
    assert endurance.main() == 1
    file = str(tmp_path / "launcher-2.outcomes.json")
    assert ran[0][-4:] == ["--out", file, "--missing", "--json"]
    assert ran[0][:5] == ["fault_matrix.py", "--trainers", "launcher", "--seed", "2"]
    assert json.loads((tmp_path / "launcher-2.json").read_text())["status"] == 1
    assert set(PARTS) >= {"launcher-1", "launcher-2"}
