"""Trains one small GPT per packing, step by step in turns, and records what each step took.

Run under torchrun with the embedded trainer's flags. Every packing has a model of its own, from
the same weights; in each round every packing runs one step, so that a noisy machine slows all of
them alike. Rank 0 writes the recording as JSON; :mod:`megatron_wlb.bench.report` reads it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text
from megatron_wlb.runtime.rank_main import check_writable, rank_main
from megatron_wlb.settings.command_line import Parser, parse
from megatron_wlb.settings.config import Config

if TYPE_CHECKING:
    from megatron_wlb.plan import StepPlan

PROGRESS = "round "
"""What each line of progress on stdout starts with; a number, ``/`` and the total follow."""


@dataclass(frozen=True)
class StepRecord:
    """One step of one packing. Times in µs, of the machine's monotonic clock."""

    packing: str
    round: int
    start_us: float
    """On rank 0, after a barrier and before planning."""
    stop_us: float
    """On rank 0, after the weights' update."""
    loss: float
    num_tokens: int
    imbalance: float
    delay_steps: float
    lengths: list[list[int]]
    """``[dp_size][num_micro_batches]``, tokens."""
    predicted_us: list[list[float]]
    """``[dp_size][num_micro_batches]``, forward plus backward of the whole model."""
    intervals: list[list[tuple[str, float, float]]]
    """Per process: ``F`` or ``B``, start and stop, in the order they ran."""


def run(config: Config, packings: Sequence[str], num_rounds: int, path: Path) -> None:
    """Trains in turns and has rank 0 write the recording to ``path``.

    Raises:
        ConfigError: no rounds, an unknown packing, a corpus that ends too soon, or a ``path``
            that cannot be written (found before training).
    """
    if num_rounds < 1:
        raise ConfigError(f"--rounds is {num_rounds}; it must be at least 1")
    check_writable("--recording", path)
    from megatron_wlb.runtime.trainer import distributed

    device = distributed.choose_device(config.wlb.wlb_device)
    distributed.initialize(config, device)
    import torch

    from megatron_wlb.bench.timeline import StepTimers
    from megatron_wlb.runtime.trainer.loop import Trainer

    _pin(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    rank = torch.distributed.get_rank()
    timers = StepTimers(torch.cuda.synchronize if device == "cuda" else None)
    trainers: dict[str, Trainer] = {}
    cost = None
    for packing in packings:
        wlb = dataclasses.replace(config.wlb, wlb_packing=packing)  # type: ignore[arg-type]
        distributed.seed(config)
        trainer = Trainer(dataclasses.replace(config, wlb=wlb), device, cost=cost)
        cost = trainer.cost
        trainer.model.config.timers = timers
        trainers[packing] = trainer

    records: list[StepRecord] = []
    for number in range(num_rounds):
        # Another packing begins each round.
        for turn in range(len(packings)):
            packing = packings[(number + turn) % len(packings)]
            trainer = trainers[packing]
            torch.distributed.barrier()
            timers.take()
            start = time.monotonic()
            plan = trainer.planner.next_plan()
            if plan is None:
                raise ConfigError(
                    f"the corpus ends after {number} rounds, {num_rounds} were asked for; use "
                    "fewer rounds or a longer corpus"
                )
            loss, _, _ = trainer.train_step(plan)
            torch.distributed.barrier()
            stop = time.monotonic()
            intervals: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(intervals, timers.take())
            records.append(_record(packing, number, start, stop, loss, plan, intervals))
        if rank == 0:
            sys.stdout.write(f"{PROGRESS}{number + 1}/{num_rounds}\n")
            sys.stdout.flush()
    if rank == 0:
        assert cost is not None
        content = {
            "config": config.flat(),
            "world_size": torch.distributed.get_world_size(),
            "cost": cost.as_dict(),
            "packings": list(packings),
            "steps": [dataclasses.asdict(record) for record in records],
        }
        write_text(path, json.dumps(content))
    distributed.shutdown()


def _record(
    packing: str,
    number: int,
    start: float,
    stop: float,
    loss: float,
    plan: StepPlan,
    intervals: list[list[tuple[str, float, float]]],
) -> StepRecord:
    return StepRecord(
        packing,
        number,
        start * 1e6,
        stop * 1e6,
        loss,
        plan.num_tokens,
        plan.imbalance,
        plan.delay_steps,
        [[m.length for m in rank] for rank in plan.micro_batches],
        [[m.predicted_us for m in rank] for rank in plan.micro_batches],
        [[(kind, a * 1e6, b * 1e6) for kind, a, b in process] for process in intervals],
    )


def _pin(local_rank: int, local_world_size: int) -> None:
    """A core of its own for each process, where there are enough: times get steadier."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= local_world_size:
        os.sched_setaffinity(0, {cores[local_rank]})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a comparison; returns the exit code."""
    parser = Parser(
        prog="python -m megatron_wlb.bench.train_packings", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--packings", default="original,wlb,hold", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=24, help="steps of each packing")
    parser.add_argument("--recording", type=Path, required=True, help="JSON file to write")

    def program() -> None:
        own, rest = parser.parse_known_args(argv)
        run(parse(rest), own.packings.split(","), own.rounds, own.recording)

    return rank_main(program)


if __name__ == "__main__":
    sys.exit(main())
