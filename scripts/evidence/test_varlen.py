"""Rows of other layouts become the messages that Megatron-LM's own ``VarlenDataset`` makes of them.

``MEGATRON_DEV_PATH`` is a checkout of Megatron-LM's ``dev``. Only its conversions run: the rest of
the file imports CUDA's libraries.
"""

from __future__ import annotations
import __future__

import ast
import os
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_wlb.data.conversations import _FIELDS, _ROLES, _messages

PATH = os.environ.get("MEGATRON_DEV_PATH")
pytestmark = pytest.mark.skipif(not PATH, reason="MEGATRON_DEV_PATH names no checkout of dev")


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    path = Path(str(PATH)) / "megatron/training/datasets/varlen_dataset.py"
    tree = ast.parse(path.read_text())
    kept = ast.FunctionDef | ast.AnnAssign
    tree.body = [node for node in tree.body if isinstance(node, kept)]
    made: dict[str, Any] = {name: getattr(typing, name) for name in typing.__all__}
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(path), "exec", flags=flags, dont_inherit=True), made)
    return made


def test_a_thousand_rows_have_their_messages(theirs: dict[str, Any]) -> None:
    random = np.random.default_rng(1)
    speakers = [*_ROLES, "human", "Human", "GPT", "somebody", ""]
    names = [name for fields in _FIELDS for name in fields]
    seen = set()
    for number in range(1000):
        if number % 2:
            turns = [
                {"from": str(random.choice(speakers)), "value": f"{number} {turn}"}
                for turn in range(random.integers(1, 6))
            ]
            row: dict[str, Any] = {"conversations": turns, "id": number}
        else:
            row = {str(name): f"{name} {number}" for name in random.choice(names, 5)}
            row |= {str(random.choice(names)): ""}
        convert, kind = None, ""
        try:
            convert, kind = theirs["_select_converter"](list(row))
        except ValueError:
            with pytest.raises(Exception, match="no key 'messages'"):
                _messages(row, "here")
            continue
        assert _messages(row, "here") == convert(row)
        seen.add(kind)
    assert seen == {"sharegpt", "alpaca"}
