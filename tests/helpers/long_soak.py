"""Long runs of a planner that crash at random: every token once, and memory that stays flat."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from helpers.soak import Soak
from megatron_wlb.cost import DocumentCost
from megatron_wlb.planning.ledger.history import History, Report, audit
from megatron_wlb.planning.ledger.lines import NAME
from megatron_wlb.planning.ledger.writer import StepLedger
from megatron_wlb.planning.planner import Planner

PIPELINE = "--pipeline-model-parallel-size 2"
COST = DocumentCost(1, 0.1, 2, 0.25, micro_batch_us=5)
RUNS: dict[str, str] = {
    "original": "",
    "fixed-greedy": "",
    "wlb": "",
    "hold": "",
    "hold, ahead": "",
    "slim": PIPELINE,
    "hold, auto": PIPELINE,
    "original, auto": PIPELINE,
}
"""Names of :mod:`helpers.soak`, and flags of the pipeline that some need."""
WEIGHTS = (0.3, 0.7)
STEPS_A_SAVE, STEPS_A_CRASH = 40, 150
"""In the mean."""


@dataclass(frozen=True)
class Figures:
    """What became of a run."""

    packing: str
    is_blend: bool
    planned: int
    """Steps, with those that were planned again."""
    report: Report
    seconds: float
    ledger_bytes: int
    rss_mib: tuple[float, ...]
    """The process's memory at each tenth of the run."""
    state_bytes: tuple[int, ...]
    """The largest saved state in each tenth."""

    def refusal(self) -> str:
        """What is wrong; nothing if all is as it should be.

        Memory is compared with the third tenth's: until then caches fill. A ledger's line, or
        documents that are kept, would add far more than the 8 MiB that allocators may.
        """
        r = self.report
        if r.lost.number or r.twice.number:
            return f"lost {r.lost.number} {r.lost.first}, twice {r.twice.number} {r.twice.first}"
        if self.rss_mib[-1] > self.rss_mib[2] + 8:
            return f"memory grows: {self.rss_mib} MiB"
        if max(self.state_bytes[5:]) > 2 * max(self.state_bytes[:5]):
            return f"states grow: {self.state_bytes} bytes"
        return ""


def soak_of(packing: str, is_blend: bool, seed: int) -> Soak:
    """A stream of two corpora of uneven documents, some longer than the window, without an end."""
    generator = np.random.RandomState(seed)
    lengths = [np.maximum(generator.lognormal(5.5, 1.6, 3000).astype(int), 1) for _ in range(2)]
    return Soak(
        packing, tuple(tuple(corpus.tolist()) for corpus in lengths),
        WEIGHTS if is_blend else None, None, "split", 1024, 8, 2048, None, 12, COST, 0, seed,
        RUNS.get(packing, ""),
    )  # fmt: skip


def run(
    packing: str,
    is_blend: bool,
    num_steps: int,
    seed: int,
    folder: Path,
) -> Figures:
    """Plans ``num_steps`` with crashes, each of which takes back what was planned since a save.

    Raises :class:`AssertionError` where a step that is planned again is another one.
    """
    soak, chance = soak_of(packing, is_blend, seed), random.Random(seed)
    start_s, process = time.perf_counter(), psutil.Process()
    planner = soak.planner()
    ledger = StepLedger(folder)
    ledger.start(0, planner)
    saved: tuple[int, Any] = (0, None)
    digests: dict[int, str] = {}  # since the save
    rss: list[float] = []
    sizes = [0] * 10
    for number in range(num_steps):
        plan = planner.next_plan()
        assert plan is not None
        ledger.step(plan)
        assert digests.setdefault(ledger.iteration, plan.digest) == plan.digest, number
        if chance.random() < 1 / STEPS_A_SAVE or number == num_steps - 1:
            text = json.dumps(planner.state_dict())
            saved, digests = (ledger.iteration, json.loads(text)), {}
            sizes[10 * number // num_steps] = max(sizes[10 * number // num_steps], len(text))
        elif chance.random() < 1 / STEPS_A_CRASH:
            planner, ledger = _crash(soak, ledger, saved, folder, chance)
        if (number + 1) * 10 // num_steps > len(rss):
            rss.append(process.memory_info().rss / 2**20)
    ledger.close()
    seconds = time.perf_counter() - start_s
    path = folder / NAME
    report = audit(History(path), saved)
    return Figures(
        packing, is_blend, num_steps, report, seconds, path.stat().st_size,
        tuple(round(mib, 1) for mib in rss), tuple(sizes),
    )  # fmt: skip


def _crash(
    soak: Soak, ledger: StepLedger, saved: tuple[int, Any], folder: Path, chance: random.Random
) -> tuple[Planner, StepLedger]:
    """Starts anew from the save, perhaps with a line that was torn."""
    ledger.close()
    if chance.random() < 0.5:
        with (folder / NAME).open("ab") as stream:
            stream.write(os.urandom(chance.randint(1, 300)).replace(b"\n", b" "))
    iteration, state = saved
    planner = soak.planner()
    if state is not None:
        planner.load_state_dict(state)
    ledger = StepLedger(folder)
    ledger.start(iteration, planner)
    return planner, ledger


def flat(figures: Figures) -> dict[str, Any]:
    """The figures, JSON-able."""
    r = figures.report
    return {name: value for name, value in vars(figures).items() if name != "report"} | {
        "steps": r.steps, "restarts": r.restarts, "rolled_back": r.rolled_back,
        "documents": r.documents, "tokens": r.tokens, "lost": r.lost.number,
        "twice": r.twice.number, "waiting": r.waiting, "oldest_steps": r.oldest_steps,
        "epochs": r.epochs,
    }  # fmt: skip
