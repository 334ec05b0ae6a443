"""What a recording says while it is made, and how it is read back."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from _quickstart.recording import SAYS, RecordedStep, Recording, _Run, cause

from megatron_wlb.cost.schedule.order import one_f_one_b, sliced
from megatron_wlb.errors import ConfigError


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"steps": [{"loss": 1}]}', None])
def test_reader_refuses_what_is_no_recording(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "recording.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"is no recording .* record it again"):
        Recording.read(path)


def test_recording_that_fails_names_each_error_or_the_last_lines() -> None:
    assert cause(["a", "error: unknown flag --ward", "b", "error: unknown --mirco"]) == (
        "unknown flag --ward\nunknown --mirco"
    )
    assert cause(["[rank0]: File x", "[rank0]: KeyError: y", "b"]) == "[rank0]: KeyError: y"
    assert cause(["a", "b", "c", "d", "e", "f"]) == "b\nc\nd\ne\nf"


def test_run_is_heard_within_another_ranks_line(tmp_path: Path) -> None:
    told: Queue[Any] = Queue()
    says = f"print('half', end=''); print({SAYS + '7'!r})"
    with (tmp_path / "log").open("w") as log:
        run = _Run("hold", [sys.executable, "-c", says], log, told)
        heard = [told.get(timeout=60), told.get(timeout=60)]
        run.end()
    assert heard == [("hold", 7), ("hold", None)] and run.lines == ["half"]


PP, CHAINS = 2, [[2, 1], [1]]
"""Replica 0 runs a document of 70 tokens in two slices, then two whole ones; replica 1 one."""
LENGTHS = [[[40], [30, 6], [5, 7]], [[90]]]
PREFIXES = [[[0], [40, 0], [0, 0]], [[0]]]


def intervals_of(orders: Sequence[Any]) -> list[list[tuple[str, float, float, float]]]:
    """Each process's actions one after another; the k-th of a process takes ``k + 1`` µs."""
    rows = []
    for rank in range(PP):
        for order in orders:
            at, row = 0.0, []
            for number, action in enumerate(order[rank], start=1):
                row.append((action.kind, at, at + number, 0.5 * number))
                at += number
            rows.append(row)
    return rows


def slim_step(**changes: Any) -> RecordedStep:
    intervals = intervals_of([sliced(PP, own) for own in CHAINS])
    step = RecordedStep(
        "slim", 0, 0.0, 50.0, 178, LENGTHS, intervals, [[9.0, 8.0, 7.0], [20.0]],
        prefixes=PREFIXES, chains=CHAINS, documents=[(0, 0, 7, 70, 12.0)],
    )  # fmt: skip
    return dataclasses.replace(step, **changes)


def original_step() -> RecordedStep:
    lengths = [[[90], [88]], [[80], [10]]]
    intervals = intervals_of([one_f_one_b(PP, 2)] * 2)
    return RecordedStep("original", 0, 0.0, 50.0, 268, lengths, intervals, [[9.0, 8.0], [7.0, 1.0]])


def read(folder: Path, steps: Sequence[dict[str, Any]]) -> Recording:
    content = {
        "config": {"pipeline_model_parallel_size": PP, "seq_length": 128},
        "vocab_size": 256,
        "world_size": 2 * PP,
        "num_cores": 2 * PP,
        "packings": ["original", "slim"],
        "steps": steps,
    }
    path = folder / "recording.json"
    path.write_text(json.dumps(content))
    return Recording.read(path)


def test_each_step_and_replica_has_the_graph_that_it_ran(tmp_path: Path) -> None:
    recording = read(tmp_path, [dataclasses.asdict(s) for s in (original_step(), slim_step())])
    original, slim = recording.steps
    assert recording.graph(original, 1).order == tuple(map(tuple, one_f_one_b(PP, 2)))
    for dp_rank, chains in enumerate(CHAINS):
        assert recording.graph(slim, dp_rank).order == tuple(map(tuple, sliced(PP, chains)))


def test_measured_times_of_slices_come_in_the_order_that_they_ran(tmp_path: Path) -> None:
    recording = read(tmp_path, [dataclasses.asdict(slim_step())])
    step = recording.steps[0]
    # Of each process the k-th action takes k.
    assert list(map(str, recording.graph(step, 0).order[1])) == [
        "F0.0", "F0.1", "B0.1", "F0.2", "B0.0", "B0.2"
    ]  # fmt: skip
    assert recording.times_us(step, 0)[:, 1].tolist() == [[1, 2, 4], [5, 3, 6]]
    assert recording.times_us(step, 1)[:, 0].tolist() == [[1], [2]]
    drawn = recording.timeline(step).intervals
    assert [i.slice.start if i.slice else None for i in drawn[2]] == [0, 40, 40, None, 0, None]
    assert [i.slice for i in drawn[1] + drawn[3]] == [None] * 4
