"""Trains one small GPT per packing, step by step in turns, and records what each step took.

:func:`_quickstart.recording.make` runs it under torchrun, with the embedded trainer's flags.
Every packing has a model of its own from the same weights; in each round every packing runs one
step, so that a noisy machine slows all of them alike. Rank 0 writes the recording as JSON.

With ``--repeats`` the same plans run several times over: how long a step takes on a noisy machine
is known only from repeats that lie far apart. With ``--shuffle`` they run in another order each
time, after one round to warm up: what is slower for some minutes is then rounds of all kinds.
``--memory-rounds`` at the end count the bytes of all tensors instead of time.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from _quickstart.recording import PROGRESS, RecordedStep, core_of
from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text
from megatron_wlb.planning.packing.settings import SHAPED
from megatron_wlb.runtime.rank_main import check_writable, rank_main
from megatron_wlb.settings.command_line import Parser, parse
from megatron_wlb.study.evaluate import more_us

if TYPE_CHECKING:
    from megatron_wlb.plan import StepPlan

WARM_UP = -1
"""The repeat before the first, in which caches and pools fill: not recorded."""


def record(own: argparse.Namespace, flags: Sequence[str]) -> None:
    """Trains in turns and has rank 0 write the recording to ``own.recording``.

    Raises :class:`ConfigError` for settings that cannot run, a corpus that ends too soon, or a file
    that cannot be written: all found before training.
    """
    for flag, least in (("rounds", 1), ("repeats", 1), ("memory_rounds", 0)):
        if getattr(own, flag) < least:
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name} is {getattr(own, flag)}; it must be at least {least}")
    check_writable("--recording", own.recording)
    packings = own.packings.split(",")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first = parse(flags)
    pp_size = first.parallel.pipeline_model_parallel_size
    cores = sorted(os.sched_getaffinity(0))
    # Before torch starts a thread: threads inherit it.
    os.sched_setaffinity(0, {cores[core_of(rank, world_size, pp_size, len(cores))]})

    from megatron_wlb.runtime.trainer import distributed

    device = distributed.choose_device(first.wlb.wlb_device)
    distributed.initialize(first, device)
    import torch

    from _quickstart.live_bytes import LiveBytes, step_bytes
    from _quickstart.timeline import StepTimers
    from megatron_wlb.runtime.ranks.transfer import of_all_ranks
    from megatron_wlb.runtime.trainer.loop import Trainer

    on_gpu = device == "cuda"
    timers = StepTimers((lambda: torch.cuda.current_stream().synchronize()) if on_gpu else None)
    trainers: dict[str, Trainer] = {}
    cost = None
    for name in packings:
        shape = ["--wlb-shape", "on"] if name.endswith(SHAPED) else []
        config = parse([*flags, "--wlb-packing", name.removesuffix(SHAPED), *shape])
        distributed.seed(config)
        trainers[name] = Trainer(config, device, cost=cost)
        cost = trainers[name].cost
        trainers[name].model.config.timers = timers
    assert cost is not None

    plans: dict[tuple[str, int], tuple[StepPlan, float]] = {}
    for number, name in product(range(own.rounds + own.memory_rounds), packings):
        start_s = time.monotonic()
        plan = trainers[name].planner.next_plan()
        if plan is None:
            raise ConfigError(
                f"the corpus ends after {number} rounds, {own.rounds + own.memory_rounds} were "
                "asked for; use fewer rounds or a longer corpus"
            )
        check_recordable(plan)
        plans[name, number] = plan, (time.monotonic() - start_s) * 1e6
    random = np.random.default_rng(first.training.seed)
    order = random.permutation if own.shuffle else np.arange
    timed = [(n, repeat) for repeat in range(own.repeats) for n in order(own.rounds).tolist()]
    counted = [(own.rounds + number, 0) for number in range(own.memory_rounds)]
    rounds = [*([(0, WARM_UP)] if own.shuffle else []), *timed, *counted]
    steps: list[RecordedStep] = []
    gc.collect()
    gc.freeze()  # What is there stays: the collector need not look through it before each step.
    for done, (number, repeat) in enumerate(rounds):
        # Another packing begins each round.
        for turn in range(len(packings)):
            name = packings[(done + turn) % len(packings)]
            trainer, (plan, plan_us) = trainers[name], plans[name, number]
            limits = trainer.planner.packer.limits
            loss, used = 0.0, None
            gc.collect()  # Not in the midst of a step.
            torch.distributed.barrier()
            timers.take()
            start_s = time.monotonic()
            if number < own.rounds:
                loss = trainer.train_step(plan)[0].mean
            else:
                gc.unfreeze()
                with LiveBytes() as live:
                    # What exists already, or operations that return it would count it as new.
                    live.watch(o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
                    used = of_all_ranks(step_bytes(live, trainer.runner, plan)[1])
            torch.distributed.barrier()
            stop_s = time.monotonic()
            intervals = of_all_ranks(timers.take())
            if repeat != WARM_UP:
                rows = plan.micro_batches
                steps.append(
                    RecordedStep(
                        packing=name,
                        round=number,
                        repeat=repeat,
                        plan_us=plan_us,
                        start_us=start_s * 1e6,
                        stop_us=stop_s * 1e6,
                        loss=loss,
                        num_tokens=plan.num_tokens,
                        imbalance=plan.imbalance,
                        delay_steps=plan.delay_steps,
                        lengths=[[list(m.lengths) for m in row] for row in rows],
                        predicted_us=[[m.predicted_us for m in row] for row in rows],
                        intervals=intervals,
                        activation_bytes=used,
                        prefixes=[[list(m.prefixes) for m in row] for row in rows]
                        if plan.chains
                        else [],
                        chains=[list(own) for own in plan.chains],
                        more_us=more_us(plan, limits.num_micro_batches, cost),
                    )
                )
        if rank == 0:
            sys.stdout.write(f"{PROGRESS}{done + 1}/{len(rounds)}\n")
            sys.stdout.flush()
    if rank == 0:
        content = {
            "config": first.flat(),
            "vocab_size": trainers[packings[0]].corpora.vocab_size,
            "world_size": world_size,
            "num_cores": len(cores),
            "cost": cost.as_dict(),
            "packings": packings,
            "steps": [dataclasses.asdict(step) for step in steps],
        }
        write_text(own.recording, json.dumps(content))
    distributed.shutdown()


def check_recordable(plan: StepPlan) -> None:
    """Raises :class:`ConfigError` for micro-batches of several data-parallel ranks.

    A recording has each rank's for itself, with all their tokens and in chains of one document.
    """
    if any(micro_batch.replicas for micro_batch in plan):
        raise ConfigError(
            f"{plan.packing}, step {plan.step}: data-parallel ranks run a document together, which "
            "a recording cannot tell; give --wlb-dp-merge off"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m _quickstart.record", description=__doc__, allow_abbrev=False)
    parser.add_argument("--packings", default="original,hold,slim", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=24, help="steps of each packing")
    parser.add_argument("--repeats", type=int, default=1, help="times that these are run")
    parser.add_argument("--shuffle", action="store_true", help="in another order each time")
    parser.add_argument("--memory-rounds", type=int, default=0, help="more, that count bytes")
    parser.add_argument("--recording", type=Path, required=True, help="JSON file to write")
    return rank_main(lambda: record(*parser.parse_known_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
