"""Settings of `wlb` and `hold` for a user's own documents (WLB-LLM §4.2, "Tuning Hyperparameter").

As the paper has it, a sample of the documents is packed with many settings, and the one with the
best balance at a low delay is taken. Departures: "low" is a limit that the user gives; the number
of queues, `hold`'s settings and S_max are tuned as well as the thresholds; and what is chosen on
some documents is judged against the defaults on the steps that all commands simulate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType
from typing import Any

from megatron_wlb.errors import ConfigError, PackingError
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.packing.settings import sliced
from megatron_wlb.planning.run import Run
from megatron_wlb.simulator.baseline import Baseline, baseline
from megatron_wlb.simulator.trial import Outcome, Sharding, Steps, trial
from megatron_wlb.study.advice import check_max_delay, recommended

TUNABLE = ("wlb", "hold")
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
    """What was tried and what is recommended."""

    max_delay: float
    tried: tuple[Outcome, ...]
    """All settings, on the steps they were chosen on."""
    tried_base: Baseline
    """What their gains are over: `original` on the same steps."""
    chosen: Outcome
    """What is recommended, on the steps that judge, as are those below."""
    defaults: tuple[Outcome, ...]
    """The defaults of the packings that were tuned."""
    baselines: tuple[Outcome, ...]
    """`original` first, then packings that have nothing to tune."""
    tuned: Outcome | None = None
    """The best trial within the limit, or the one that comes nearest to it."""

    @property
    def original(self) -> Outcome:
        return self.baselines[0]

    @property
    def judged(self) -> tuple[Outcome, ...]:
        """Every setting that was judged, once; what is recommended is one of them."""
        every = [*self.baselines, *self.defaults, *([self.tuned] if self.tuned else [])]
        return tuple({outcome.setting: outcome for outcome in every}.values())

    @property
    def keeps_default(self) -> bool:
        return self.chosen.setting in [default.setting for default in self.defaults]


def frontier(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The settings that none beats in delay and throughput at once, by rising delay."""
    best: list[Outcome] = []
    for outcome in sorted(outcomes, key=lambda one: (one.delay_steps, -one.mfu)):
        if not best or outcome.mfu > best[-1].mfu:
            best.append(outcome)
    return best


