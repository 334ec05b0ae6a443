"""Two runs are compared by what they logged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

STOCK = (
    " [2026-11-28 04:00:00.0] iteration {:8}/     200 | consumed samples: {:12} | elapsed time "
    "per iteration (ms): {:.1f} | learning rate: 1.0E-04 | global batch size: {:5} | lm loss: "
    "{:.6E} | loss scale: 1.0 | grad norm: 1.2 |\n"
)


def metrics(path: str, ms: float, *, tflops: float | None = 100.0, steps: int = 200) -> None:
    noise = np.random.default_rng(7).normal(1.0, 0.05, steps)
    with Path(path).open("w") as stream:
        for step, factor in enumerate(noise, start=1):
            line = {"iteration": step, "step_ms": ms * factor, "tokens": 8192, "loss": 3.0}
            if tflops is not None:
                line["tflops_per_device"] = tflops * 100 / (ms * factor)
            stream.write(json.dumps(line) + "\n")
        stream.write(json.dumps({"iteration": steps, "validation_loss": 3.1}) + "\n")


def stock(path: str, ms: float, steps: int = 200) -> None:
    lines = (STOCK.format(n, 8 * n, ms, 8, 3.5) for n in range(1, steps + 1))
    Path(path).write_text("other words\n" + "".join(lines))


def test_a_faster_run_is_seen_with_its_interval(wlb) -> None:
    metrics("a.jsonl", 100.0)
    metrics("b.jsonl", 80.0)
    found = wlb.json("compare a.jsonl b.jsonl")
    assert found["of"] == "TFLOP a device" and found["steps"] == [190, 190]
    assert found["speedup"] == pytest.approx(1.25, rel=0.01)
    assert 1.15 < found["low"] < 1.25 < found["high"] < 1.35
    assert "faster" in wlb("compare a.jsonl b.jsonl").out
    assert "slower" in wlb("compare b.jsonl a.jsonl").out
    assert "not proven" in wlb("compare a.jsonl a.jsonl").out
    assert wlb.json("compare a.jsonl b.jsonl") == found


def test_megatrons_own_log_is_compared_by_tokens(wlb) -> None:
    stock("stock.log", 200.0)
    metrics("b.jsonl", 100.0)
    found = wlb.json("compare stock.log b.jsonl --window 1024 --skip 0")
    assert found["of"] == "tokens" and found["per_s"][0] == pytest.approx(8 * 1024 / 0.2)
    assert found["speedup"] == pytest.approx(2.0, rel=0.01) and found["losses"] == [3.5, 3.0]


def test_steps_that_ran_again_count_once(wlb) -> None:
    metrics("a.jsonl", 100.0)
    once = wlb.json("compare a.jsonl a.jsonl")
    text = Path("a.jsonl").read_text().splitlines(keepends=True)
    Path("b.jsonl").write_text("".join([*text[:90], *text[60:]]))
    assert wlb.json("compare a.jsonl b.jsonl") == once


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("stock.log stock.log", "stock.log is what Megatron-LM printed; give --window"),
        ("ours.log a.jsonl", "ours.log is the log of a run with --wlb-packing hold; give its"),
        ("few.jsonl a.jsonl", "few.jsonl has 30 steps, 20 of them after --skip 10; give a run of"),
        ("none.jsonl a.jsonl", "No such file"),
        ("torn.jsonl a.jsonl", "torn.jsonl: a line is damaged"),
        ("a.jsonl a.jsonl --skip -1", "--skip is -1; give at least 0"),
        ("a.jsonl a.jsonl --seed -1", "--seed is -1; give at least 0"),
        ("stock.log a.jsonl --window 0", "--window is 0; give at least 1"),
        ("still.jsonl a.jsonl", "still.jsonl has steps of no time or no tokens"),
    ],
)
def test_what_cannot_be_compared_is_one_line(words: str, says: str, wlb) -> None:
    metrics("a.jsonl", 100.0)
    metrics("few.jsonl", 100.0, steps=30)
    metrics("still.jsonl", 0.0, tflops=None)
    stock("stock.log", 100.0)
    Path("ours.log").write_text("0: [rank 1]  wlb hold | tokens: 4241 | step (ms): 419.1 |\n")
    Path("torn.jsonl").write_text('{"iteration": 3, "step_ms": 1')
    assert says in wlb.refusal(f"compare {words}")
