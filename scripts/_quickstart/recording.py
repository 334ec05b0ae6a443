"""Training steps of several packings in turns, as :mod:`_quickstart.record` measures them.

:func:`make` runs it under torchrun, :meth:`Recording.read` reads what it wrote. Of a step's repeats
the one that took the middle time counts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

import numpy as np
from rich import progress
from rich.console import Console

from megatron_wlb.cost.schedule.graph import Floats, Graph, Sends, graph_of
from megatron_wlb.cost.schedule.messages import slice_graph
from megatron_wlb.cost.slices import Slice, Unit
from megatron_wlb.errors import ConfigError, PlanError
from megatron_wlb.planning.from_config import parallelism
from megatron_wlb.reading import (
    MAX_RECORD_BYTES,
    listed,
    parse_mapping,
    read_text,
    record,
    typed,
)
from megatron_wlb.settings.config import Config, from_flat
from megatron_wlb.simulator.engine import Interval, Timeline

SMALL_MODEL = ("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "2")
"""What a CPU trains in seconds a step."""
PROGRESS = "round "
"""What each line of progress on stdout starts with; a number, ``/`` and the total follow."""
CALIBRATION_SHARE = 3
"""One in so many rounds, from the first on, is calibrated with."""


def chained(
    lengths: Sequence[Sequence[int]], prefixes: Sequence[Sequence[int]], chains: Sequence[int]
) -> tuple[Unit, ...]:
    """The micro-batches of such segments, whose chains are the slices of one document each.

    Raises :class:`PlanError` unless the slices of a chain follow one another from a document's
    first token on, and there are no others.
    """
    counts = [len(lengths), len(prefixes), sum(chains)]
    if min(chains, default=1) < 1 or len(set(counts)) > 1:
        raise PlanError(
            f"there are lengths of {counts[0]} micro-batches, prefixes of {counts[1]}, and chains "
            f"of {counts[2]}; give as many of each"
        )
    units: list[Unit] = []
    for number, num in enumerate(chains):
        at = len(units)
        length = sum(own[0] if own else 0 for own in lengths[at : at + num])
        stop = 0
        for place in range(at, at + num):
            own, before = lengths[place], prefixes[place]
            if len(before) != len(own) or any(before[1:]) or (before[0] if own else stop) != stop:
                raise PlanError(
                    f"micro-batch {place} has prefixes {list(before)} of {len(own)} segments; give "
                    f"{stop} to the first of them, as the slices before it have so many tokens, "
                    "and 0 to the others"
                )
            start, stop = stop, stop + (own[0] if own else 0)
            cut = Slice(number, start, stop, length) if num > 1 else None
            units.append(Unit(sum(own), cut))
    return tuple(units)


@dataclass(frozen=True)
class RecordedStep:
    """One step of one packing on all processes. Times in µs, of the machine's monotonic clock."""

    packing: str
    round: int
    start_us: float
    """On rank 0, after a barrier and before the step, which was planned already."""
    stop_us: float
    """On rank 0, after the update and a barrier."""
    num_tokens: int
    """Its tokens without padding."""
    lengths: list[list[list[int]]]
    """``[dp_size][num_micro_batches][segments]``"""
    intervals: list[list[tuple[str, float, float, float]]]
    """Per process, as :data:`_quickstart.timeline.Interval`, in the order they ran."""
    predicted_us: list[list[float]]
    """``[dp_size][num_micro_batches]``, forward plus backward of the whole model."""
    plan_us: float = 0.0
    """What planning took on rank 0."""
    loss: float = 0.0
    """0 where bytes were counted: the weights stayed as they were."""
    imbalance: float = 1.0
    delay_steps: float = 0.0
    activation_bytes: list[int] | None = None
    """Per process, the most that forward and backward added; such a step is no measure of time."""
    repeat: int = 0
    """How many times this plan was run before."""
    prefixes: list[list[list[int]]] = field(default_factory=list)
    """``[dp_size][num_micro_batches][segments]``: keys before each, as in
    :attr:`megatron_wlb.plan.MicroBatchPlan.prefixes`; empty for Megatron's schedule."""
    chains: list[list[int]] = field(default_factory=list)
    """``[dp_size][chains]``, as in :attr:`megatron_wlb.plan.StepPlan.chains`."""
    more_us: float = 0.0
    """What micro-batches beyond N are predicted to take besides their documents."""

    @property
    def step_us(self) -> float:
        """What forward, backward and update took."""
        return self.stop_us - self.start_us

    @property
    def seconds(self) -> float:
        """What the whole step took: plan, forward, backward, update."""
        return (self.plan_us + self.step_us) / 1e6

    @property
    def work_us(self) -> float:
        """Predicted time of its documents in N micro-batches: how much there was to do."""
        return sum(map(sum, self.predicted_us)) - self.more_us

    @property
    def schedule(self) -> str:
        """Whose loop ran it: ``megatron`` or, for documents in slices, ``slices``."""
        return "slices" if self.chains else "megatron"

    def before(self, dp_rank: int) -> list[list[int]]:
        """``[num_micro_batches][segments]``: keys before each segment."""
        if self.chains:
            return self.prefixes[dp_rank]
        return [[0] * len(segments) for segments in self.lengths[dp_rank]]

    def slices(self, dp_rank: int) -> list[bool]:
        """``[num_micro_batches]``: whether each runs a slice of a document."""
        if self.chains:
            return [num > 1 for num in self.chains[dp_rank] for _ in range(num)]
        return [False] * len(self.lengths[dp_rank])

    def units(self, dp_rank: int) -> tuple[Unit, ...]:
        """A rank's micro-batches where documents run in slices; else there are none."""
        if not self.chains:
            return ()
        return chained(self.lengths[dp_rank], self.prefixes[dp_rank], self.chains[dp_rank])

    @property
    def span_us(self) -> float:
        """From the first start to the last stop of an operation."""
        return max(p[-1][2] for p in self.intervals) - min(p[0][1] for p in self.intervals)

    @property
    def busy_us(self) -> float:
        """The time of all operations, over all processes."""
        return sum(stop - start for process in self.intervals for _, start, stop, _ in process)