def tune(
    run: Run,
    choosing: Steps,
    judging: Steps,
    base: Baseline,
    *,
    packings: Sequence[str] = TUNABLE,
    max_tokens: int | None = None,
    max_delay: float,
    sharding: Sharding = "adaptive",
    look_ahead: int = 0,
    limits: Mapping[str, Any] = MappingProxyType({}),
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Tuning:
    """The setting with the most work a second whose mean delay is at most ``max_delay``.

    ``max_tokens`` is the largest S_max, or what fits memory if it is not given
    (:meth:`.Run.s_max`); a smaller one is taken where it loses at most ``TOLERANCE``. Settings are
    chosen on the steps ``choosing``. The best is tried on those of ``judging``, where ``base`` has
    been, with the defaults and what has nothing to tune: the fastest there within the limit is
    recommended (:mod:`~megatron_wlb.study.advice`).

    ``limits`` are settings that all of them share. ``progress`` is told how many trials are done
    and about how many there will be.

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
    row, most = run.micro_batch_tokens, run.s_max("hold", max_tokens)
    hold, usual = PackingSettings("hold", most, **limits), min(most, 2 * row)
    defaults = [replace(hold, name=packing, max_tokens=usual) for packing in packings]
    others = [
        *(replace(hold, name="fixed-greedy", fixed_batches=batches) for batches in (1, 4)),
        *(replace(hold, name=name, max_tokens=run.s_max(name, max_tokens)) for name in sliced()),
    ]
    judging.check(run, [*defaults, *others, hold])

    first = [*defaults, *candidates(run, choosing, packings, most, look_ahead, **limits)]
    done, total = 0, len(first) + len(defaults) + len(others) + 1

    def tried_on(steps: Steps, setting: PackingSettings) -> Outcome:
        nonlocal done
        outcome = trial(run, setting, steps, sharding)
        done += 1
        progress(done, max(done, total))
        return outcome

    tried = {setting: tried_on(choosing, setting) for setting in dict.fromkeys(first)}
    second = _refined(tried.values(), packings, row, max_delay) - tried.keys()
    total += len(second)
    tried |= {setting: tried_on(choosing, setting) for setting in sorted(second, key=str)}

    judged = [tried_on(judging, setting) for setting in defaults]
    ranked = _ranked(tried.values(), max_delay)
    chosen = _judge(ranked, lambda setting: tried_on(judging, setting), max_delay)
    found = [*([chosen] if chosen else []), *judged]
    if not any(outcome.delay_steps <= max_delay for outcome in found):
        at_hand = chosen or min(tried.values(), key=lambda one: (one.delay_steps, -one.mfu))
        raise PackingError(
            f"no setting of {' or '.join(packings)} keeps the mean delay within {max_delay:g} "
            f"steps; the nearest has {at_hand.delay_steps:.3g} at imbalance "
            f"{at_hand.imbalance:.3f} ({' '.join(at_hand.flags)}): raise --max-delay"
            + ("" if "hold" in packings else ", or tune hold too")
        )
    tried_base = baseline(run, choosing, sharding, base.hardware)
    baselines = [base.original, *(tried_on(judging, setting) for setting in others)]
    best = recommended([*found, *baselines], max_delay, base.original)
    assert best is not None  # `original` delays nothing
    return Tuning(
        max_delay,
        tuple(tried.values()),
        tried_base,
        best,
        tuple(judged),
        tuple(baselines),
        chosen,
    )


def candidates(
    run: Run,
    steps: Steps,
    packings: Sequence[str],
    max_tokens: int,
    look_ahead: int,
    **limits: Any,
) -> Iterator[PackingSettings]:
    """Gives what is tried first, all with the largest S_max and ``limits``.

    Settings of `hold` do not bound a step's tokens, which takes delay, unless the limits do.
    """
    wlb = PackingSettings("wlb", max_tokens, **limits)
    hold = replace(wlb, name="hold", max_step_tokens=wlb.max_step_tokens or 0)
    top = min(run.window, steps.source.longest(run.window))
    lengths = sorted({max(1, round(top * fraction)) for fraction in THRESHOLDS})
    if "wlb" in packings:
        for num_queues in QUEUES:
            for thresholds in combinations(lengths, num_queues):
                yield replace(wlb, queue_thresholds=thresholds)
    if "hold" in packings:
        # No imbalance is above N, so this one holds nothing back that has room.
        yield replace(hold, tau=float(run.num_micro_batches), delay_price=0.0)
        for ahead in {0, look_ahead}:
            for tau in TAUS:
                for price in DELAY_PRICES:
                    yield replace(hold, tau=tau, delay_price=price, look_ahead=ahead)


def _refined(
    tried: Iterable[Outcome], packings: Sequence[str], row: int, max_delay: float
) -> set[PackingSettings]:
    """Neighbours of the best of each packing, and the same with less S_max."""
    refined: set[PackingSettings] = set()
    tried = list(tried)
    for packing in packings:
        ranked = _ranked([e for e in tried if e.setting.name == packing], max_delay)
        for setting in [outcome.setting for outcome in ranked[:NUM_REFINED]]:
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


def _ranked(outcomes: Iterable[Outcome], max_delay: float) -> list[Outcome]:
    """Ranks what keeps the limit, the best first: of the nearly best by least S_max, then delay."""
    within = [e for e in outcomes if e.delay_steps <= max_delay]
    best = max((e.mfu for e in within), default=0.0)

    def key(outcome: Outcome) -> tuple[float, ...]:
        if outcome.mfu >= (1 - TOLERANCE) * best:
            return (-math.inf, outcome.setting.max_tokens, outcome.delay_steps)
        return (-outcome.mfu,)

    return sorted(within, key=key)


def _judge(
    ranked: Sequence[Outcome], run: Callable[[PackingSettings], Outcome], max_delay: float
) -> Outcome | None:
    """Finds the first that keeps the limit on the steps that judge, or the nearest to it."""
    nearest: Outcome | None = None
    for outcome in ranked[:NUM_JUDGED]:
        judged = run(outcome.setting)
        if judged.delay_steps <= max_delay:
            return judged
        if nearest is None or judged.delay_steps < nearest.delay_steps:
            nearest = judged
    return nearest
