"""What gains of trials are over, and the figures of a trial by name: one table for all commands.

A gain is over `original`, which fits memory: it recomputes more where it has to. Every gain names
that frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from megatron_wlb.cost import Recompute
from megatron_wlb.cost.memory import GIB
from megatron_wlb.planning.packing import PackingSettings
from megatron_wlb.planning.run import Run
from megatron_wlb.settings.config import DEFAULT_MACHINE
from megatron_wlb.simulator.trial import Outcome, Sharding, Steps, trial

FULL = Recompute("full", "uniform", 1)
MORE_RECOMPUTATION = (Recompute("selective"), FULL)
"""What `original` recomputes where it does not fit memory otherwise, least first."""


@dataclass(frozen=True)
class Baseline:
    """What gains are over: `original` on the same documents, layout and machine."""

    original: Outcome
    """The run, with the recomputation that it needs to fit memory, if the run's is too little."""
    stock: Outcome | None
    """The same with all communication overlapped that Megatron can overlap and plans cannot; None
    where there is no more to overlap."""
    recompute: Recompute
    """The run's own."""
    hardware: str
    """The machine's name or file."""

    @property
    def fits(self) -> bool:
        return self.original.run.fits_windows and not self.original.out_of_memory

    def net_speedup(self, outcome: Outcome) -> float:
        return outcome.speedup(self.stock or self.original)

    @property
    def overlap(self) -> str:
        """The flags that ``stock`` has more."""
        return "" if self.stock is None else self.original.run.more_overlap

    @property
    def name(self) -> str:
        """`original`, and in what it is not as the run: ``original, full recomputation``."""
        own = self.original.run.recompute
        said = "original" if own == self.recompute else f"original, {own.granularity} recomputation"
        return said if self.fits else f"{said}, which does not fit memory"

    @property
    def said(self) -> str:
        """One sentence on what gains are over."""
        run = self.original.run
        said = f"Gains are over {self.name}"
        if not run.fits_windows:
            said += " even with full recomputation"
        if run.parallelism.cp_size > 1:
            said += f", with {self.original.sharding} sharding"
        said += f", on {self.hardware}"
        if self.stock is None:
            return f"{said}; it has no more communication to overlap."
        return (
            f"{said}; net ones are over it with {self.overlap}, which plans turn off and with "
            f"which it is {self.stock.speedup(self.original):.3f} × as fast."
        )

    def as_dict(self) -> dict[str, Any]:
        """The frame of all gains, JSON-able."""
        return {
            "over": self.name,
            "over_recompute": self.original.run.recompute.title,
            "over_sharding": self.original.sharding,
            "original_fits": self.fits,
            "net_of": self.overlap or None,
            "overlapped_speedup": self.stock and self.stock.speedup(self.original),
            "hardware": self.hardware,
        }


class Column(NamedTuple):
    """A figure of an outcome: what JSON and tables call it, and how it is printed."""

    name: str
    header: str
    form: str
    of: Callable[[Outcome], Any]
    about: str

    def cell(self, outcome: Outcome, base: Baseline | None = None) -> str:
        value = self.value(outcome, base)
        return "" if value is None else self.form.format(value)

    def value(self, outcome: Outcome, base: Baseline | None) -> Any:
        if self.name not in GAINS:
            return self.of(outcome)
        return None if base is None else GAINS[self.name](outcome, base)


def _max_windows(outcome: Outcome) -> float | None:
    setting = outcome.setting
    own = not setting.kind.windows or setting.micro_batches == "auto"
    return setting.max_tokens / outcome.run.window if own else None


def _compares(outcome: Outcome) -> None:
    """Figures of :data:`GAINS` are of two outcomes."""


