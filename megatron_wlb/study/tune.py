"""Settings of `wlb` and `hold` for a user's own documents (WLB-LLM §4.2, "Tuning Hyperparameter").

As the paper has it, a sample of the documents is packed with many settings, and the one with the
best balance at a low delay is taken. Departures: "low" is a limit that the user gives; the number
of queues, `hold`'s settings and S_max are tuned as well as the thresholds; and what is chosen is
judged on documents that it was not chosen on, against the defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType
from typing import Any

from megatron_wlb.cost import Parallelism
from megatron_wlb.cost.step_costs import StepCosts
from megatron_wlb.errors import ConfigError, PackingError
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.packing.settings import run_with, sliced
from megatron_wlb.planning.run import Workload
from megatron_wlb.study.advice import check_max_delay, recommended
from megatron_wlb.study.evaluate import Evaluation, evaluate

TUNABLE = ("wlb", "hold")

WARM_UP_STEPS = 25
QUEUES = (1, 2, 3)
THRESHOLDS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 2 / 3, 5 / 6)
"""Thresholds to try, as shares of the longest document, or of the window if that is shorter."""
DELAY_PRICES = (0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
TAUS = (1.0, 1.02, 1.05)
MAX_WINDOWS = (1.0, 1.25, 1.5, 2.0, 3.0)
"""S_max, in tokens that a micro-batch stands for; those below the limit are tried where that is
good."""
NEIGHBOUR = 1.15
"""A threshold or a price is tried again this much higher and lower."""
NUM_REFINED = 3
"""How many of the best of each packing are refined."""
TOLERANCE = 0.002
"""A smaller S_max, then a lower delay, is worth this share of the throughput."""
NUM_JUDGED = 8
"""How many choices are judged, if those before turn out to be above the limit."""


@dataclass(frozen=True)
class Tuning:
    """What was tried and what is recommended; ``efficiency`` is the throughput everywhere."""

    max_delay: float
    tried: tuple[Evaluation, ...]
    """All settings, on the steps they were chosen on."""
    tried_original: Evaluation
    """`original` on the same steps."""
    chosen: Evaluation
    """What is recommended, on held-out steps, as are those below."""
    defaults: tuple[Evaluation, ...]
    """The defaults of the packings that were tuned."""
    baselines: tuple[Evaluation, ...]
    """`original` first, then `fixed-greedy`."""
    tuned: Evaluation | None = None
    """The best trial within the limit, or the one that comes nearest to it."""

    @property
    def original(self) -> Evaluation:
        return self.baselines[0]

    @property
    def judged(self) -> tuple[Evaluation, ...]:
        """Every setting that ran on held-out steps, once; what is recommended is one of them."""
        every = [*self.baselines, *self.defaults, *([self.tuned] if self.tuned else [])]
        return tuple({evaluation.setting: evaluation for evaluation in every}.values())

    @property
    def keeps_default(self) -> bool:
        return self.chosen.setting in [default.setting for default in self.defaults]


def frontier(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """The settings that none beats in delay and throughput at once, by rising delay."""
    best: list[Evaluation] = []
    for evaluation in sorted(evaluations, key=lambda e: (e.delay, -e.efficiency)):
        if not best or evaluation.efficiency > best[-1].efficiency:
            best.append(evaluation)
    return best


def tune(
    workload: Workload,
    held_out: Workload,
    *,
    packings: Sequence[str] = TUNABLE,
    max_tokens: int,
    max_delay: float,
    steps: int,
    warm_up: int = WARM_UP_STEPS,
    look_ahead: int = 0,
    limits: Mapping[str, Any] = MappingProxyType({}),
    costs: StepCosts | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Tuning:
    """The setting with the highest modelled throughput whose mean delay is at most ``max_delay``.

    Throughput is the work of the steps ÷ their time: without a layout that of their slowest
    micro-batches, so it is 1 ÷ time-weighted imbalance. ``max_tokens`` is the largest S_max that
    memory allows; a smaller one is taken where it loses at most ``TOLERANCE``. Settings are chosen
    on ``steps`` steps of ``workload``, after ``warm_up``, and the best is judged on as many of
    ``held_out``, with the defaults and the baselines: the fastest there within the limit is
    recommended (:mod:`~megatron_wlb.study.advice`).

    ``limits`` are settings that all of them share. A packing of slices is a baseline, too, in a
    pipeline that can run it. ``costs`` are as in :func:`evaluate`. ``progress`` is told how many
    evaluations are done and about how many there will be.

    Raises :class:`PackingError` if nothing stays within ``max_delay``, with the nearest setting,
    and :class:`ConfigError` for packings that cannot be tuned and settings that cannot work.
    """
    for packing in packings:
        if packing not in TUNABLE:
            raise ConfigError(f"{packing} has nothing to tune; use {' or '.join(TUNABLE)}")
    if not packings:
        raise ConfigError(f"no packing to tune; give {' or '.join(TUNABLE)}")
    check_max_delay(max_delay)
    if look_ahead < 0:
        raise ConfigError(f"look_ahead is {look_ahead}; give at least 0")
    row, hold = workload.micro_batch_tokens, PackingSettings("hold", max_tokens, **limits)
    defaults = [
        replace(hold, name=packing, max_tokens=min(max_tokens, 2 * row)) for packing in packings
    ]
    p = workload.layout or Parallelism()
    baselines = [
        replace(hold, name="original"),
        *(replace(hold, name="fixed-greedy", fixed_batches=batches) for batches in (1, 4)),
        *(replace(hold, name=name) for name in run_with(p.pp_size, sliced())),
    ]
    workload.check([*defaults, *baselines, hold])

    first = [*defaults, *candidates(workload, packings, max_tokens, look_ahead, **limits)]
    done, total = 0, 1 + len(first) + len(defaults) + len(baselines) + 1

    def run(on: Workload, setting: PackingSettings) -> Evaluation:
        nonlocal done
        evaluation = evaluate(on, setting, steps, warm_up=warm_up, costs=costs)
        done += 1
        progress(done, max(done, total))
        return evaluation

    tried = {setting: run(workload, setting) for setting in dict.fromkeys(first)}
    second = _refined(tried.values(), packings, row, max_delay) - tried.keys()
    total += len(second)
    tried |= {setting: run(workload, setting) for setting in sorted(second, key=str)}

    judged = [run(held_out, setting) for setting in defaults]
    ranked = _ranked(tried.values(), max_delay)
    chosen = _judge(ranked, lambda setting: run(held_out, setting), max_delay)
    found = [*([chosen] if chosen else []), *judged]
    if not any(evaluation.delay <= max_delay for evaluation in found):
        at_hand = chosen or min(tried.values(), key=lambda e: (e.delay, -e.efficiency))
        raise PackingError(
            f"no setting of {' or '.join(packings)} keeps the mean delay within {max_delay:g} "
            f"steps; the nearest has {at_hand.delay:.3g} at imbalance {at_hand.imbalance:.3f} "
            f"({' '.join(at_hand.flags)}): raise --max-delay"
            + ("" if "hold" in packings else ", or tune hold too")
        )
    tried_original = run(workload, baselines[0])
    judged_baselines = tuple(run(held_out, setting) for setting in baselines)
    options = [evaluation.option for evaluation in (*found, *judged_baselines)]
    best = recommended(options, max_delay, options[len(found)])
    assert best is not None  # `original` delays nothing
    return Tuning(
        max_delay,
        tuple(tried.values()),
        tried_original,
        best.of,
        tuple(judged),
        judged_baselines,
        chosen,
    )


def candidates(
    workload: Workload, packings: Sequence[str], max_tokens: int, look_ahead: int, **limits: Any
) -> Iterator[PackingSettings]:
    """Gives what is tried first, all with the largest S_max and ``limits``.

    Settings of `hold` do not bound a step's tokens, which takes delay, unless the limits do.
    """
    wlb = PackingSettings("wlb", max_tokens, **limits)
    hold = replace(wlb, name="hold", max_step_tokens=wlb.max_step_tokens or 0)
    top = min(workload.window, workload.source.longest(workload.window))
    lengths = sorted({max(1, round(top * fraction)) for fraction in THRESHOLDS})
    if "wlb" in packings:
        for num_queues in QUEUES:
            for thresholds in combinations(lengths, num_queues):
                yield replace(wlb, queue_thresholds=thresholds)
    if "hold" in packings:
        # No imbalance is above N, so this one holds nothing back that has room.
        yield replace(hold, tau=float(workload.num_micro_batches), delay_price=0.0)
        for ahead in {0, look_ahead}:
            for tau in TAUS:
                for price in DELAY_PRICES:
                    yield replace(hold, tau=tau, delay_price=price, look_ahead=ahead)


def _refined(
    tried: Iterable[Evaluation], packings: Sequence[str], row: int, max_delay: float
) -> set[PackingSettings]:
    """Neighbours of the best of each packing, and the same with less S_max."""
    refined: set[PackingSettings] = set()
    tried = list(tried)
    for packing in packings:
        ranked = _ranked([e for e in tried if e.setting.name == packing], max_delay)
        for setting in [evaluation.setting for evaluation in ranked[:NUM_REFINED]]:
            refined |= {
                replace(setting, max_tokens=int(windows * row))
                for windows in MAX_WINDOWS
                if int(windows * row) < setting.max_tokens
            }
            for factor in (NEIGHBOUR, 1 / NEIGHBOUR):
                if setting.delay_price:
                    price = float(f"{setting.delay_price * factor:.2g}")
                    refined.add(replace(setting, delay_price=price))
                for number, threshold in enumerate(setting.queue_thresholds):
                    moved = [*setting.queue_thresholds]
                    moved[number] = max(1, round(threshold * factor))
                    if moved == sorted(set(moved)):
                        refined.add(replace(setting, queue_thresholds=tuple(moved)))
    return refined


def _ranked(evaluations: Iterable[Evaluation], max_delay: float) -> list[Evaluation]:
    """Ranks what keeps the limit, the best first: of the nearly best by least S_max, then delay."""
    within = [e for e in evaluations if e.delay <= max_delay]
    best = max((e.efficiency for e in within), default=0.0)

    def key(evaluation: Evaluation) -> tuple[float, ...]:
        if evaluation.efficiency >= (1 - TOLERANCE) * best:
            return (-math.inf, evaluation.setting.max_tokens, evaluation.delay)
        return (-evaluation.efficiency,)

    return sorted(within, key=key)


def _judge(
    ranked: Sequence[Evaluation], run: Callable[[PackingSettings], Evaluation], max_delay: float
) -> Evaluation | None:
    """Finds the first that keeps the limit on held-out steps, or the nearest to it."""
    nearest: Evaluation | None = None
    for evaluation in ranked[:NUM_JUDGED]:
        judged = run(evaluation.setting)
        if judged.delay <= max_delay:
            return judged
        if nearest is None or judged.delay < nearest.delay:
            nearest = judged
    return nearest
