"""Steps as :mod:`megatron_wlb.bench.recorder` wrote them: read back, and put in order.

Of a step's repeats the one that took the middle time counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_wlb.bench.recorder import RecordedStep, core_of
from megatron_wlb.errors import ConfigError
from megatron_wlb.schedule.graph import Floats, Graph, graph_of
from megatron_wlb.settings.config import Config, from_flat

CALIBRATION_SHARE = 3
"""One in so many rounds, from the first on, is calibrated with."""
FEWEST_ROUNDS = 6


@dataclass(frozen=True)
class Recording:
    """What :mod:`megatron_wlb.bench.recorder` wrote of one layout."""

    config: Config
    vocab_size: int
    world_size: int
    num_cores: int
    packings: list[str]
    timed: list[RecordedStep]
    """Of each step's repeats the one that took the middle time."""
    repeat_error: float
    """Mean of ``|time ÷ middle time - 1|`` over the other repeats: what the machine does to equal
    steps, and no simulation can foresee. 0 if there are none."""
    counted: list[RecordedStep]
    """Steps of which bytes were counted."""

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Raises :class:`ConfigError` for a file that is no recording, or one that is too short."""
        try:
            content = json.loads(path.read_text())
            steps = [RecordedStep(**step) for step in content["steps"]]
            timed, repeat_error = _middle(s for s in steps if s.activation_bytes is None)
            result = cls(
                from_flat(content["config"]),
                content["vocab_size"],
                content["world_size"],
                content["num_cores"],
                content["packings"],
                timed,
                repeat_error,
                [step for step in steps if step.activation_bytes is not None],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no recording ({error}); record it again") from None
        rounds = {step.round for step in result.timed}
        if len(rounds) < FEWEST_ROUNDS:
            raise ConfigError(
                f"{path}: {len(rounds)} rounds are too few to calibrate with a third of them; "
                f"record at least {FEWEST_ROUNDS}"
            )
        return result

    @cached_property
    def graph(self) -> Graph:
        """The schedule that the steps ran."""
        p = self.config.parallel
        return graph_of(
            p.pipeline_model_parallel_size,
            p.num_virtual_stages_per_pipeline_rank or 1,
            len(self.timed[0].lengths[0]),
            p.microbatch_group_size_per_virtual_pipeline_stage,
        )

    @property
    def dp_size(self) -> int:
        return len(self.timed[0].lengths)

    @property
    def cores(self) -> list[int] | None:
        """The core of each pipeline rank, or None where each has its own."""
        pp_size = self.graph.pp_size
        each = self.world_size // pp_size
        cores = [
            core_of(rank * each, self.world_size, pp_size, self.num_cores)
            for rank in range(pp_size)
        ]
        return None if len(set(cores)) == pp_size else cores

    def process(self, pp_rank: int, dp_rank: int) -> int:
        """The first process of a stage. Megatron's order of ranks: (TP,) CP, DP, PP outermost."""
        cp_size = self.config.parallel.context_parallel_size
        return (pp_rank * self.dp_size + dp_rank) * cp_size

    @cached_property
    def calibrating(self) -> list[RecordedStep]:
        """The first third of the timed steps."""
        rounds = sorted({step.round for step in self.timed})
        wanted = set(rounds[: len(rounds) // CALIBRATION_SHARE])
        return [step for step in self.timed if step.round in wanted]

    @cached_property
    def judged(self) -> list[RecordedStep]:
        rounds = sorted({step.round for step in self.timed})
        wanted = set(rounds[len(rounds) // CALIBRATION_SHARE :])
        return [step for step in self.timed if step.round in wanted]

    def times_us(self, step: RecordedStep, dp_rank: int) -> Floats:
        """Measured ``[2, S, N]``: on the wall, or where cores are shared CPU time."""
        graph = self.graph
        result = np.zeros((2, graph.num_stages, graph.num_micro_batches))
        for rank, actions in enumerate(graph.order):
            measured = step.intervals[self.process(rank, dp_rank)]
            for action, (kind, start, stop, cpu) in zip(actions, measured, strict=True):
                assert kind == action.kind, (kind, action)
                us = stop - start if self.cores is None else cpu
                stage = action.chunk * graph.pp_size + rank
                result["FB".index(kind), stage, action.micro_batch] = us
        return result


def _middle(steps: Iterable[RecordedStep]) -> tuple[list[RecordedStep], float]:
    """The middle of each step's repeats, and how far the others are off in the mean."""
    repeats: dict[tuple[int, str], list[RecordedStep]] = {}
    for step in steps:
        repeats.setdefault((step.round, step.packing), []).append(step)
    middles, errors = [], []
    for own in repeats.values():
        own.sort(key=lambda step: step.stop_us - step.start_us)
        middle = own.pop((len(own) - 1) // 2)
        us = middle.stop_us - middle.start_us
        errors += [abs((other.stop_us - other.start_us) / us - 1) for other in own]
        middles.append(middle)
    return middles, float(np.mean(errors)) if errors else 0.0