GAINS: dict[str, Callable[[Outcome, Baseline], float]] = {
    "speedup": lambda outcome, base: outcome.speedup(base.original),
    "net_speedup": lambda outcome, base: base.net_speedup(outcome),
    "tokens_speedup": lambda outcome, base: outcome.tokens_per_s / base.original.tokens_per_s,
}
"""Figures that compare."""
COLUMNS = {
    column.name: column
    for column in (
        Column("num_micro_batches", "N", "{}", lambda o: o.run.num_micro_batches,
               "micro-batches of a step over all replicas"),
        Column("title", "packing", "{}", lambda o: o.title, "what was compared"),
        Column("sharding", "sharding", "{}", lambda o: o.sharding, "over context-parallel ranks"),
        Column("recompute", "recompute", "{}", lambda o: o.run.recompute.title,
               "activations that are recomputed"),
        Column("max_windows", "S_max", "{:.3g}", _max_windows,
               "longest micro-batch that the packing may make, in windows"),
        Column("speedup", "work/s", "{:.3f}×", _compares,
               "work (model FLOPs) a second over original; what original is told below the table"),
        Column("net_speedup", "net", "{:.3f}×", _compares,
               "the same over original with all that Megatron can overlap, and plans cannot"),
        Column("tokens_speedup", "tokens", "{:.3f}×", _compares,
               "tokens a second over original, whose tokens are less work as it cuts documents"),
        Column("step_ms", "step ms", "{:,.1f}", lambda o: o.step_us / 1e3, "mean time of a step"),
        Column("tokens_per_s", "tokens/s", "{:,.0f}", lambda o: o.tokens_per_s,
               "of all devices, padding not counted"),
        Column("mfu", "MFU", "{:.1%}", lambda o: o.mfu,
               "model FLOPs over the devices' peak: linear and causal attention, nothing twice"),
        Column("bubble_share", "bubble", "{:.1%}", lambda o: o.bubble_share,
               "share of the ranks' time in the pipeline that they wait"),
        Column("peak_gib", "peak GiB", "{:.1f}", lambda o: o.peak_bytes / GIB,
               "the most that a device held in any step; ! where it is above the limit"),
        Column("imbalance_mean", "imbalance", "{:.3f}", lambda o: o.metrics.imbalance_mean,
               "max · N / Σ of the times of a step's micro-batches, 1 is perfect: mean over steps"),
        Column("imbalance_time_weighted", "tw", "{:.3f}", lambda o: o.imbalance,
               "the same, weighted by time"),
        Column("imbalance_p95", "p95", "{:.3f}", lambda o: o.metrics.imbalance_p95,
               "its 95th percentile"),
        Column("imbalance_worst", "worst", "{:.2f}", lambda o: o.metrics.imbalance_worst,
               "that of the worst step"),
        Column("pp_imbalance", "PP", "{:.3f}", lambda o: o.pp_imbalance,
               "the slowest micro-batch of a pipeline over the mean"),
        Column("cp_imbalance", "CP", "{:.3f}", lambda o: o.cp_imbalance,
               "the slowest attention of the ranks that share a sequence over the mean"),
        Column("dp_imbalance", "DP", "{:.3f}", lambda o: o.dp_imbalance,
               "the slowest replica over the mean"),
        Column("expert_wait_share", "experts", "{:.1%}", lambda o: o.expert_wait_share,
               "share of the ranks' time that they wait for a replica with more work, with which "
               "they exchange tokens; a part of the bubble"),
        Column("delay_mean", "delay", "{:.3f}", lambda o: o.delay_steps,
               "steps that a token runs before or after the step it arrived in, in the mean"),
        Column("delay_p99", "p99", "{}", lambda o: o.metrics.delay_p99_steps,
               "what 99 % of the tokens do not exceed of it"),
        Column("delay_max", "max", "{}", lambda o: o.metrics.delay_max_steps, "the longest"),
        Column("tokens_cv", "CV", "{:.2f}", lambda o: o.metrics.tokens_cv,
               "standard deviation ÷ mean of the tokens of a step"),
        Column("padding", "padding", "{:.2%}", lambda o: o.metrics.padding_share,
               "share of the tokens computed, where there is any"),
        Column("ms_per_step", "ms", "{:.2f}", lambda o: o.planning_ms,
               "measured CPU time of planning one step on this machine"),
        Column("documents", "documents", "{:,}", lambda o: o.metrics.num_documents,
               "that ran; pieces of cut ones count each"),
    )
}  # fmt: skip
"""By name: every table, picture and ``--json`` is made of these."""


def row(outcome: Outcome, base: Baseline | None = None) -> dict[str, Any]:
    """All figures by name, JSON-able; gains are None without a ``base``."""
    setting, metrics = asdict(outcome.setting), outcome.metrics
    lowest, highest = (None, None) if base is None else outcome.speedup_by_seed(base.original)
    return {
        "packing": setting.pop("name"),
        **setting,
        **{name: column.value(outcome, base) for name, column in COLUMNS.items()},
        "speedup_lowest": lowest,
        "speedup_highest": highest,
        "micro_batch_size": outcome.run.micro_batch_size,
        "window": outcome.run.window,
        "steps": metrics.num_steps,
        "tokens": metrics.num_tokens,
        "step_tokens": metrics.num_tokens / metrics.num_steps,
        "waiting_tokens": metrics.waiting_tokens,
        "out_of_memory": outcome.out_of_memory or None,
        "longest_micro_batch_tokens": outcome.longest_tokens,
        "sharding_shares": outcome.sharding_shares,
        "units": outcome.units,
        "flags": list(outcome.flags),
    }


def baseline(
    run: Run, steps: Steps, sharding: Sharding = "adaptive", hardware: str = DEFAULT_MACHINE
) -> Baseline:
    """Tries `original`, with as little more recomputation as lets it fit memory, and the same with
    all communication overlapped that Megatron can.
    """
    own = fitting(run)
    setting = PackingSettings("original", max_tokens=2 * run.micro_batch_tokens)
    stock = trial(own.overlapped, setting, steps, sharding) if own.more_overlap else None
    return Baseline(trial(own, setting, steps, sharding), stock, run.recompute, hardware)


def fitting(run: Run) -> Run:
    """The run with the least recomputation with which windows fit; as it is, where none does."""
    own = run.recompute
    least = {None: 0, "selective": 1, "full": 1 if own.method == "block" else 2}[own.granularity]
    more = (run.executed(recompute=again) for again in MORE_RECOMPUTATION[least:])
    for one in (run, *more):
        if one.fits_windows:
            return one
    return run
