"""Hydraulis's Figures 10 and 13 and Table 1 as sections of a page, and gains on other lengths."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from _sections import Paper, Row, Section, check_solver, row_of

from _papers import hydraulis
from _papers.hydraulis import BREAKDOWN, CASES, CONFIGURATIONS, DATA, PRINTED_RANGE
from _papers.paper import Effort, K
from megatron_wlb.cost import Execution, load_hardware
from megatron_wlb.cost.shape import Recompute, padded_vocabulary
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.planning.balance.replica_costs import Scheme
from megatron_wlb.planning.models import load_model
from megatron_wlb.simulator.baseline import FULL
from megatron_wlb.strategies.plan.propose import StrategySpace
from megatron_wlb.strategies.strategy_search import study

WINDOW = 128 * K
DEVICES = 64
WINDOWS_A_STEP = (16,)
OTHER_HARDWARE = "h200"
"""TP and PP alone hold a window there."""
SLICED = (
    ("7b", 64, "h100-sxm", "reference", 16),
    ("30b", 64, "h100-sxm", "reference", 16),
    ("30b", 64, "h100-sxm", "magi", 16),
    ("70b", 256, "h200", "reference", 32),
)
SLICES = "slices"
WAYS = (
    ("no recomputation", False, Recompute()),
    ("recomputed", False, FULL),
    (SLICES, True, Recompute()),
)


def _end_to_end(effort: Effort) -> Section:
    rows, over = [], {}
    for case in CASES:
        found = hydraulis.end_to_end(case, effort)
        over[case] = statistics.fmean(found.over_packed())
        proposal = found.studies[0].proposal
        used = [one for one in found.studies[0].outcomes if one.num_chosen]
        most = max(used, key=lambda one: one.num_chosen)
        extra = (
            f"{statistics.fmean(found.over_equal()):.2f}",
            str(found.packed.strategy),
            str(proposal.best_equal.strategy),
            f"{most.candidate.strategy} ({most.num_chosen / effort.steps:.0%})",
            str(len(used)),
        )
        rows.append(row_of(case.name, found.over_packed(), None, extra))
    values = [row.value for row in rows]
    ends = ("the least of all", min(values), PRINTED_RANGE[0]), (
        "the most of all", max(values), PRINTED_RANGE[1],
    )  # fmt: skip
    rows = [Row(name, v, v, v, printed, ("",) * 5) for name, v, printed in ends] + rows
    pairs = [(over[replace(c, configuration="F2")], over[c]) for c in CASES if c.context == 16 * K]
    several = [row for row in rows[2:] if int(row.extra[-1]) > 1]
    claims = [
        ("strategies are faster than Megatron-LM with packing in every case", min(values) > 1),
        ("the gain is within the printed range in most cases",
         statistics.fmean(PRINTED_RANGE[0] <= v <= PRINTED_RANGE[1] for v in values) > 0.5),
        ("contexts of 32K gain more than contexts of 16K, in the mean",
         statistics.fmean(a for a, _ in pairs) > statistics.fmean(b for _, b in pairs)),
        ("iterations choose several strategies in most cases", 2 * len(several) > len(CASES)),
    ]  # fmt: skip
    return Section(
        "end-to-end",
        "Figure 10: end to end",
        "The table shows the time of iterations of Megatron-LM in its layout of Table 3, "
        "documents packed to the context (best fit) and dealt out, over that of strategies "
        "chosen step by step. The paper prints the least and the most gain over the best of "
        "Megatron-LM, DeepSpeed and HotSPa; its bars are in the picture alone. *Over the best "
        "equal layout* is what strategies add to one layout for all steps that is searched for "
        "and whose documents are assigned in the same two stages.",
        "speed-up over Megatron-LM",
        rows,
        claims,
        "Much of the gain is assigning documents by time, and a layout that is searched for. The "
        "last column but one shows that in most iterations layouts win in which all replicas are "
        "alike, but smaller than the longest document would ask for: 100K tokens are few documents "
        "on many GPUs, and unlike replicas are hard to fill evenly. In the model a small matrix "
        "product costs as much a token as a large one. On GPUs, little work a rank is slow (Figure "
        "16), so much parallelism costs more there than here, and strategies gain more.",
        ("over the best equal layout", "Table 3's layout", "best equal layout",
         "chosen most often", "strategies used"),
        1.0,
        {"over Megatron-LM": rows[2:]},
    )  # fmt: skip


def _scaled(effort: Effort) -> Section:
    rows: list[Row] = []
    ms: dict[str, list[tuple[float, float]]] = {}
    groups = {}
    for factor, points in hydraulis.SCALES.items():
        first = len(rows)
        for num, longest, tokens in points:
            found = hydraulis.scaled(num, (longest, tokens), effort)
            per_step = 1e3 * effort.steps
            ours = statistics.fmean(one.dynamic_us for one in found.studies) / per_step
            theirs = statistics.fmean(found.packed_us) / per_step
            ms.setdefault(factor, []).append((theirs, ours))
            most = max(found.studies[0].outcomes, key=lambda one: one.num_chosen)
            extra = (
                f"{theirs:,.0f} / {ours:,.0f}",
                str(found.packed.strategy),
                str(most.candidate.strategy),
            )
            name = f"{num} GPUs, {longest // K}K, {tokens // K}K tokens"
            rows.append(row_of(name, found.over_packed(), None, extra))
        groups[factor] = rows[first:]
    ends = {factor: (own[0], own[-1]) for factor, own in ms.items()}
    growth = {
        factor: tuple(last[way] / first[way] for way in range(2))
        for factor, (first, last) in ends.items()
    }
    share = {
        factor: points[-1][at] / points[0][at]
        for at, (factor, points) in enumerate(hydraulis.SCALES.items())
    }
    claims = [
        ("with more GPUs the time falls less than they grow, for both",
         all(1 / one < share["GPUs"] for one in growth["GPUs"])),
        ("strategies are faster at every number of GPUs",
         all(ours < theirs for theirs, ours in ms["GPUs"])),
        ("longer documents slow strategies down less",
         growth["longest document"][1] < growth["longest document"][0]),
        ("time grows about with the tokens, with strategies no more than without",
         growth["tokens"][1] <= growth["tokens"][0] < 1.2 * share["tokens"]),
    ]  # fmt: skip
    return Section(
        "scalability",
        "Figure 11: scalability",
        "The table shows 7B with CommonCrawl, and one factor after another: GPUs, the longest "
        "document, tokens an iteration. Megatron-LM has the equal layout in which its packing is "
        "fastest. Milliseconds are of its iterations, and of those with strategies.",
        "speed-up over Megatron-LM",
        rows,
        claims,
        "The paper's curves are in the picture alone, so their points are not compared. With more "
        "tokens Megatron-LM's packing has more windows to deal out evenly, so its time grows less "
        "than the tokens. Strategies are even with few.",
        ("ms, Megatron-LM / strategies", "Megatron-LM's layout", "chosen most often"),
        1.0,
        groups,
    )


def _ablation(effort: Effort) -> Section:
    rows, gains = [], []
    gaps: dict[str, list[float]] = {"packed": [], "chosen": []}
    for name in ("F1", "F2"):
        stages = hydraulis.ablation(replace(BREAKDOWN, configuration=name), effort)
        means = [statistics.fmean(stage.step_us) for stage in stages]
        gains.append([a / b for a, b in pairwise(means)])
        gaps["packed"].append(stages[0].gap)
        gaps["chosen"].append(stages[-1].gap)
        for stage in stages:
            ratios = [a / b for a, b in zip(stages[1].step_us, stage.step_us, strict=True)]
            rows.append(row_of(f"{name}, {stage.name}", ratios, None, (f"{stage.gap:.0%}",)))
    (_, time_1, unlike_1, chosen_1), (*_, unlike_2, chosen_2) = gains
    claims = [
        ("micro-batches by time gain where there is a pipeline (F1)", time_1 > 1.005),
        ("one strategy for all steps gains over Table 3's layout (F1, F2)",
         min(unlike_1, unlike_2) > 1.005),
        ("choosing step by step gains more (F1, F2)", min(chosen_1, chosen_2) > 1.005),
        ("choosing step by step gains more where the longest document asks for TP 16 (F2)",
         chosen_2 > 1.005),
        ("two stages leave the slowest and the fastest replica within 10 %, packing does not",
         all(gap <= 0.1 for gap in gaps["chosen"]) and all(gap > 0.1 for gap in gaps["packed"])),
    ]  # fmt: skip
    return Section(
        "ablation",
        "Figure 13: parts of Hydraulis one after another",
        "The table shows 32B with CommonCrawl on 64 GPUs. The base is the paper's (a): Table "
        "3's layout, documents dispatched by Equation 3 and packed to the maximum length; then "
        "(b) micro-batches by time, (c) the strategy that is best in every step, (d) strategies "
        "chosen step by step. Before them is packing without dispatching. *Gap* is by how much "
        "the fastest replica is done before the slowest (Figure 12b; printed: 36-65 % for "
        "Megatron-LM, 2-10 % for Hydraulis).",
        "throughput over (a)",
        rows,
        claims,
        "The paper's bars are in the picture alone. Where Table 3's layout has no pipeline "
        "(F2), the number of micro-batches does not matter. The strategy that is best in every "
        "step has to take the longest document, and may be a layout of equal replicas: then (c) "
        "shows what searching for it gains.",
        ("gap",),
    )  # fmt: skip


def _breakdown(effort: Effort) -> Section:
    rows: list[Row] = []
    parts = {}
    for one_adapter, said in ((False, "all adapters"), (True, "one adapter")):
        case = replace(BREAKDOWN, one_adapter=one_adapter)
        by_seed = [hydraulis.breakdown(case, effort, seed) for seed in effort.seeds]
        equal, apart, hidden = ([one[name] for one in by_seed] for name in hydraulis.TABLE_1_S)
        parts[said] = by_seed[0]
        passes, *whole = (
            [getattr(a, what) / getattr(b, what) for a, b in zip(equal, other, strict=True)]
            for other, what in (
                (apart, "propagation_us"), (apart, "step_us"), (hidden, "step_us"),
            )
        )  # fmt: skip
        ratios = dict(zip(hydraulis.TABLE_1, (passes, *whole), strict=True))
        for name, values in ratios.items():
            extra = _seconds(name, by_seed)
            rows.append(row_of(f"{said}: {name}", values, hydraulis.TABLE_1[name], extra))
    least, most = (
        statistics.fmean(row.value for row in rows if row.name == f"{said}: propagation")
        for said in ("all adapters", "one adapter")
    )
    all_adapters = parts["all adapters"]
    claims = [
        ("propagation is faster with strategies", least > 1),
        ("the printed gain of propagation is between those of the two assumptions",
         least < hydraulis.TABLE_1["propagation"] < most),
        ("strategies move more than an equal layout's collectives",
         all_adapters["unlike"].exchange_us > all_adapters["equal"].exchange_us),
        ("the passes hide most of the exchange",
         all_adapters["overlapped"].exchange_us < all_adapters["unlike"].exchange_us / 2),
        ("end to end strategies win with the exchange hidden", rows[2].value > 1),
    ]  # fmt: skip
    return Section(
        "breakdown",
        "Table 1: propagation, optimisation and what is between",
        "The table shows 32B with CommonCrawl on 64 GPUs at 32K: Table 3's layout (TP 16, DP 4) "
        "with two-stage assigning over strategies. How fast TP 16 is over two nodes decides, "
        "and the paper does not say it: with all network adapters of a node, as the model of "
        "links has it, or with one. Seconds are of the equal layout and of strategies: here, "
        "and in the paper.",
        "equal layout's time over strategies'",
        rows,
        claims,
        "The paper's times of propagation are three times those here: 100K tokens keep 64 GPUs "
        "busy at 15 % of their peak there (6 · 32B · 100K FLOPs in 6.78 s), and the model knows "
        "no such loss. So the exchange weighs more here. Its size is of the paper's order. The "
        "paper's does not hide the collectives of its equal layout; neither is that done here.",
        ("here, s", "paper, s"),
    )  # fmt: skip


def _seconds(name: str, by_seed: Sequence[dict[str, hydraulis.Parts]]) -> tuple[str, str]:
    """A part's seconds in the equal layout and with strategies, here and in the paper."""
    other = "overlapped" if name.endswith(", overlapped") else "unlike"
    if name == "propagation":
        here = [
            statistics.fmean(one[n].propagation_us for one in by_seed) for n in ("equal", other)
        ]
        there = [hydraulis.TABLE_1_S[n][0] for n in ("equal", other)]
    else:
        here = [statistics.fmean(one[n].step_us for one in by_seed) for n in ("equal", other)]
        there = [sum(hydraulis.TABLE_1_S[n]) for n in ("equal", other)]
    return " / ".join(f"{us / 1e6:.2f}" for us in here), " / ".join(f"{s:.2f}" for s in there)


