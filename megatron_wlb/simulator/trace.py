"""A simulated step, or a recorded timeline, as a trace that Perfetto and Chrome show.

The form is Chrome's *Trace Event Format* (JSON): a process is a pipeline of one data-parallel rank,
a thread a pipeline rank. Open https://ui.perfetto.dev or chrome://tracing and drop the file there.
:func:`program` is the same as a table.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from megatron_wlb.cost.slices import Slice
from megatron_wlb.simulator.engine import Timeline
from megatron_wlb.simulator.step_timeline import StepTimeline

_COLOURS = {"F": "thread_state_running", "B": "thread_state_iowait"}
_SLICE_COLOURS = ("rail_response", "rail_animation", "rail_idle", "rail_load", "cq_build_passed")
"""Names of Chrome's own palette: green and orange, and for slices one colour a document."""


def trace(timelines: Mapping[str, StepTimeline | Timeline]) -> dict[str, Any]:
    """The trace of timelines by name (such as packings), JSON-able; all begin at 0.

    Beside each action stand micro-batch and chunk, of a slice its document, and the data-parallel
    ranks where several run it together. Critical actions of a simulated step say so, and with a
    memory model each pipeline rank has a counter of the bytes it holds.
    """
    events: list[dict[str, Any]] = []
    process = 0
    for name, line in timelines.items():
        if isinstance(line, StepTimeline):
            for dp_rank in range(line.dp_size):
                label = f"{name}, data-parallel rank {dp_rank}" if line.dp_size > 1 else name
                events += _step(line, dp_rank, process, label)
                process += 1
        else:
            events += _actions(line, process, name, frozenset())
            process += 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def program(timelines: Mapping[str, StepTimeline]) -> str:
    """Every action of simulated steps by name, as CSV: of each rank in the order in which it runs.

    Columns: the name, the ranks, the action (``F`` or ``B``, chunk and micro-batch), its times, and
    of a slice its document and tokens.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", "dp_rank", "pp_rank", "action", "start_us", "stop_us", *Slice._fields])
    for name, line in timelines.items():
        for dp_rank, replica in enumerate(line.replicas):
            for pp_rank, intervals in enumerate(replica.intervals):
                for i in intervals:
                    place = (name, dp_rank, pp_rank, i.action)
                    times = (f"{i.start_us:.3f}", f"{i.stop_us:.3f}")
                    writer.writerow([*place, *times, *(i.slice or ("",) * 4)])
    return text.getvalue()


def _step(line: StepTimeline, dp_rank: int, process: int, name: str) -> list[dict[str, Any]]:
    critical = frozenset(
        (part.pp_rank, part.what) for part in line.critical_path if part.dp_rank in (dp_rank, -1)
    )
    replica = line.replicas[dp_rank]
    events = _actions(replica, process, name, critical)
    for parts in line.collectives:
        for part in parts:
            # Beside the rank's actions: an overlapped reduction runs at the same time.
            thread = line.pp_size + part.pp_rank
            event = _event(part.what, part.start_us, part.stop_us, process, thread)
            event["args"] = {"critical": (part.pp_rank, part.what) in critical}
            events.append(event)
    for rank in sorted({part.pp_rank for parts in line.collectives for part in parts}):
        thread = line.pp_size + rank
        events += _thread(process, thread, f"pipeline rank {rank}, reduction and update")
    if line.memory:
        for rank, memory in enumerate(line.memory[dp_rank].ranks):
            held = memory.state.total
            place = {"ph": "C", "name": f"bytes on pipeline rank {rank}", "pid": process}
            for interval, peak, kept in zip(
                replica.intervals[rank], *memory.activations, strict=True
            ):
                events += [
                    {**place, "ts": interval.start_us, "args": {"bytes": held + peak}},
                    {**place, "ts": interval.stop_us, "args": {"bytes": held + kept}},
                ]
    return events


def _actions(
    line: Timeline, process: int, name: str, critical: frozenset[tuple[int, str]]
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    ]
    for rank, intervals in enumerate(line.intervals):
        events += _thread(process, rank, f"pipeline rank {rank}")
        for i in intervals:
            event = _event(
                str(i.action), i.start_us - line.start_us, i.stop_us - line.start_us, process, rank
            )
            event["cname"] = _COLOURS[i.action.kind]
            event["args"] = {
                "micro_batch": i.action.micro_batch,
                "chunk": i.action.chunk,
                "critical": (rank, str(i.action)) in critical,
            }
            if i.slice is not None:
                event["cname"] = _SLICE_COLOURS[i.slice.document % len(_SLICE_COLOURS)]
                event["args"] |= {
                    "document": i.slice.document,
                    "tokens": f"{i.slice.start}-{i.slice.stop} of {i.slice.length}",
                }
            if i.unit is not None and i.unit.recomputed:
                event["args"]["recomputed"] = ("", "MLPs", "layers", "nothing: on the host")[
                    i.unit.recomputed
                ]
            if i.unit is not None and i.unit.ranks:
                event["args"]["data_parallel_ranks"] = ", ".join(map(str, i.unit.ranks))
            events.append(event)
    return events


def _thread(process: int, thread: int, name: str) -> list[dict[str, Any]]:
    place = {"ph": "M", "pid": process, "tid": thread}
    return [
        {**place, "name": "thread_name", "args": {"name": name}},
        {**place, "name": "thread_sort_index", "args": {"sort_index": thread}},
    ]


def _event(name: str, start_us: float, stop_us: float, process: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start_us,
        "dur": stop_us - start_us,
    }