def core_of(rank: int, world_size: int, pp_size: int, num_cores: int) -> int:
    """On which core a process runs: one of its own, or where they are too few one to each pipeline
    rank, in turns. Ranks of one stage, which compute together, then share its core.
    """
    return rank if world_size <= num_cores else rank // (world_size // pp_size) % num_cores


@dataclass(frozen=True)
class Recording:
    """What :mod:`_quickstart.record` wrote of one layout."""

    config: Config
    vocab_size: int
    world_size: int
    num_cores: int
    packings: list[str]
    steps: list[RecordedStep]
    """In the order in which they ran."""

    @classmethod
    def read(cls, path: Path, fewest_rounds: int = 1) -> Recording:
        """Raises :class:`ConfigError` for a file that is no recording, or one that is too short."""
        try:
            content = parse_mapping(read_text(path, MAX_RECORD_BYTES), is_json=True)
            config = from_flat(typed("config", content.pop("config", None), dict))
            steps = listed("steps", content.pop("steps", None))
            steps = [record("step: ", RecordedStep, step) for step in steps]
            known = {f.name: content[f.name] for f in fields(cls) if f.name in content}
            recording = record("", cls, known | {"config": config, "steps": steps})
        except ConfigError as error:
            raise ConfigError(f"{path} is no recording ({error}); record it again") from None
        if len(recording.rounds) < fewest_rounds:
            raise ConfigError(
                f"{path}: {len(recording.rounds)} rounds are too few; record at least "
                f"{fewest_rounds}"
            )
        return recording

    @cached_property
    def _repeats(self) -> list[list[RecordedStep]]:
        """The timed runs of each step, the fastest first."""
        repeats: dict[tuple[int, str], list[RecordedStep]] = {}
        for step in self.steps:
            if step.activation_bytes is None:
                repeats.setdefault((step.round, step.packing), []).append(step)
        return [sorted(own, key=lambda step: step.step_us) for own in repeats.values()]

    @cached_property
    def timed(self) -> list[RecordedStep]:
        """The one of each step's repeats that took the middle time."""
        return [own[(len(own) - 1) // 2] for own in self._repeats]

    @property
    def repeat_error(self) -> float:
        """Mean of ``|time ÷ middle time - 1|`` over the other repeats: what the machine does to
        equal steps, and no simulation can foresee. 0 if there are none.
        """
        errors = [
            abs(other.step_us / middle.step_us - 1)
            for middle, own in zip(self.timed, self._repeats, strict=True)
            for other in own
            if other is not middle
        ]
        return float(np.mean(errors)) if errors else 0.0

    @property
    def counted(self) -> list[RecordedStep]:
        """Steps of which bytes were counted."""
        return [step for step in self.steps if step.activation_bytes is not None]

    @property
    def rounds(self) -> list[int]:
        return sorted({step.round for step in self.timed})

    @property
    def calibrating(self) -> list[RecordedStep]:
        """The first third of the timed steps."""
        wanted = self.rounds[: len(self.rounds) // CALIBRATION_SHARE]
        return [step for step in self.timed if step.round in wanted]

    @property
    def judged(self) -> list[RecordedStep]:
        wanted = self.rounds[len(self.rounds) // CALIBRATION_SHARE :]
        return [step for step in self.timed if step.round in wanted]

    @property
    def pp_size(self) -> int:
        return self.config.parallel.pipeline_model_parallel_size

    @property
    def dp_size(self) -> int:
        return len(self.steps[0].lengths)

    @property
    def num_stages(self) -> int:
        p = parallelism(self.config)
        return p.pp_size * p.vpp_size

    def graph(
        self,
        step: RecordedStep,
        dp_rank: int,
        *,
        pp_size: int | None = None,
        sends: Sends | None = None,
    ) -> Graph:
        """What a replica ran, or would have run on ``pp_size`` ranks or with other ``sends``."""
        p = parallelism(self.config)
        pp_size = pp_size or p.pp_size
        if step.chains:
            return slice_graph(pp_size, tuple(step.chains[dp_rank]))
        group_size = p.group_size if pp_size == p.pp_size else None
        return graph_of(pp_size, p.vpp_size, len(step.lengths[dp_rank]), group_size, sends)

    @property
    def cores(self) -> list[int] | None:
        """The core of each pipeline rank, or None where each has its own."""
        cores = [
            core_of(self.process(rank, 0), self.world_size, self.pp_size, self.num_cores)
            for rank in range(self.pp_size)
        ]
        return None if len(set(cores)) == self.pp_size else cores

    def process(self, pp_rank: int, dp_rank: int) -> int:
        """The first process of a stage. Megatron's order of ranks: (TP,) CP, DP, PP outermost."""
        each = self.world_size // self.pp_size
        return pp_rank * each + dp_rank * (each // self.dp_size)

    def times_us(self, step: RecordedStep, dp_rank: int) -> Floats:
        """Measured ``[2, S, N]``: on the wall, or where cores are shared CPU time."""
        graph = self.graph(step, dp_rank)
        result = np.zeros((2, graph.num_stages, graph.num_micro_batches))
        for rank, actions in enumerate(graph.order):
            measured = step.intervals[self.process(rank, dp_rank)]
            for action, (kind, start, stop, cpu) in zip(actions, measured, strict=True):
                assert kind == action.kind, (kind, action)
                us = stop - start if self.cores is None else cpu
                stage = action.chunk * graph.pp_size + rank
                result["FB".index(kind), stage, action.micro_batch] = us
        return result

    def timeline(self, step: RecordedStep) -> Timeline:
        each = self.world_size // self.pp_size
        rows = []
        for process, intervals in enumerate(step.intervals):
            pp_rank, place = divmod(process, each)
            dp_rank = place * self.dp_size // each
            actions = self.graph(step, dp_rank).order[pp_rank]
            units = step.units(dp_rank)
            rows.append(
                tuple(
                    Interval(start, stop, a, units[a.micro_batch] if units else None)
                    for a, (_, start, stop, _) in zip(actions, intervals, strict=True)
                )
            )
        return Timeline(tuple(rows))


@contextlib.contextmanager
def progress_of(what: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar of rounds, or a line for each where there is no terminal; takes (done, total)."""
    if console.is_terminal:
        rounds = progress.MofNCompleteColumn(), "rounds"
        times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
        columns = "{task.description}", progress.BarColumn(), *rounds, *times
        with progress.Progress(*columns, console=console) as bars:
            bar = bars.add_task(what, total=None)
            yield lambda done, total: bars.update(bar, completed=done, total=total)
        return
    start_s = time.monotonic()

    def tell(done: int, total: int) -> None:
        seconds = time.monotonic() - start_s
        console.print(f"{what}: round {done} of {total} after {seconds:.0f} s", soft_wrap=True)

    console.print(f"{what}: starting", soft_wrap=True)
    yield tell


def make(
    what: str, num_processes: int, path: Path, console: Console, arguments: Sequence[str]
) -> None:
    """Records a layout under torchrun into ``path``, with a log beside it; ``arguments`` are the
    recorder's and the trainer's.

    Raises :class:`ConfigError` if it fails: names the cause and the log.
    """
    folders = filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
    command = [
        *(sys.executable, "-m", "megatron_wlb.torchrun", "--standalone"),
        *("--nproc-per-node", str(num_processes), "-m", "_quickstart.record"),
        *("--recording", str(path), *arguments),
    ]
    log, lines = path.with_suffix(".log"), []
    with (
        progress_of(what, console) as tell,
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)},
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                lines.append(line.strip())
                if line.startswith(PROGRESS):
                    done, total = map(int, line.removeprefix(PROGRESS).split("/"))
                    tell(done, total)
        except KeyboardInterrupt:
            process.terminate()
            raise
    if process.returncode:
        told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        raise ConfigError(f"{what} failed: " + "\n".join(told or lines[-5:]) + f" ({log})")
