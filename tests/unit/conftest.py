"""What tests of several modules need."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_wlb.cli.main import main
from megatron_wlb.runtime.compat.source import MegatronSource


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The installed core's Python files, to be changed."""
    core = MegatronSource.installed().core_root / "megatron" / "core"
    for path in core.rglob("*.py"):
        copy = tmp_path / "megatron" / "core" / path.relative_to(core)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return tmp_path


class Said(NamedTuple):
    out: str
    err: str

    @property
    def cells(self) -> list[list[str]]:
        """What stands in the columns of tables, row by row."""
        lines = [line.split("│") for line in self.out.splitlines() if "│" in line]
        return [[cell.strip() for cell in line] for line in lines]


class Wlb:
    """Runs commands. A text is split as a shell does; anything else is one word."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, status: int = 0) -> Said:
        argv = [
            part for word in words
            for part in (shlex.split(word) if isinstance(word, str) else [str(word)])
        ]  # fmt: skip
        ended = main(argv)
        said = Said(*self._capsys.readouterr())
        assert ended == status, said.err
        return said

    def json(self, *words: object) -> Any:
        return json.loads(self(*words, "--json").out)

    def refusal(self, *words: object, status: int = 2) -> str:
        """The error, which is one line; progress may stand before it, and nothing on stdout."""
        said = self(*words, status=status)
        *before, error = said.err.splitlines()
        assert said.out == "" and error.startswith("error: "), said
        assert not [line for line in before if "error" in line]
        return error.removeprefix("error: ")

    def help(self, command: str) -> str:
        with pytest.raises(SystemExit) as end:
            main([*command.split(), "--help"])
        assert end.value.code == 0
        return self._capsys.readouterr().out


@pytest.fixture
def wlb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Wlb:
    monkeypatch.chdir(tmp_path)
    return Wlb(capsys)
