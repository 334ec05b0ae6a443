#!/usr/bin/env python3
"""Measures what the exchange of strategies adds to a step: beside the passes, before and behind
them, and left out.

Gloo ranks on this machine run two replicas of a llama-like model, and each step three times, in
turn. Their losses must be equal where weights are exchanged; left out, they are those of the step
before. On CPUs the exchange takes time of the cores that compute, so little of it can be hidden.

    scripts/evidence/exchange_overlap.py --steps 20
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from _common import parser_of

from megatron_wlb.errors import run_program

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from helpers.gloo import GlooPool
from helpers.layouts import MODELS
from helpers.strategy_ranks import (
    open_runner,
    plan_for,
    run_step,
    strategies_file,
    with_strategies,
)
from helpers.workload import make_workload

from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config

STRATEGIES = {1: "2*tp1:256", 2: "2*pp2:256"}
WORKLOAD = make_workload([[170, 75, 128, 120, 8, 225, 19, 160]], vocab_size=1000)
FLAGS = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 "
    f"--make-vocab-size-divisible-by 128 --global-batch-size 2 {MODELS['llama']}"
)


@contextmanager
def apart() -> Iterator[None]:
    """All weights are waited for before the passes; gradients go behind them."""
    from megatron_wlb.strategies.run.routes import Pull, Push

    begin, post = Pull.__init__, Push.post

    def at_once(pull: Pull, *given: Any) -> None:
        begin(pull, *given)
        pull.finish()

    def at_the_end(push: Push, down_to: int) -> None:
        if not down_to:
            post(push, down_to)

    with (
        mock.patch.object(Pull, "__init__", at_once),
        mock.patch.object(Push, "post", at_the_end),
    ):
        yield


@contextmanager
def none() -> Iterator[None]:
    """Nothing is exchanged."""
    from megatron_wlb.strategies.run.routes import Pull, Push

    nothing = {"wait": lambda *_: None, "finish": lambda *_: None, "post": lambda *_: None}
    with ExitStack() as stack:
        for kind, names in ((Pull, ("wait", "finish")), (Push, ("post", "finish"))):
            stack.enter_context(mock.patch.object(kind, "__init__", lambda *_: None))
            for name in names:
                stack.enter_context(mock.patch.object(kind, name, nothing[name]))
        yield


@contextmanager
def beside() -> Iterator[None]:
    """As it is."""
    yield


WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "beside the passes": beside,
    "before and behind": apart,
    "left out": none,
}


def measure(config: Config, num_steps: int) -> dict[str, list[float]]:
    """Seconds of steps, by way."""
    import torch.distributed as dist

    run, runner = open_runner(config, WORKLOAD)
    plan = plan_for(run, WORKLOAD, 0)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    losses = set()
    for number in range(num_steps + 1):
        for way, fault in WAYS.items():
            with fault():
                dist.barrier()
                begin = time.perf_counter()
                loss = run_step(runner, plan)
                dist.barrier()
                if number:  # the first steps warm up
                    found[way].append(time.perf_counter() - begin)
            if fault is not none:
                losses.add(loss)
    assert len(losses) == 1, losses
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="of each way (default: %(default)s)")
    parser.add_argument(
        "--stages", type=int, choices=STRATEGIES, default=1, help="PP of the two replicas"
    )
    parser.add_argument("--json", action="store_true", help="print seconds as JSON")
    args = parser.parse_args()
    num_ranks = 2 * args.stages
    with tempfile.TemporaryDirectory() as folder:
        path = strategies_file(Path(folder), [STRATEGIES[args.stages]], num_ranks)
        config = with_strategies(parse(FLAGS.split()), path)
        with GlooPool() as pool:
            found, *_ = pool.run(num_ranks, measure, config, args.steps)
    if args.json:
        print(json.dumps(found))
        return 0
    base = found["left out"]
    for way, seconds in found.items():
        ms = sorted(1e3 * s for s in seconds)
        more = statistics.median(a / b for a, b in zip(seconds, base, strict=True)) - 1
        print(
            f"{way:18} {statistics.median(ms):8.1f} ms a step ({ms[0]:.1f}-{ms[-1]:.1f}), "
            f"{more:+.1%} over none"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))
