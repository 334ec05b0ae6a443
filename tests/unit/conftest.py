"""What tests of several modules need."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.one_process import one_process

from megatron_wlb.cli.main import main
from megatron_wlb.runtime.compat.source import MegatronSource
from megatron_wlb.runtime.megatron_lm import dry_run


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
    monkeypatch.setattr("megatron_wlb.study.workers.ALONE_S", inf)  # other tests run beside
    return Wlb(capsys)


@pytest.fixture(scope="session")
def in_one_process() -> Iterator[Callable[..., Any]]:
    with one_process() as call:
        yield call


@pytest.fixture
def dry_runs(in_one_process: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dry runs ask one process, and the installed Megatron."""

    def ask(*question: Any) -> dict[str, Any]:
        *words, environment = question
        return in_one_process(dry_run.answer, *words, environment=environment)

    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    monkeypatch.setattr(dry_run, "ask", ask)
