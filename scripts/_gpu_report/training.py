"""Steps in the part's own process, on one device and uneven documents."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from _gpu_report.running import world
from megatron_wlb.data.build_corpus import build_corpus
from megatron_wlb.data.lengths import sample_lengths
from megatron_wlb.runtime.trainer import distributed
from megatron_wlb.settings.command_line import parse

CORPUS = "texts"
SEED = 1
WORDS = ("ab", "cde", "fgh ", "the ", "sun ", "x. ")


def corpus(folder: Path, window: int, num_windows: int) -> Path:
    """Texts of the reference distribution's lengths, in bytes; the corpus's prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(SEED)
    with (folder / "texts.jsonl").open("w", encoding="utf-8") as stream:
        for length in sample_lengths("reference", num_windows, seed=SEED, window=window).tolist():
            text = "".join(random.choice(WORDS, length))[:length]
            stream.write(json.dumps({"text": text}) + "\n")
    build_corpus([folder / "texts.jsonl"], folder / CORPUS, force=True)
    return folder / CORPUS


def trainer(flags: Sequence[str]) -> Any:
    """A trainer in a world of this process alone, as torchrun would make it; the one before ends.

    The device must be chosen before (:func:`.distributed.choose_device`).
    """
    distributed.shutdown()
    os.environ |= world(1)[0]
    return distributed.start(parse(flags))


def train(one: Any, num_steps: int) -> None:
    """Runs so many steps. The plan of each is of other lengths."""
    for _ in range(num_steps):
        plan = one.planner.next_plan()
        assert plan is not None, "the corpus is long enough"
        one.step(plan)
