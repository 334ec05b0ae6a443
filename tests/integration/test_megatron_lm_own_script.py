"""A checkout's own ``pretrain_gpt.py``: known by its forward step and its data sets, and what the
launcher runs without it trains as it does.
"""

from __future__ import annotations
import __future__

import ast
import functools
import os
from pathlib import Path
from typing import Any

import pytest
from megatron_lm_runs import BOTH, PP2, PP2_VPP2, SCRIPT, Flags, launch, logged, validations
from rank_runs import finish

from megatron_wlb.runtime.compat import hooks, script
from megatron_wlb.runtime.compat.source import MegatronSource

pytestmark = pytest.mark.checkout


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


@pytest.mark.parametrize(("number", "name"), [(0, "pretrain_gpt.py"), (1, "pretrain_hybrid.py")])
def test_megatrons_own_script_is_known(number: int, name: str) -> None:
    """If it is not, and computes what the last one did: the new ones go into the table."""
    source = MegatronSource.at(os.environ["MEGATRON_LM_PATH"])
    made = functions_of(source.core_root / name)
    found = [made["forward_step"], made["train_valid_test_datasets_provider"]]
    known = hooks.version_of(source.version)
    assert [*map(script.fingerprint, found)] == [
        known.forward_steps[number], known.datasets[number],
    ]  # fmt: skip


CASES: dict[str, tuple[int, Flags]] = {
    "plans": (2, PP2 | {"wlb_packing": "hold"}),
    "windows": (2, PP2_VPP2),
    "masks": (1, {
        "eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True,
        "vocab_size": ord("x") + 1,  # the last one ends documents, and is in the texts
    }),
    "mock-data": (2, {"data_path": None, "mock_data": True}),
}  # fmt: skip


@pytest.mark.launcher
@pytest.mark.own_script
@pytest.mark.parametrize("name", CASES)
def test_script_of_the_package_trains_as_the_checkouts(
    name: str, corpus: Path, tmp_path: Path
) -> None:
    """To every digit of the log; but for the first case they run without plans."""
    num_processes, more = CASES[name]
    flags = BOTH | {"data_path": corpus, "data_cache_path": "cache", "train_iters": 3}
    flags |= {"eval_interval": 2, "eval_iters": 1, "num_workers": 0, "wlb_device": "cpu"}
    own, stands_in = (
        finish(launch(tmp_path, num_processes, flags | more, script=one)) for one in (SCRIPT, None)
    )
    for figure in ("lm loss", "grad norm", "learning rate"):
        assert logged(stands_in, figure) == logged(own, figure)
    assert len(logged(own, "lm loss")) == 3
    assert validations(stands_in) == validations(own) != []
