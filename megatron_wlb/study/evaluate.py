"""What a packing makes of documents: planned as training would plan them, but nothing is run.

Times are *modelled*: they are the cost's. Only what packing itself takes is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np

from megatron_wlb.cost import Cost, ProfiledCost
from megatron_wlb.cost.step_costs import StageCosts
from megatron_wlb.data.documents import DocumentStream, LongDocuments
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError
from megatron_wlb.packing import CUTS_AT_WINDOWS, Meter, Packer, PackingMetrics, packer
from megatron_wlb.packing.base import MOST_STEPS_AHEAD
from megatron_wlb.plan import Document, MicroBatchPlan, StepPlan
from megatron_wlb.planning.planner import Planner
from megatron_wlb.schedule.graph import Graph, graph_of
from megatron_wlb.study.advice import Option, by_part

WARM_UP_STEPS = 50
"""Steps that do not count: queues and pools fill."""
MAX_AGE = 12
"""Of training, if nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A packing and its own settings, by the names of :func:`~megatron_wlb.packing.packer`."""

    packing: str
    max_tokens: int
    """S_max."""
    fixed_batches: int = 1
    queue_thresholds: tuple[int, ...] = ()
    """Those that `wlb` derives if none are given."""
    tau: float = 1.0
    delay_price: float | None = None
    look_ahead: int = 0
    solver_limit: float = 1.0

    @classmethod
    def parse(cls, text: str, window: int, max_tokens: int, **settings: Any) -> Setting:
        """``NAME`` or ``NAME:K``: K global batches, queues, or steps of look-ahead.

        K queues part the window evenly: at ``i · window ÷ (K + 1)``. ``settings`` are for all.

        Raises :class:`ConfigError` for a K that is none. An unknown NAME is found by
        :func:`~megatron_wlb.packing.packer`.
        """
        name, colon, number = text.partition(":")
        if not colon:
            return cls(name, max_tokens, **settings)
        least = 0 if name == "hold" else 1
        if not (number.isdecimal() and least <= int(number[:9]) <= MOST_STEPS_AHEAD):
            raise ConfigError(
                f"packing {text}: {number!r} is no number of batches, queues or steps, at most "
                f"{MOST_STEPS_AHEAD}; write it like fixed-greedy:4, wlb:3 or hold:2"
            )
        count = int(number)
        if name.startswith("fixed-"):
            settings["fixed_batches"] = count
        elif name == "wlb":
            if count >= window:
                raise ConfigError(f"packing {text}: more queues than a window of {window} parts in")
            thresholds = tuple(window * i // (count + 1) for i in range(1, count + 1))
            settings["queue_thresholds"] = thresholds
        elif name == "hold":
            settings["look_ahead"] = count
        else:
            raise ConfigError(f"packing {text}: {name} takes no number; write {name}")
        return cls(name, max_tokens, **settings)

    @property
    def title(self) -> str:
        """The packing and what of it is not the default, in a few words."""
        parts = [self.packing]
        if self.packing.startswith("fixed-"):
            parts.append(f"{self.fixed_batches} batch" + "es" * (self.fixed_batches > 1))
        elif self.packing == "wlb" and self.queue_thresholds:
            parts.append("L " + " ".join(map(str, self.queue_thresholds)))
        elif self.packing == "hold":
            if self.tau != 1:
                parts.append(f"tau {self.tau:g}")
            if self.delay_price is not None:
                parts.append(f"price {self.delay_price:g}")
            if self.look_ahead:
                parts.append(f"look-ahead {self.look_ahead}")
        return ", ".join(parts)

    def flags(self) -> list[str]:
        """What the training command needs of this; the rest is :meth:`Workload.rules`."""
        flags = ["--wlb-packing", self.packing]
        if self.packing not in CUTS_AT_WINDOWS:
            flags += ["--wlb-max-tokens", str(self.max_tokens)]
        if self.packing.startswith("fixed-") and self.fixed_batches > 1:
            flags += ["--wlb-fixed-batches", str(self.fixed_batches)]
        if self.packing == "wlb" and self.queue_thresholds:
            flags += ["--wlb-queue-thresholds", *map(str, self.queue_thresholds)]
        if self.packing == "hold":
            if self.tau != 1:
                flags += ["--wlb-hold-tau", f"{self.tau:g}"]
            if self.delay_price is not None:
                flags += ["--wlb-delay-price", f"{self.delay_price:g}"]
            if self.look_ahead:
                flags += ["--wlb-look-ahead", str(self.look_ahead)]
        return flags


@dataclass(frozen=True, slots=True)
class Layout:
    """How micro-batches share devices, for modelled step times.

    The ``pp_size * vpp_size`` chunks take equal shares of the model, and sending takes no time.
    """

    dp_size: int = 1
    pp_size: int = 1
    vpp_size: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"{name} is {value}; give at least 1")

    def graph(self, num_micro_batches: int) -> Graph:
        """Megatron's schedule of one pipeline, of the step's ``num_micro_batches`` over all.

        Raises :class:`ConfigError` where they do not divide as it asks.
        """
        if num_micro_batches % self.dp_size:
            raise ConfigError(
                f"{num_micro_batches} micro-batches a step do not divide over {self.dp_size} "
                "data-parallel ranks; choose a multiple"
            )
        each = num_micro_batches // self.dp_size
        return graph_of(self.pp_size, self.vpp_size, each)


@dataclass(frozen=True)
class Workload:
    """What is to be packed, into what, and what it costs; the same for every packing."""

    source: LengthSource
    window: int
    num_micro_batches: int
    cost: Cost
    seed: int
    long_documents: LongDocuments = "split"
    max_age: int = MAX_AGE
    max_step_tokens: int | None = None
    length_multiple: int = 1
    layout: Layout | None = None
    """None: a step takes as long as its slowest micro-batch, as where each has its own devices."""

    @property
    def step_tokens(self) -> int:
        """That arrive in a step, in the mean."""
        return self.num_micro_batches * self.window

    def rules(self, setting: Setting) -> tuple[str, ...]:
        """What the training command needs, beside the setting's own flags, to pack as here."""
        flags: list[str] = []
        if setting.packing not in CUTS_AT_WINDOWS:
            if self.max_age != MAX_AGE:
                flags += ["--wlb-max-age", str(self.max_age)]
            if self.max_step_tokens is not None:
                flags += ["--wlb-max-step-tokens", str(self.max_step_tokens)]
        if self.long_documents != "split":
            flags += ["--wlb-long-documents", self.long_documents]
        return tuple(flags)

    def packer(self, setting: Setting) -> Packer:
        """A new one. Raises :class:`ConfigError` for settings that cannot work."""
        return packer(
            setting.packing,
            num_micro_batches=self.num_micro_batches,
            window=self.window,
            cost=self.cost,
            max_tokens=setting.max_tokens,
            length_multiple=self.length_multiple,
            max_step_tokens=self.max_step_tokens,
            max_age=self.max_age,
            queue_thresholds=setting.queue_thresholds,
            tau=setting.tau,
            delay_price=setting.delay_price,
            look_ahead=setting.look_ahead,
            fixed_batches=setting.fixed_batches,
            solver_limit=setting.solver_limit,
        )

    def stream(self, setting: Setting, num_steps: int) -> DocumentStream:
        """The documents of at least so many steps, new from the start."""
        cuts = setting.packing in CUTS_AT_WINDOWS and self.long_documents == "split"
        longest = max(self.window, self.source.longest(self.window)) if cuts else self.window
        return self.source.stream(
            num_steps,
            window=self.window,
            longest=longest,
            windows_a_step=self.num_micro_batches,
            seed=self.seed,
            long_documents=self.long_documents,
        )

    def check(self, settings: Sequence[Setting]) -> None:
        """Raises :class:`ConfigError` where one of them cannot work, before any work is done."""
        for setting in settings:
            self.packer(setting)
            if isinstance(self.cost, ProfiledCost):
                self.cost.check_reach(setting.max_tokens)
        if self.layout is not None:
            self.layout.graph(self.num_micro_batches)


