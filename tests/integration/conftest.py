"""Corpora, and an end for processes that a failed test leaves behind."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
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
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 documents of 5 to 4,000 bytes, heavy-tailed, 100,000 in all; the same everywhere."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = np.random.RandomState(7)
    with (folder / "texts.jsonl").open("w") as stream:
        for length in np.clip(generator.lognormal(4.9, 1.3, 300), 5, 4000).astype(int):
            words = generator.choice(["ab", "cde", "fgh ", "the ", "sun ", "x. "], length)
            stream.write(json.dumps({"text": "".join(words)[:length]}) + "\n")
    build_corpus([folder / "texts.jsonl"], folder / "texts")
    return folder / "texts"


@pytest.fixture(scope="session")
def code_corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two corpora of this Python's own functions and classes, of up to some 40,000 bytes."""
    folder, stdlib = tmp_path_factory.mktemp("code"), Path(sysconfig.get_path("stdlib"))
    parts = {"first": ("argparse", "ast", "inspect", "tarfile"), "second": ("typing", "doctest")}
    for name, modules in parts.items():
        files = [stdlib / f"{module}.py" for module in modules]
        build_corpus(files, folder / name, python_definitions=True)
    return [folder / name for name in parts]
