"""Real steps of several packings in turns, with the clock of each operation and its memory.

Run under torchrun, by ``scripts/validate_simulator.py``. Every packing has a model of its own from
the same weights; in each round every packing runs one step, so that a noisy machine slows all of
them alike. All rounds are run several times over, with the same plans in another order each time:
how long a step takes on a noisy machine is known only from repeats that lie far apart, and what is
slower for some minutes is then rounds of all kinds. Rank 0 writes what all ranks measured.
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
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text
from megatron_wlb.packing.settings import SHAPED
from megatron_wlb.runtime.rank_main import check_writable, rank_main
from megatron_wlb.settings.command_line import parse

if TYPE_CHECKING:
    from megatron_wlb.plan import StepPlan

PROGRESS = "round "
"""What each line of progress on stdout starts with; a number, ``/`` and the total follow."""
WARM_UP = -1
"""The repeat before the first, in which caches and pools fill: not recorded."""


@dataclass(frozen=True)
class RecordedStep:
    """One step of one packing on all processes. Times in µs of the machine's monotonic clock."""

    packing: str
    round: int
    start_us: float
    """On rank 0, after a barrier and before the step."""
    stop_us: float
    """On rank 0, after the update and a barrier."""
    num_tokens: int
    """Without padding."""
    lengths: list[list[list[int]]]
    """``[dp_size][num_micro_batches][segments]``"""
    intervals: list[list[tuple[str, float, float, float]]]
    """Per process: ``F`` or ``B``, start, stop, and CPU time of the thread that computes."""
    activation_bytes: list[int] | None = None
    """Per process, the most that forward and backward added; such a step is no measure of time."""
    repeat: int = 0
    """How many times this plan was run before."""


def core_of(rank: int, world_size: int, pp_size: int, num_cores: int) -> int:
    """On which core a process runs: one to each pipeline rank, in turns where they are too few.

    Ranks of one stage, which compute together, share its core.
    """
    return rank // (world_size // pp_size) % num_cores


def record(
    flags: Sequence[str],
    packings: Sequence[str],
    num_rounds: int,
    num_repeats: int,
    num_memory: int,
    path: Path,
) -> None:
    """Trains in turns, ``num_repeats`` times over, and has rank 0 write the recording to ``path``.

    ``num_memory`` further rounds at the end count bytes instead of time.

    Raises :class:`ConfigError` for settings that cannot run, or a corpus that ends too soon.
    """
    check_writable("--recording", path)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first = parse(flags)
    pp_size = first.parallel.pipeline_model_parallel_size
    cores = sorted(os.sched_getaffinity(0))
    # Before torch starts a thread: threads inherit it.
    os.sched_setaffinity(0, {cores[core_of(rank, world_size, pp_size, len(cores))]})

    from megatron_wlb.runtime.trainer import distributed

    device = distributed.choose_device("cpu")
    distributed.initialize(first, device)
    import torch

    from megatron_wlb.bench.timeline import StepTimers
    from megatron_wlb.runtime.trainer.loop import Trainer
    from megatron_wlb.testing.memory import LiveBytes

    class BothClocks(StepTimers):
        """Of each computation the machine's time and the thread's."""

        def _now(self) -> Any:
            return time.monotonic(), time.thread_time()

    timers = BothClocks()
    trainers: dict[str, Trainer] = {}
    cost = None
    for name in packings:
        shape = ["--wlb-shape", "on"] if name.endswith(SHAPED) else []
        config = parse([*flags, "--wlb-packing", name.removesuffix(SHAPED), *shape])
        distributed.seed(config)
        trainers[name] = Trainer(config, device, cost=cost)
        cost = trainers[name].cost
        trainers[name].model.config.timers = timers

    def gathered(value: Any) -> list[Any]:
        values: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(values, value)
        return values

    # Planned before the clock starts: a run finds its plans ready.
    plans: dict[tuple[str, int], StepPlan] = {}
    for name, number in product(packings, range(num_rounds + num_memory)):
        plan = trainers[name].planner.next_plan()
        if plan is None:
            raise ConfigError(
                f"the corpus ends after {number} rounds, {num_rounds + num_memory} were asked for; "
                "use fewer rounds or a longer corpus"
            )
        plans[name, number] = plan
    random = np.random.default_rng(first.training.seed)
    timed = [(0, WARM_UP)] + [
        (number, repeat)
        for repeat in range(num_repeats)
        for number in random.permutation(num_rounds).tolist()
    ]
    counted = [(num_rounds + number, 0) for number in range(num_memory)]
    steps: list[RecordedStep] = []
    for done, (number, repeat) in enumerate([*timed, *counted]):
        for turn in range(len(packings)):
            name = packings[(done + turn) % len(packings)]
            trainer, plan = trainers[name], plans[name, number]
            used = None
            gc.collect()  # Not in the midst of a step.
            torch.distributed.barrier()
            timers.take()
            start = time.monotonic()
            if number < num_rounds:
                trainer.train_step(plan)
            else:
                for gpt in trainer.model.gpts:
                    gpt.set_input_tensor(None)  # a chunk keeps its last input until the next one
                for chunk in trainer.model.chunks:
                    chunk.train()
                    chunk.zero_grad_buffer()  # type: ignore[operator]
                with LiveBytes() as live:
                    # What exists already, or operations that return it would count it as new.
                    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
                    live.watch(tensors)
                    held = live.live
                    live.reset_peak()
                    trainer.runner.run(plan)
                    used_here = live.peak - held
                used = gathered(used_here)
            torch.distributed.barrier()
            stop = time.monotonic()
            intervals = gathered(
                [
                    (kind, a[0] * 1e6, b[0] * 1e6, (b[1] - a[1]) * 1e6)  # type: ignore[index]
                    for kind, a, b in timers.take()
                ]
            )
            if repeat == WARM_UP:
                continue
            lengths = [[list(m.lengths) for m in row] for row in plan.micro_batches]
            steps.append(
                RecordedStep(
                    name,
                    number,
                    start * 1e6,
                    stop * 1e6,
                    plan.num_tokens,
                    lengths,
                    intervals,
                    used,
                    repeat,
                )
            )
        if rank == 0:
            sys.stdout.write(f"{PROGRESS}{done + 1}/{len(timed) + num_memory}\n")
            sys.stdout.flush()
    if rank == 0:
        content = {
            "config": first.flat(),
            "vocab_size": trainers[packings[0]].corpora.vocab_size,
            "world_size": world_size,
            "num_cores": len(cores),
            "packings": list(packings),
            "steps": [dataclasses.asdict(step) for step in steps],
        }
        write_text(path, json.dumps(content))
    distributed.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a recording; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_wlb.bench.recorder", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--packings", required=True, help="comma-separated")
    parser.add_argument("--rounds", type=int, required=True, help="steps of each packing")
    parser.add_argument("--repeats", type=int, required=True, help="times that these are run")
    parser.add_argument("--memory-rounds", type=int, required=True, help="that count bytes")
    parser.add_argument("--recording", type=Path, required=True, help="JSON file to write")
    own, rest = parser.parse_known_args(argv)
    packings = own.packings.split(",")
    return rank_main(
        lambda: record(rest, packings, own.rounds, own.repeats, own.memory_rounds, own.recording)
    )


if __name__ == "__main__":
    sys.exit(main())
