"""Hydraulis's Figure 17 and Table 2 as a section of a page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace

from _sections import Section, row_of

from _papers.hydraulis import Case
from _papers.hydraulis_optimum import GAP, TRIALS, Setting, Step, compared
from _papers.paper import Effort

FIGURE_17 = Case("32b", 64, "CommonCrawl", "F3")
"""32B with CommonCrawl on 64 GPUs, 200K tokens, up to 32K."""
SETTINGS = {
    "32B, 64 GPUs, F3, chosen": Setting(FIGURE_17, "chosen"),
    "32B, 64 GPUs, F1, 4*tp8pp2": Setting(replace(FIGURE_17, configuration="F1"), "Table 3"),
    "32B, 64 GPUs, F3, 4*tp8pp2": Setting(replace(FIGURE_17, configuration="F3"), "tp8pp2"),
    "13B, 32 GPUs, F1, 4*tp4pp2": Setting(Case("13b", 32, "GitHub", "F1"), "tp4pp2"),
    "7B, 16 GPUs, F1, 4*tp2pp2": Setting(Case("7b", 16, "GitHub", "F1"), "Table 3"),
    "7B, 16 GPUs, F1, 2*tp2pp4": Setting(Case("7b", 16, "GitHub", "F1"), "tp2pp4"),
    "13B, 16 GPUs, F3, unlike": Setting(Case("13b", 16, "GitHub", "F3"), "unlike"),
    "7B, 8 GPUs, F3, unlike": Setting(Case("7b", 8, "CommonCrawl", "F3"), "unlike"),
}
TABLE_2_S = {"ideal dispatching": 40.21, "greedy dispatching": 5.46, "packing": 10.15}
"""Seconds of 10 iterations on 64 GPUs, with 10 processes."""


def optimum(effort: Effort) -> Section:
    """How far both assignments are from their optima."""
    few = replace(effort, steps=max(1, effort.steps // 5))
    rows, every = [], list[Step]()
    for name, setting in SETTINGS.items():
        by_seed = compared(setting, few)
        steps = [step for own in by_seed for step in own]
        every += steps
        extra = (
            f"{max(s.ours.estimate_us / s.ideal.estimate_us for s in steps):.3f}",
            *_pair(steps, lambda s: s.trials.estimate_us / s.ideal.estimate_us),
            *_pair(steps, lambda s: s.ours.step_us / s.ideal.step_us),
            *_pair(steps, lambda s: s.trials.step_us / s.ideal.step_us),
            *_pair(steps, lambda s: s.lpt_us / s.packed_us),
            *_pair(steps, lambda s: s.own_packing_us / s.ideal_packing_us),
            *_pair(steps, lambda s: s.own_packing_us / s.same_number_us),
        )
        values = [
            statistics.fmean(s.ours.estimate_us / s.ideal.estimate_us for s in own)
            for own in by_seed
        ]
        rows.append(row_of(name, values, None, extra))
    within = [step.ideal.estimate_us / step.bound_us - 1 for step in every]
    packed = [step.packed_us / step.packed_bound_us - 1 for step in every]
    tried = [s.trials.step_us / s.ideal.step_us for s in every]
    own = [s.ours.step_us / s.trials.step_us for s in every]
    by_ours, by_trials = (
        statistics.fmean(one.estimate_us / s.ideal.estimate_us for s, one in pairs)
        for pairs in ([(s, s.ours) for s in every], [(s, s.trials) for s in every])
    )
    alone = [s.own_packing_us / s.same_number_us for s in every]
    claims = [
        (f"{TRIALS} trials are within 10 % of ideal dispatching, by estimate",
         max(s.trials.estimate_us / s.ideal.estimate_us for s in every) <= 1.1),
        (f"{TRIALS} trials are within 10 % of ideal dispatching, by time",
         min(tried) >= 0.9 and max(tried) <= 1.1),
        ("trials take less time to dispatch than the solver",
         sum(s.trials.seconds for s in every) < sum(s.ideal.seconds for s in every)),
    ]  # fmt: skip
    solved = sum(gap <= 2 * GAP for gap in within), sum(gap <= 2 * GAP for gap in packed)
    per_10 = [
        10 * statistics.fmean(values)
        for values in (
            [s.ideal.seconds for s in every],
            [s.trials.seconds for s in every],
            [s.packing_s for s in every],
            [s.ours.seconds for s in every],
        )
    ]
    printed = ", ".join(f"{seconds:g} s for {name}" for name, seconds in TABLE_2_S.items())
    return Section(
        "optimum",
        "Figure 17 and Table 2: how far is that from the optimum?",
        "The table shows the package's dispatching over the optimum of Equation 3, which CP-SAT "
        f"finds, in Equation 2's estimate of the slowest replica. Each case has {few.steps} "
        "iterations of each seed, the documents of the name's model, and the layout or strategy of "
        "the name. *Chosen* is the strategy that is fastest in each step, *unlike* the fastest of "
        f"those of several schemes. *Trials* is Algorithm 1: {TRIALS} random orders. *Time* is the "
        "simulated step after the package has packed each replica's documents. *Equation 1* is of "
        "the slowest replica: LPT over CP-SAT, each with its best number of micro-batches. Its "
        "*time* is the package's packing over CP-SAT's, simulated; in the last column CP-SAT has "
        "as many micro-batches as the package. Behind a mean stands the range over steps. The "
        "paper's documents, and so its steps, are not those here.",
        "ours over ideal dispatching, estimate",
        rows,
        claims,
        f"The optimum is proved within {2 * GAP:.1%} in {solved[0]} of {len(within)} dispatched "
        f"steps and in {solved[1]} of {len(packed)} packings. In the mean of all steps ours is "
        f"{by_ours - 1:.1%} above it, and trials are {by_trials - 1:.1%}. But the estimate is not "
        "the time. Equation 2 is a lower bound, and where replicas are pipelines the dispatch with "
        "the least bound is not the one with the shortest step: with ours a step takes "
        f"{min(own):.2f} to {max(own):.2f} of what it takes with trials, "
        f"{statistics.fmean(own):.3f} in the mean. The same holds for Equation 1, which counts "
        "each turn as long as the heaviest. LPT is behind the solver by that measure. By time the "
        "package is ahead, as it chooses the number of micro-batches by simulation; with as many "
        f"the solver's are {min(alone):.2f} to {max(alone):.2f} times as fast. Without a pipeline "
        "only sums count, so packings take the same time. *Measured* on one core of the machine "
        "that made this page, for 10 iterations: "
        f"{per_10[0]:.2f} s of CPU time for ideal dispatching, {per_10[1]:.2f} s for trials, "
        f"{per_10[2]:.2f} s for one replica's packing, {1e3 * per_10[3]:.0f} ms for ours. "
        f"The paper prints {printed}, of its steps and with 10 processes.",
        ("most", "trials, estimate", "ours, time", "trials, time", "Equation 1, LPT",
         "Equation 1, time", "as many micro-batches"),
    )  # fmt: skip


def _pair(steps: Iterable[Step], ratio: Callable[[Step], float]) -> tuple[str]:
    """The mean, and the range over steps."""
    ratios = [ratio(step) for step in steps]
    return (f"{statistics.fmean(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})",)
