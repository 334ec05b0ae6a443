"""What a recorded comparison says: one summary, a headline, a table, pictures.

Speed is judged by totals over many steps and over the same documents. Packings run them in other
steps, some beside documents that others have still to run: of such a step a share counts, that of
the work of the same documents.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from rich.table import Table

from _quickstart.recording import Ran, RecordedStep, Recording
from megatron_wlb.cost.slices import Unit
from megatron_wlb.errors import ConfigError
from megatron_wlb.simulator.engine import Timeline

NUM_BLOCKS = 4
"""Consecutive parts of the recording whose speed-ups show the spread."""
DRAWN = 32
"""The most rounds in a picture: more could not be told apart."""
WORK = "work: the seconds of computing that documents should take, by a cost measured at the start"
RATE = (
    "A step's loss is the mean over its tokens, whatever their work: for the learning rate steps\n"
    "differ as their tokens do. Tokens of the least and the most, over the mean: "
)

Steps: TypeAlias = Mapping[str, Sequence[RecordedStep]]
"""By packing."""
Key: TypeAlias = tuple[int, int, int]
"""Corpus, epoch and number of a document."""


class Same:
    """The documents that all packings run the same tokens of, and what they took."""

    def __init__(self, counted: Steps) -> None:
        ran = {name: [d for s in steps for d in s.documents] for name, steps in counted.items()}
        tokens, self._work_us, self._pieces = (
            {name: _totals(own, value) for name, own in ran.items()}
            for value in (lambda d: d[3], lambda d: d[4], lambda d: 1)
        )
        first, *others = tokens.values()
        self.tokens = {
            key: num for key, num in first.items() if all(own[key] == num for own in others)
        }
        self.num_tokens = sum(self.tokens.values())

    def took_s(self, steps: Iterable[RecordedStep]) -> float:
        """Of each step the share that they have in its work."""
        return sum(
            sum(us for *key, _, us in step.documents if tuple(key) in self.tokens)
            / step.work_us
            * step.seconds
            for step in steps
        )

    def work_us(self, packing: str) -> float:
        """By a packing that cuts some, less: their pieces do not see each other."""
        return sum(self._work_us[packing][key] for key in self.tokens)

    def num_cut(self, packing: str) -> int:
        """How many it cuts that another one does not."""
        pieces, every = self._pieces[packing], self._pieces.values()
        return sum(pieces[key] > min(own[key] for own in every) for key in self.tokens)


def _totals(documents: Iterable[Ran], value: Callable[[Ran], float]) -> Counter[Key]:
    totals: Counter[Key] = Counter()
    for document in documents:
        totals[document[:3]] += value(document)  # type: ignore[assignment]
    return totals


def _rate(steps: Sequence[RecordedStep]) -> float:
    """µs of work a µs, of all their documents."""
    return sum(step.work_us for step in steps) / sum(step.seconds for step in steps) / 1e6


def summarize(recording: Recording) -> dict[str, Any]:
    """The figures of one layout, JSON-able.

    Raises :class:`ConfigError` where no document was trained by all packings.
    """
    counted = _counted(recording)
    same, base = Same(counted), recording.packings[0]
    if not same.tokens:
        raise ConfigError("no document was trained by all packings; record more rounds")
    num_rounds = len(recording.rounds)
    ends = [num_rounds * block // NUM_BLOCKS for block in range(NUM_BLOCKS + 1)]
    blocks = [slice(start, stop) for start, stop in pairwise(ends)]
    speedup = {}
    for name, steps in counted.items():
        parts = [_rate(steps[b]) / _rate(counted[base][b]) for b in blocks]
        tokens = same.took_s(counted[base]) / same.took_s(steps)
        a_token = same.work_us(name) / same.work_us(base)
        speedup[name] = {
            "tokens": tokens,
            "work": tokens * a_token,
            "work_a_token": a_token,
            "work_spread": {"min": min(parts), "max": max(parts), "blocks": NUM_BLOCKS},
        }
    return {
        "rounds": num_rounds,
        "documents": {
            "same": len(same.tokens),
            "tokens": same.num_tokens,
            "cut_by_original": same.num_cut(base),
        },
        "packings": {name: _figures(steps, same) for name, steps in counted.items()},
        "speedup_over_original": speedup,
        "micro_batch_prediction_error": _prediction_error(recording, counted),
    }


def _counted(recording: Recording) -> Steps:
    return {
        name: [step for step in recording.timed if step.packing == name]
        for name in recording.packings
    }


def _figures(steps: Sequence[RecordedStep], same: Same) -> dict[str, Any]:
    available = sum(len(s.intervals) * s.span_us for s in steps)
    tokens = sum(s.num_tokens for s in steps)
    took_s = same.took_s(steps)
    return {
        "tokens_per_s": same.num_tokens / took_s,
        # Seconds of predicted work: 1 a process would be a perfect prediction without bubbles.
        "work_per_s": same.work_us(steps[0].packing) / 1e6 / took_s,
        "bubble_share": 1 - sum(s.busy_us for s in steps) / available,
        "step_time_s": _range([s.seconds for s in steps]),
        "step_tokens": _range([s.num_tokens for s in steps]),
        "imbalance": statistics.mean(s.imbalance for s in steps),
        "delay_steps": sum(s.delay_steps * s.num_tokens for s in steps) / tokens,
        "loss": sum(s.loss * s.num_tokens for s in steps) / tokens,
        "final_loss": steps[-1].loss,
        "tokens": tokens,
    }


def _range(values: Sequence[float]) -> dict[str, float]:
    """Of all steps of a packing."""
    mean, median = statistics.mean(values), statistics.median(values)
    return {"min": min(values), "mean": mean, "median": median, "max": max(values)}


def _over_mean(tokens: Mapping[str, float]) -> list[str]:
    return [f"{tokens[end] / tokens['mean']:.2f}" for end in ("min", "max")]


def _prediction_error(recording: Recording, counted: Steps) -> float:
    """Mean of |predicted ÷ measured - 1| over all micro-batches, the machine's speed taken out.

    A shared machine is slower at times; each step's total is scaled to what was measured.
    """
    errors: list[float] = []
    for step in (step for steps in counted.values() for step in steps):
        rows = [recording.times_us(step, d).sum(axis=(0, 1)) for d in range(recording.dp_size)]
        measured = np.concatenate(rows)
        predicted = np.concatenate(step.predicted_us)
        errors += abs(predicted * (measured.sum() / predicted.sum()) / measured - 1).tolist()
    return statistics.mean(errors)


def headline(summary: Mapping[str, Any]) -> str:
    """How much faster packings are than the first one, and how long each waits."""
    idle = {name: figures["bubble_share"] for name, figures in summary["packings"].items()}
    (base, first_idle), *others = idle.items()
    lines = []
    for name, share in reversed(others):
        speed = summary["speedup_over_original"][name]
        low, high = speed["work_spread"]["min"], speed["work_spread"]["max"]
        lines.append(
            f"{name}: does {speed['work']:.2f}× the work of {base} in a second "
            f"({low:.2f} … {high:.2f} in {NUM_BLOCKS} parts of {summary['rounds']} rounds), which "
            f"is {speed['tokens']:.2f}× the tokens; processes wait {share:.1%} of the time"
        )
    documents = summary["documents"]
    why = (
        f"Compared are the same {documents['same']:,} documents of {documents['tokens']:,} tokens. "
        f"{base} cuts {documents['cut_by_original']} of them at the ends of windows. The pieces do "
        f"not see each other: whole, all are {speed['work_a_token']:.2f}× the work. So work a "
        "second grows by that more than tokens a second."
    )
    return "\n".join([*lines, f"{base}: processes wait {first_idle:.1%} of the time", why])


def table(title: str, summary: Mapping[str, Any]) -> Table:
    result = Table(title=title, title_justify="left")
    result.add_column("")
    for name in summary["packings"]:
        result.add_column(name, justify="right")
    figures = summary["packings"].values()
    speed = summary["speedup_over_original"].values()
    rows = {
        "work a second, over original": [f"{s['work']:.3f}×" for s in speed],
        f"  lowest … highest of {NUM_BLOCKS} parts": [
            f"{s['work_spread']['min']:.2f} … {s['work_spread']['max']:.2f}" for s in speed
        ],
        "  = tokens a second, over original": [f"{s['tokens']:.3f}×" for s in speed],
        "  × work a token, over original": [f"{s['work_a_token']:.3f}×" for s in speed],
        "tokens a second": [f"{f['tokens_per_s']:,.0f}" for f in figures],
        "idle time (bubble share)": [f"{f['bubble_share']:.1%}" for f in figures],
        "imbalance (predicted)": [f"{f['imbalance']:.3f}" for f in figures],
        "delay, steps": [f"{f['delay_steps']:.2f}" for f in figures],
        "tokens of a step ÷ mean": [" … ".join(_over_mean(f["step_tokens"])) for f in figures],
        "step time, median s": [f"{f['step_time_s']['median']:.2f}" for f in figures],
        "last loss": [f"{f['final_loss']:.3f}" for f in figures],
    }
    for label, cells in rows.items():
        result.add_row(label, *cells)
    result.caption = (
        f"measured over {summary['rounds']} rounds; micro-batch times predicted within "
        f"{summary['micro_batch_prediction_error']:.1%}"
    )
    return result


def _sliced(step: RecordedStep) -> list[int | None]:
    """The document that each micro-batch runs a slice of, numbered as by its units."""
    rows = [step.units(rank) or [Unit(0)] * len(own) for rank, own in enumerate(step.lengths)]
    return [unit.slice and unit.slice.document for own in rows for unit in own]


def _in_a_row(recording: Recording, steps: Sequence[RecordedStep]) -> Timeline:
    """Steps, as if no other packing had had its turn between them."""
    rows: list[list[Any]] = [[] for _ in range(recording.world_size)]
    at_us = 0.0
    for step in steps:
        for row, own in zip(rows, recording.timeline(step).intervals, strict=True):
            by = at_us - step.start_us
            row += [replace(i, start_us=i.start_us + by, stop_us=i.stop_us + by) for i in own]
        at_us += step.step_us
    return Timeline(tuple(map(tuple, rows)))


def draw(recording: Recording, folder: Path, layout: str) -> list[Path]:
    """Pictures of one layout: work of the micro-batches, and a stretch of steps as they ran."""
    from _quickstart.work import plot_micro_batches
    from megatron_wlb.study.plot import plot_timelines

    work_path, timeline_path = (folder / f"{layout}-{n}.png" for n in ("work", "timeline"))
    steps = _counted(recording)
    spreads = {name: _over_mean(_range([s.num_tokens for s in of])) for name, of in steps.items()}
    plot_micro_batches(
        {
            name: [[us for rank in s.predicted_us for us in rank] for s in of]
            for name, of in steps.items()
        },
        work_path,
        {name: [_sliced(s) for s in of] for name, of in steps.items() if any(s.chains for s in of)},
        RATE + ", ".join(f"{name} {low} to {high}" for name, (low, high) in spreads.items()),
    )
    drawn = {name: of[:DRAWN] for name, of in steps.items()}
    same, base = Same(drawn), recording.packings[0]
    titles = {
        name: f"{name} (for these {same.took_s(of):.3g} s, "
        f"{same.work_us(name) / same.work_us(base):.2f}× the work)"
        for name, of in drawn.items()
    }
    num = f"{len(drawn[base])} steps"
    plot_timelines(
        {titles[name]: _in_a_row(recording, of) for name, of in drawn.items()},
        timeline_path,
        f"{num} of each packing in a row, {layout}: {len(same.tokens)} documents are in all",
        measured=True,
        row="pipeline rank" if recording.pp_size > 1 else "rank",
        of=num,
    )
    return [work_path, timeline_path]