@dataclass(frozen=True)
class Evaluation:
    """How a setting did."""

    setting: Setting
    num_micro_batches: int
    window: int
    metrics: PackingMetrics
    ms_per_step: float
    """Measured CPU time of packing a step."""
    efficiency: float
    """Modelled work ÷ (modelled time of the steps × what shares it): 1 keeps all devices busy."""
    tokens_rate: float
    """Tokens ÷ modelled time of the steps, in a unit that only compares."""
    efficiency_by_part: tuple[float, ...]
    """``efficiency`` of each part of the steps."""
    flags: tuple[str, ...]
    """What the training command needs to pack like this."""

    @property
    def option(self) -> Option[Evaluation]:
        """As one of those that are chosen from."""
        longest = self.setting.max_tokens
        if self.setting.packing in CUTS_AT_WINDOWS:
            longest = self.window
        return Option(
            self, self.efficiency, self.efficiency_by_part, self.delay, self.imbalance, longest
        )

    @property
    def imbalance(self) -> float:
        """Time-weighted."""
        return self.metrics.imbalance_weighted

    @property
    def delay(self) -> float:
        """Mean, in steps."""
        return self.metrics.delay_mean_steps

    def row(self, original: Evaluation | None = None) -> dict[str, Any]:
        """JSON-able; speed-ups over ``original`` where it is given."""
        m, s = self.metrics, self.setting
        return {
            "packing": s.packing,
            "title": s.title,
            "num_micro_batches": self.num_micro_batches,
            "window": self.window,
            "max_windows": s.max_tokens / self.window,
            "max_tokens": s.max_tokens,
            "fixed_batches": s.fixed_batches,
            "queue_thresholds": list(s.queue_thresholds),
            "tau": s.tau,
            "delay_price": s.delay_price,
            "look_ahead": s.look_ahead,
            "steps": m.num_steps,
            "imbalance_mean": m.imbalance_mean,
            "imbalance_time_weighted": m.imbalance_weighted,
            "imbalance_p95": m.imbalance_p95,
            "imbalance_worst": m.imbalance_worst,
            "delay_mean": m.delay_mean_steps,
            "delay_p99": m.delay_p99_steps,
            "delay_max": m.delay_max_steps,
            "waiting_tokens": m.waiting_tokens,
            "tokens_cv": m.tokens_cv,
            "padding": m.padding_share,
            "ms_per_step": self.ms_per_step,
            "documents": m.num_documents,
            "tokens": m.num_tokens,
            "efficiency": self.efficiency,
            "work_speedup": original and self.efficiency / original.efficiency,
            "tokens_speedup": original and self.tokens_rate / original.tokens_rate,
            "flags": list(self.flags),
        }


