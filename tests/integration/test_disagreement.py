"""Real runs of which one rank differs: each ends at once with an error that names it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import megatron_lm_runs
import pytest
from helpers.layouts import further
from helpers.strategy_ranks import strategies_file
from megatron_lm_runs import CP2, DP2, PP2, TP2_SP
from rank_runs import ROOT, Flags, command_line, start

from megatron_wlb.errors import PlanError

pytestmark = pytest.mark.launcher

RUN: Flags = megatron_lm_runs.BOTH | {"train_iters": 4, "wlb_packing": "hold"}
SLIM: Flags = PP2 | {"wlb_packing": "slim"}
STRATEGIES: Flags = {"wlb_strategies": ("tp2:512", "pp2:512")}
ODD = 1
"""The rank that differs."""

# What makes it differ: other flags, or something that runs in it first.


def old_numpy() -> None:
    import numpy as np

    np.__version__ = "2.1.0"


def other_kernel() -> None:
    from megatron_wlb.runtime.megatron_lm import session

    stock = session.settle_kernel  # in which ranks meet

    def settle_kernel(*args: Any) -> str:
        stock(*args)
        return "another"

    session.settle_kernel = settle_kernel


def other_plan() -> None:
    """The third step has its micro-batches in another order."""
    import dataclasses

    from megatron_wlb.planning.planner import Planner

    stock = Planner.next_plan

    def next_plan(planner: Any) -> Any:
        plan = stock(planner)
        if plan is None or plan.step != 2:
            return plan
        turned = tuple(own[::-1] for own in plan.micro_batches)
        return dataclasses.replace(plan, micro_batches=turned, chains=())

    Planner.next_plan = next_plan  # type: ignore[method-assign]


def only_in_odd_rank(fault: Callable[[], None]) -> None:
    if os.environ["RANK"] == str(ODD):
        fault()


def program_with(others: list[str], argv: list[str]) -> int:
    """The launcher, of which one rank has other flags behind its own."""
    return megatron_lm_runs.launched(argv + others if os.environ["RANK"] == str(ODD) else argv)


FAULTS: dict[str, Flags | Callable[[], None]] = {
    "seed": {"seed": 99},
    "layout": {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 2},
    "numpy": old_numpy,
    "hardware": {"wlb_hardware": "other-machine.yaml"},
    "cost": {"wlb_cost": "other-cost.yaml"},
    "kernel": other_kernel,
    "corpus": {"data_path": "other-corpus"},
    "byte": {"data_path": "other-bytes"},
    "plan": other_plan,
}
SAID = {
    "seed": (r"--seed 1234", "99"),
    "layout": ("--pipeline-model-parallel-size 2", " 1", "--tensor-model-parallel-size 1", " 2"),
    "numpy": ("has numpy", "2.1.0"),
    "hardware": ("has --wlb-hardware a file of", "bytes with crc32"),
    "cost": ("has --wlb-cost a file of", "bytes with crc32"),
    "kernel": ("after the start", "has attention kernel", "another"),
    "corpus": ("at the start", "has corpus 0", "crc32 of its index", "of samples"),
    "byte": ("ranks that must read the same tokens read others", "of document", "with crc32"),
    "plan": ("step 2: ranks hold different plans", "at place 0 of data-parallel rank 0"),
}


def write_files(folder: Path, corpus: Path) -> None:
    """The machine, the cost and the corpus, and those that one rank has instead."""
    machine = (ROOT / "configs" / "hardware" / "cpu.yaml").read_text()
    cost = {f"{kind}_us": 1.0 for kind in ("forward_linear", "backward_linear")}
    cost |= {f"{kind}_us": 0.01 for kind in ("forward_quadratic", "backward_quadratic")}
    for name, more in (("", 0), ("other-", 1)):
        (folder / f"{name}machine.yaml").write_text(machine + "\n" * more)
        text = "".join(f"{key}: {value + more}\n" for key, value in cost.items())
        (folder / f"{name}cost.yaml").write_text(text)
    stored = bytearray(Path(f"{corpus}.bin").read_bytes())
    for suffix in (".idx", ".json"):
        for name in ("other-corpus", "other-bytes"):
            shutil.copy(f"{corpus}{suffix}", folder / f"{name}{suffix}")
    sampled = bytearray(stored)
    sampled[100] ^= 1
    (folder / "other-corpus.bin").write_bytes(sampled)
    room = len(stored) - 4096
    for number in range(15):  # between samples
        first, last = room * number // 15 + 4096, room * (number + 1) // 15
        for at in range(first, last, 500):
            stored[at + at % 2] ^= 1  # a token has two bytes, the low one first
    (folder / "other-bytes.bin").write_bytes(stored)


MACHINE: Flags = {"wlb_hardware": "machine.yaml"}
COST: Flags = {"wlb_cost": "cost.yaml"}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("layout", PP2),
        ("byte", PP2),
        ("plan", DP2),
        ("kernel", TP2_SP),
        *(further(*each) for each in [
            ("numpy", DP2), ("corpus", DP2), ("seed", DP2), ("numpy", PP2), ("corpus", PP2),
            ("corpus", CP2), ("kernel", DP2), ("hardware", CP2 | MACHINE), ("cost", SLIM | COST),
            ("byte", TP2_SP), ("byte", SLIM), ("plan", CP2), ("plan", PP2), ("seed", STRATEGIES),
            ("numpy", STRATEGIES), ("hardware", STRATEGIES), ("corpus", STRATEGIES),
            ("byte", STRATEGIES),
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_rank_that_differs_is_named(tmp_path: Path, corpus: Path, name: str, layout: Flags) -> None:
    flags = megatron_lm_runs.MEGATRON_LM | RUN | {"data_path": corpus} | layout
    if "wlb_strategies" in layout:
        flags |= {"wlb_strategies": strategies_file(tmp_path, layout["wlb_strategies"], 2)}
        flags |= {"wlb_packing": None} | MACHINE
    write_files(tmp_path, corpus)
    fault = FAULTS[name]
    others = command_line(fault) if isinstance(fault, dict) else []
    before = None if isinstance(fault, dict) else partial(only_in_odd_rank, fault)
    program = partial(program_with, others)
    finished = start(tmp_path, 2, flags, fault=before, program=program).wait()
    assert finished.code == PlanError.exit_code, finished.output
    assert finished.errors, finished.output
    for line in finished.errors:  # of each rank that had the time to tell
        for fragment in (f"rank {ODD} (host ", *SAID[name]):
            assert fragment in line, line
    assert "Traceback" not in finished.output, finished.output