def _short_heavy() -> LengthSource:
    """One document in a thousand is of a whole window; others are lognormal of median 1K."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(math.log(1024), 1.0, 1 << 17), 16, 16 * K)
    lengths[random.random(lengths.size) < 0.001] = WINDOW
    return LengthSource.of_lengths("short-heavy", lengths.astype(np.int64))


def _other_lengths(effort: Effort) -> Section:
    shape = padded_vocabulary(load_model("7b"), 8)
    hardware = load_hardware(OTHER_HARDWARE)
    plain = tuple(Scheme(tp, 1, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8))
    spaces = {
        "CP too": StrategySpace(shape, Execution(), hardware, DEVICES, slices=False),
        "TP and PP alone": StrategySpace(shape, Execution(), hardware, DEVICES, schemes=plain),
    }
    sources = [LengthSource.of_distribution(name) for name in ("reference", "magi")]
    rows, gain = [], {}
    for source in (*sources, _short_heavy()):
        name = source.title.removeprefix("distribution ")
        for number in WINDOWS_A_STEP:
            for sizes, space in spaces.items():
                found = [
                    study(space, source, window=WINDOW, windows_a_step=number,
                          num_steps=effort.steps, seed=seed) for seed in effort.seeds
                ]  # fmt: skip
                values = [one.gain for one in found]
                alone = statistics.fmean(
                    one.equal_us / (one.best_alone.alone_us or one.equal_us) for one in found
                )
                used = max(found[0].outcomes, key=lambda one: one.num_chosen)
                extra = (
                    f"{alone:.2f}",
                    str(found[0].proposal.best_equal.strategy),
                    f"{used.candidate.strategy} ({used.num_chosen / effort.steps:.0%})",
                )
                rows.append(row_of(f"{name}, {number} windows, {sizes}", values, None, extra))
                gain[name, number, sizes] = statistics.fmean(values)
    return Section(
        "lengths",
        "What strategies gain on other lengths",
        f"The table shows 7B at a window of {WINDOW // K}K on {DEVICES} modelled H200s, steps of "
        "16 windows of tokens: strategies chosen step by step over the best single "
        "layout, with documents assigned in the same two stages. So it is what unlike and "
        "changing layouts add, and nothing else. `reference` is heavy-tailed, `magi` short with "
        "a thin tail (0.45 % from 32K on), short-heavy has one document of a whole window in a "
        "thousand and no other above 16K. *Alone* is the one strategy that is best in all steps.",
        "speed-up over the best equal layout",
        rows,
        [],
        _said(gain),
        ("alone", "best equal layout", "chosen most often"),
    )


def _slices(effort: Effort) -> Section:
    rows = []
    for model, devices, name, data, windows in SLICED:
        shape, hardware = padded_vocabulary(load_model(model), 8), load_hardware(name)
        source = LengthSource.of_distribution(data)
        values, used = [], []
        for seed in effort.seeds:
            found = {}
            for way, slices, recompute in WAYS:
                space = StrategySpace(
                    shape, Execution(recompute=recompute), hardware, devices, slices=slices,
                    longest=WINDOW,
                )  # fmt: skip
                if any(tokens >= WINDOW for _, tokens in space.costs):
                    found[way] = study(space, source, window=WINDOW, windows_a_step=windows,
                                       num_steps=effort.steps, seed=seed)  # fmt: skip
            whole = min((way for way in found if way != SLICES), key=lambda w: found[w].dynamic_us)
            values.append(found[whole].dynamic_us / found[SLICES].dynamic_us)
            used.append([(whole, found[whole]), ("", found[SLICES])])
        extra = [
            f"{max(one.outcomes, key=lambda o: o.num_chosen).candidate.strategy}"
            f"{f' ({way})' if way else ''}"
            for way, one in used[0]
        ]
        title = f"{model.upper()}, {devices} {name.split('-')[0].upper()}s, {data}"
        rows.append(row_of(title, values, None, tuple(extra)))
    return Section(
        "slices",
        "What slices inside replicas add",
        "The table shows strategies whose pipelines may cut documents into slices, over strategies "
        f"that run them whole, as the paper does. Windows have {WINDOW // K}K tokens, steps 16 "
        "windows, 32 on more than 64 GPUs. Whole documents run with or without recomputation of "
        "all layers, whichever is faster; slices recompute as little as memory asks.",
        "speed-up over whole documents",
        rows,
        [],
        "A document that runs whole is held once for each micro-batch in flight. In slices it is "
        "held once, so replicas take documents several times as long, and fewer ranks do. The "
        "more memory the model leaves, the less that matters.",
        ("whole, chosen most often", "with slices, chosen most often"),
    )


def _said(gain: dict[tuple[str, int, str], float]) -> str:
    least, most = min(gain, key=gain.__getitem__), max(gain, key=gain.__getitem__)
    none = [key for key, value in gain.items() if value < 1.01]
    said = (
        f"The most is {gain[most]:.2f}, for {most[0]}, {most[1]} windows, {most[2]}; the "
        f"least is {gain[least]:.2f}, for {least[0]}, {least[1]} windows, {least[2]}. "
    )
    if none:
        rows = "; ".join(f"{name}, {number} windows, {cp}" for name, number, cp in none)
        said += f"There is nothing to gain (below 1.01) for {rows}. "
    means = {sizes: statistics.fmean(v for k, v in gain.items() if k[2] == sizes)
             for sizes in dict.fromkeys(k[2] for k in gain)}  # fmt: skip
    listed = " and ".join(f"{value:.2f} ({sizes})" for sizes, value in means.items())
    return (
        f"{said}In the mean it is {listed}. Few documents a step leave little to choose: the "
        "longest one decides how long the step takes. In the model context parallelism costs short "
        "documents little, so a layout with CP that takes the longest document is nearly as fast "
        "as small replicas; measure that before it is believed."
    )


def _optimum(effort: Effort) -> Section:
    check_solver()
    from _papers.hydraulis_optimum_page import optimum

    return optimum(effort)


def _notes(effort: Effort) -> Sequence[str]:
    means = []
    for name, draw in DATA.items():
        drawn = draw(np.random.default_rng(0), 1 << 16)
        means.append(
            f"{name}'s have {np.median(drawn):,.0f} tokens in the median, {drawn.mean():,.0f} in "
            f"the mean, and {np.mean(drawn > 32 * K):.2%} are above 32K"
        )
    tokens = ", ".join(
        f"{name} {context // K}K and {number // K}K"
        for name, (context, number) in CONFIGURATIONS.items()
    )
    return [
        "- The paper's models (LLaMA2 of 7B, 13B and 32B), GPUs (A800, 8 to a node) and "
        f"Megatron-LM's layouts (Table 3) are modelled; GPUs are `{effort.hardware}` "
        "(`configs/hardware`), whose shares of the peaks are assumed. Of 32B's sizes all are "
        "assumed. Gradients are fp32, as this project's are; the paper's have 16 bits.",
        f"- Longest document and tokens an iteration: {tokens}. The tokens of F3 are assumed.",
        "- The lengths of its documents are not printed. Lognormals stand for them: "
        f"{'; '.join(means)}. CommonCrawl's fits what Appendix A.1 says of the longest document "
        "of 1.6M tokens. Longer documents are truncated, as in the paper.",
        "- Strategies are proposed from 16 iterations and judged on others. The exchange of "
        "parameters runs beside the passes, unless a row says otherwise.",
        f"- {effort.steps} iterations of each seed. Brackets are the lowest and highest seed.",
        "- Here strategies are planned and simulated. The launcher runs them "
        "([how](../strategies.md)).",
        "- `scripts/evidence/reproduce_paper.py --paper hydraulis --only KEY --out FOLDER` makes "
        f"one section alone: {', '.join(f'`{key}`' for key in HYDRAULIS.makers)}.",
    ]


HYDRAULIS = Paper(
    "Hydraulis",
    "hydraulis",
    {
        "end-to-end": _end_to_end,
        "scalability": _scaled,
        "ablation": _ablation,
        "breakdown": _breakdown,
        "optimum": _optimum,
        "lengths": _other_lengths,
        "slices": _slices,
    },
    _notes,
    steps=20,
    warm_up=0,
    hardware=hydraulis.HARDWARE,
)
