"""Training steps of several packings in turns, as runs of :mod:`_quickstart.record` tell them.

:func:`make` starts and conducts these runs, :meth:`Recording.read` reads what it wrote. Of a step's
repeats the one that took the middle time counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from queue import Queue
from typing import Any, TextIO, TypeAlias

import numpy as np
from rich.console import Console

from megatron_wlb.cost.schedule.graph import Floats, Graph, graph_of
from megatron_wlb.cost.schedule.messages import slice_graph
from megatron_wlb.cost.slices import Slice, Unit
from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text
from megatron_wlb.planning.from_config import parallelism
from megatron_wlb.planning.packing.settings import SHAPED
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
LAUNCHED = (
    *("--max-position-embeddings", "1000000", "--micro-batch-size", "1", "--lr", "1e-3"),
    *("--position-embedding-type", "rope", "--hidden-dropout", "0", "--attention-dropout", "0"),
    *("--lr-decay-style", "constant", "--adam-beta2", "0.95", "--eval-iters", "0"),
    *("--eval-interval", "1000000", "--log-interval", "1"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "256"),
    *("--wlb-device", "cpu", "--distributed-backend", "gloo", "--transformer-impl", "local"),
    *("--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--no-rope-fusion"),
    *("--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion"),
)
"""What Megatron-LM asks for besides, to train bytes on CPUs."""
SAYS = "quickstart> "
"""What each line starts with that a run tells; JSON follows."""
WARM_UP = -1
"""The repeat before the first, in which caches and pools fill: not recorded."""


Ran: TypeAlias = tuple[int, int, int, int, float]
"""What ran of a document: its corpus, epoch and number; tokens, and their work in µs."""


def chained(lengths: Sequence[Sequence[int]], chains: Sequence[int]) -> tuple[Unit, ...]:
    """The micro-batches of such segments; the first ones of a chain of several are the slices of
    one document.
    """
    units: list[Unit] = []
    for number, num in enumerate(chains):
        own = lengths[len(units) : len(units) + num]
        ends = [*accumulate((segments[0] if segments else 0 for segments in own), initial=0)]
        for segments, (start, stop) in zip(own, pairwise(ends), strict=True):
            cut = Slice(number, start, stop, ends[-1]) if num > 1 else None
            units.append(Unit(sum(segments), cut))
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
    """What rank 0 waited for its plan, which a thread of the run made ahead."""
    loss: float = 0.0
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
    documents: list[Ran] = field(default_factory=list)

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
        """Predicted time of its documents, without what micro-batches take besides them."""
        return sum(us for *_, us in self.documents)

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
        return chained(self.lengths[dp_rank], self.chains[dp_rank])

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
    def read(cls, path: Path) -> Recording:
        """Raises :class:`ConfigError` for a file that is no recording."""
        try:
            content = parse_mapping(read_text(path, MAX_RECORD_BYTES), is_json=True)
            config = from_flat(typed("config", content.pop("config", None), dict))
            steps = listed("steps", content.pop("steps", None))
            steps = [record("step: ", RecordedStep, step) for step in steps]
            known = {f.name: content[f.name] for f in fields(cls) if f.name in content}
            recording = record("", cls, known | {"config": config, "steps": steps})
        except ConfigError as error:
            raise ConfigError(f"{path} is no recording ({error}); record it again") from None
        return recording

    @cached_property
    def repeats(self) -> list[list[RecordedStep]]:
        """The timed runs of each step, the fastest first."""
        repeats: dict[tuple[int, str], list[RecordedStep]] = {}
        for step in self.steps:
            if step.activation_bytes is None:
                repeats.setdefault((step.round, step.packing), []).append(step)
        return [sorted(own, key=lambda step: step.step_us) for own in repeats.values()]

    @cached_property
    def timed(self) -> list[RecordedStep]:
        """The one of each step's repeats that took the middle time."""
        return [own[(len(own) - 1) // 2] for own in self.repeats]

    @property
    def counted(self) -> list[RecordedStep]:
        """Steps of which bytes were counted."""
        return [step for step in self.steps if step.activation_bytes is not None]

    @property
    def rounds(self) -> list[int]:
        return sorted({step.round for step in self.timed})

    @property
    def pp_size(self) -> int:
        return self.config.parallel.pipeline_model_parallel_size

    @property
    def dp_size(self) -> int:
        return len(self.steps[0].lengths)

    def graph(self, step: RecordedStep, dp_rank: int) -> Graph:
        """What a replica ran."""
        if step.chains:
            return slice_graph(self.pp_size, tuple(step.chains[dp_rank]))
        p = parallelism(self.config)
        return graph_of(p.pp_size, p.vpp_size, len(step.lengths[dp_rank]), p.group_size)

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


class _Run(subprocess.Popen[str]):
    """A packing's run under torchrun: what it prints goes into the log, what it tells on."""

    def __init__(
        self, name: str, command: Sequence[str], log: TextIO, told: Queue[tuple[str, Any]]
    ) -> None:
        folders = filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
        self.lines: list[str] = []
        self._to = name, log, told
        super().__init__(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)},
        )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        name, log, told = self._to
        assert self.stdout is not None
        try:
            for line in self.stdout:
                before, says, said = line.partition(SAYS)  # another rank may be within a line
                if says:
                    told.put((name, json.loads(said)))
                if before:
                    log.write(f"{name}: {before.rstrip()}\n")
                    log.flush()
                    self.lines.append(before.strip())
        finally:
            told.put((name, None))

    def answer(self, what: Any) -> None:
        """Says what comes next."""
        assert self.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is told
            self.stdin.write(json.dumps(what) + "\n")
            self.stdin.flush()

    def end(self) -> None:
        """Ends it if it has not ended, and the log of it."""
        self.terminate()
        self.wait()
        self._listener.join()
        for pipe in filter(None, (self.stdin, self.stdout)):
            with contextlib.suppress(BrokenPipeError):  # what it has not read
                pipe.close()