class _Timed:
    """A packer whose ``pack`` is timed; all else is the packer's."""

    def __init__(self, packing: Packer) -> None:
        self._packing = packing
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packing, name)

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        start_s = time.process_time()
        packed = self._packing.pack(documents, step)
        self.seconds += time.process_time() - start_s
        return packed


def evaluate(
    workload: Workload,
    setting: Setting,
    steps: int,
    *,
    warm_up: int = WARM_UP_STEPS,
    on_step: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Plans ``warm_up`` steps and then ``steps`` that count; ``on_step`` is called after each.

    Raises what :meth:`Workload.check` does, and what packing does.
    """
    if steps < 1:
        raise ConfigError(f"steps is {steps}; give at least 1")
    workload.check([setting])
    timed = _Timed(workload.packer(setting))
    layout = workload.layout or Layout()
    planner = Planner(
        workload.stream(setting, warm_up + steps + timed.look_ahead + 1),
        cast(Packer, timed),
        workload.cost,
        dp_size=layout.dp_size,
        length_multiple=workload.length_multiple,
    )
    for _ in range(warm_up):
        planner.next_plan()
        on_step()
    timed.seconds = 0.0
    meter, clock = Meter(), _Clock(workload)
    for _ in range(steps):
        plan = planner.next_plan()
        assert plan is not None  # The stream has more steps.
        meter.add(plan)
        clock.add(plan)
        on_step()
    metrics = meter.metrics(planner.packer.waiting)
    return Evaluation(
        setting,
        workload.num_micro_batches,
        workload.window,
        metrics,
        timed.seconds / steps * 1e3,
        clock.efficiency,
        metrics.num_tokens / clock.device_us if clock.device_us else 0.0,
        by_part(clock.works_us, clock.devices_us),
        (*setting.flags(), *workload.rules(setting)),
    )


class _Clock:
    """Adds up work, and the time of all that shares it."""

    def __init__(self, workload: Workload) -> None:
        self._cost, self._layout = workload.cost, workload.layout
        self.works_us: list[float] = []  # of each step, as below
        self.devices_us: list[float] = []
        if self._layout is not None:
            self._graph = self._layout.graph(workload.num_micro_batches)
            self._stages = StageCosts.even(self._cost, self._graph.num_stages)

    @property
    def device_us(self) -> float:
        return sum(self.devices_us)

    @property
    def efficiency(self) -> float:
        return sum(self.works_us) / self.device_us if self.device_us else 1.0

    def add(self, plan: StepPlan) -> None:
        times_us = [micro_batch.predicted_us for micro_batch in plan]
        self.works_us.append(sum(times_us))
        if self._layout is None:
            self.devices_us.append(len(times_us) * max(times_us))
        else:
            slowest_us = max(map(self._rank_us, plan.micro_batches))
            self.devices_us.append(self._layout.dp_size * self._layout.pp_size * slowest_us)

    def _rank_us(self, micro_batches: Sequence[MicroBatchPlan]) -> float:
        """Time of a data-parallel rank's pipeline."""
        assert self._layout is not None
        if self._layout.pp_size == 1:
            return sum(micro_batch.predicted_us for micro_batch in micro_batches)
        times_us = self._stages.times_us(
            [[span.length for span in micro_batch.spans] for micro_batch in micro_batches]
        )
        return float(self._graph.step_us(times_us, np.zeros(len(micro_batches))))
