"""Corpora, and an end for processes that a failed test leaves behind."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import trainer_runs

from megatron_wlb.data.corpus import build_corpus


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    while trainer_runs.RUNS:
        run = trainer_runs.RUNS.pop()
        if run.poll() is None:
            run.kill()


@pytest.fixture(scope="session")
def code_corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two corpora of this Python's own functions and classes, of up to some 40,000 bytes."""
    folder, stdlib = tmp_path_factory.mktemp("code"), Path(sysconfig.get_path("stdlib"))
    parts = {"first": ("argparse", "ast", "inspect", "tarfile"), "second": ("typing", "doctest")}
    for name, modules in parts.items():
        files = [stdlib / f"{module}.py" for module in modules]
        build_corpus(files, folder / name, python_definitions=True)
    return [folder / name for name in parts]