def make(
    what: str,
    num_processes: int,
    path: Path,
    console: Console,
    packings: Sequence[str],
    flags: Sequence[str],
    *,
    rounds: int,
    repeats: int = 1,
    shuffled_by: int | None = None,
    memory_rounds: int = 0,
) -> None:
    """Records a layout into ``path``, with a log beside it: a run of the launcher for each packing,
    all with these ``flags``, one step of each in turns, so that a noisy machine slows all alike.

    With ``repeats`` the same plans run several times over: how long a step takes on a noisy machine
    is known only from repeats that lie far apart. With a seed ``shuffled_by`` they run in another
    order each time: what is slower for some minutes is then rounds of all kinds. The first round
    runs once more before, to warm up. ``memory_rounds`` at the end count bytes instead of time.

    Raises :class:`ConfigError` if a run fails: names the cause and the log.
    """
    random = np.random.default_rng(shuffled_by)
    order = np.arange if shuffled_by is None else random.permutation
    turns = [(n, repeat) for repeat in range(repeats) for n in order(rounds).tolist()]
    turns = [(0, WARM_UP), *turns, *((rounds + n, 0) for n in range(memory_rounds))]
    command = [
        *(sys.executable, "-m", "megatron_wlb.torchrun", "--standalone"),
        *("--nproc-per-node", str(num_processes), "-m", "megatron_wlb.launch"),
        *(str(Path(__file__).with_name("record.py")), *LAUNCHED, *flags),
        *("--wlb-cost", "measured", "--train-iters", str(len(turns))),
    ]
    console.print(f"{what}: starting", soft_wrap=True)
    log, told = path.with_suffix(".log"), Queue[tuple[str, Any]]()
    steps: list[dict[str, Any]] = []
    runs: dict[str, _Run] = {}

    def hear(*names: str) -> dict[str, Any]:
        """What each of these runs tells next: none of the others tells anything meanwhile."""
        heard: dict[str, Any] = {}
        while len(heard) < len(names):
            name, said = told.get()
            if said is None:
                raise ConfigError(f"{what} failed: {cause(runs[name].lines)} ({log})")
            heard[name] = said
        return heard

    with log.open("w", encoding="utf-8") as file:
        try:
            for name in packings:
                shape = ["--wlb-shape", "on"] if name.endswith(SHAPED) else []
                own = ["--wlb-packing", name.removesuffix(SHAPED), *shape]
                runs[name] = _Run(name, [*command, *own], file, told)
            first, *others = packings
            hear(*packings)  # All wait, so the first one measures alone.
            runs[first].answer(None)
            content = hear(first)[first]
            for name in others:
                runs[name].answer(content["cost"])
            hear(*others)
            start_s = time.monotonic()
            for done, (number, repeat) in enumerate(turns, start=1):
                for turn in range(len(packings)):  # Another packing begins each round.
                    name = packings[(done + turn) % len(packings)]
                    runs[name].answer({"round": number, "counts_bytes": number >= rounds})
                    step = hear(name)[name]
                    if repeat != WARM_UP:
                        steps.append(step | {"packing": name, "repeat": repeat})
                left_s = (time.monotonic() - start_s) / done * (len(turns) - done)
                left = f"round {done} of {len(turns)}, about {left_s:.0f} s left"
                console.print(f"{what}: {left}", soft_wrap=True)
            for run in runs.values():
                run.answer(None)
            for run in runs.values():
                run.wait()
        finally:
            for run in runs.values():
                run.end()
    write_text(path, json.dumps(content | {"packings": [*packings], "steps": steps}))


def cause(lines: Sequence[str]) -> str:
    """Why a run failed: its errors, or where a traceback ends, or what it printed last."""
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return "\n".join(told or [x for x in lines if x.startswith("[rank")][-1:] or lines[-5:])
