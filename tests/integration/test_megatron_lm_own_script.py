"""Megatron-LM's own ``pretrain_gpt.py`` is known by its forward step and its data sets."""

from __future__ import annotations
import __future__

import ast
import functools
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_wlb.runtime.compat import script, targets
from megatron_wlb.runtime.compat.source import MegatronSource


def functions_of(path: Path) -> dict[str, Any]:
    """Top-level functions and constants of a script whose imports need Megatron and torch."""
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
    ]
    made: dict[str, Any] = {"__name__": "__main__", "lru_cache": functools.lru_cache}
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(path), "exec", flags=flags), made)
    return made


@pytest.mark.checkout
def test_megatrons_own_script_is_known() -> None:
    """If it is not, and computes what the last one did: the new ones go into the table."""
    source = MegatronSource.at(os.environ["MEGATRON_LM_PATH"])
    made = functions_of(source.core_root / "pretrain_gpt.py")
    found = [made["forward_step"], made["train_valid_test_datasets_provider"]]
    known = targets.version_of(source.version)
    assert [*map(script.fingerprint, found)] == [known.forward_step, known.datasets]
