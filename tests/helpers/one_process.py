"""Calls of functions in one other process, which imports Megatron once: that takes 10 s of CPU."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch


@contextlib.contextmanager
def one_process() -> Iterator[Callable[..., Any]]:
    """What calls a function there, in this folder and environment, and raises what it raises."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:

        def call(
            function: Callable[..., Any], *words: Any, environment: Mapping[str, str] | None = None
        ) -> Any:
            variables = {**os.environ, **(environment or {})}
            return pool.submit(_call, Path.cwd(), variables, function, words).result()

        yield call


def _call(
    folder: Path, variables: dict[str, str], function: Callable[..., Any], words: tuple[Any, ...]
) -> Any:
    os.chdir(folder)
    with patch.dict(os.environ, variables, clear=True), contextlib.redirect_stdout(sys.stderr):
        return function(*words)
