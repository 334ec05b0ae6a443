"""SlimPack's Figures 13-16 as sections of a page, and two questions that they raise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from _sections import Paper, Row, Section, check_solver, rising, row_of

from _papers import slimpack
from _papers.one_pipeline import UNLIKE, overlap_gain, pipeline, unlike
from _papers.paper import MAX_WINDOWS, Effort, K
from _papers.slimpack import BEST_FIT, CONTEXTS, DATA, DEVICES, MODELS, Case, Result
from megatron_wlb.cost.memory import GIB

PACKINGS = (BEST_FIT, "original", "hold", "slim")
FEW_AND_MANY = (4, 16)
MERGED = ((512, True), (128, True), (64, False), (64, True))
"""Documents a global batch, and whether those longer than the context run whole."""
CHOOSING = (("7b", 64 * K, 512), ("7b", 128 * K, 512), ("7b", 128 * K, 128), ("13b", 256 * K, 512))
"""Models, contexts and documents for which replicas choose their number of units."""
CHUNKS = (
    ("original", 1), ("original", 2), ("original", 4), ("hold", 1), ("hold", 2), ("hold", 4),
    ("slim", 1), ("slim", 2), ("slim", 4),
)  # fmt: skip
"""Packings and V of the comparison beyond the paper."""
ELSEWHERE: dict[str, dict[str, Any]] = {
    "PP 8": {"pp_size": 8},
    "window 256K": {"window": 256 * K},
    "PP 8, window 256K": {"pp_size": 8, "window": 256 * K},
    **{data: {"data": data} for data in ("magi", "slimpack", "stdlib")},
}
"""Where else units of their own are tried for the backward pass."""


def _throughput(effort: Effort) -> Section:
    first = [Case(model, context) for model in MODELS for context in CONTEXTS]
    cases = [*first, *(Case("13b", context, data) for data in [*DATA][1:] for context in CONTEXTS)]
    cases += [Case("13b", 128 * K, documents=number) for number in (1024, 2048)]
    rows = []
    bars: dict[str, list[Row]] = {f"over {packing}": [] for packing in PACKINGS[:-1]}
    for case in cases:
        found = {packing: slimpack.fastest(case, packing, effort) for packing in PACKINGS}
        base, slim = found[BEST_FIT], found["slim"]
        same = slimpack.measure(base.run, "slim", case, effort)
        extra = (
            *(f"{slim.speedup(found[packing])[0]:.2f}" for packing in ("original", "hold")),
            f"{same.speedup(base)[0]:.2f}",
            f"{_layout(base, tp=False)} / {_layout(slim, tp=False)}",
            f"{base.peak_gib:.0f} / {slim.peak_gib:.0f}",
            f"{base.bubble_share:.0%} / {slim.bubble_share:.0%}",
        )
        name = case.name
        if case not in first:
            many = case.documents != slimpack.DOCUMENTS
            name += f", {case.documents} documents" if many else f", {case.data}"
        rows.append(Row(name, *slim.speedup(base), None, extra))
        if case in first:
            for packing in PACKINGS[:-1]:
                bar = Row(case.name, *slim.speedup(found[packing]))
                bars[f"over {packing}"].append(bar)
    values = [row.value for row in rows]
    most = max(values)
    rows.insert(
        0, Row("the most of all", most, most, most, slimpack.PRINTED_MOST, ("",) * 6)
    )  # fmt: skip
    by_model = [values[at : at + len(CONTEXTS)] for at in range(0, len(first), len(CONTEXTS))]
    claims = [
        ("SlimPack is faster than best-fit packing in every case", min(values) > 1),
        ("the longer the context, the larger the gain of 7B, 13B and 70B",
         all(map(rising, by_model[:-1]))),
        ("the longer the context, the larger the gain of 150B", rising(by_model[-1])),
        ("the gain is largest at 256K", most == max(values[2 : len(first) : len(CONTEXTS)])),
    ]  # fmt: skip
    return Section(
        "throughput",
        "Figure 13: throughput over best-fit packing",
        "The table shows work a second of `slim` over best-fit packing: whole documents in windows "
        "of the context, the longest first, each where it leaves the least room, the windows in "
        f"random order under Megatron's 1F1B. Documents are Common Crawl's and "
        f"{slimpack.DOCUMENTS} a global batch in the mean, where a row does not say otherwise. "
        "Each packing runs in the layout in which it is fastest, of those that fit in memory: CP "
        "1, 2 or 4, with all layers recomputed (`full`) or none; without, `slim` recomputes the "
        "micro-batches that it must. Where a cell has two values, the "
        "first is of best-fit packing, the second of `slim`. `slim` in the layout of best-fit "
        "packing gains by its balance alone; the rest is a layout that less memory allows. The "
        "copy of the paper that was at hand lacks most figures. One is compared: up to 2.8.",
        "speed-up over best-fit",
        rows,
        claims,
        f"The most is {'below' if most < slimpack.PRINTED_MOST else 'above'} the paper's, and at a "
        "long context as there. The paper names 13B at 256K; here others gain more. Its layouts, "
        "its use of partial recomputation and offloading, and its batch in each case are not "
        "printed. Its baseline recomputes in parts, too; windows here recompute all or nothing, "
        "and TP is 8: the next section shows what more freedom changes. So the gain is largest "
        "where windows must recompute and slices only in parts, and it jumps "
        "from one layout to the next. Larger batches leave best-fit packing fewer bubbles, so the "
        "gain is smaller. Context-parallel ranks share attention evenly, which flatters windows.",
        ("over `original`", "over `hold`", "`slim` in the layout of best-fit", "CP",
         "peak GiB", "bubbles"),
        1.0,
        bars,
    )  # fmt: skip


SEARCHED = (
    Case("7b", 128 * K), Case("13b", 256 * K), Case("70b", 128 * K), Case("70b", 256 * K),
    Case("150b", 256 * K),
)  # fmt: skip
"""Cases whose TP is searched, and in which windows recompute in parts."""


def _search(effort: Effort) -> Section:
    few = replace(effort, steps=max(1, effort.steps // 2))
    rows = []
    for case in SEARCHED:
        base, slim = (
            slimpack.fastest(case, packing, few, more=True) for packing in (BEST_FIT, "slim")
        )
        same = slimpack.measure(base.run, "slim", case, few)
        extra = (
            f"{same.speedup(base)[0]:.2f}",
            f"{_layout(base)} / {_layout(slim)}",
            f"{slim.merged:.2f}",
            f"{base.peak_gib:.0f} / {slim.peak_gib:.0f}",
            f"{base.bubble_share:.0%} / {slim.bubble_share:.0%}",
        )
        rows.append(Row(case.name, *slim.speedup(base), None, extra))
    values = [row.value for row in rows]
    return Section(
        "search",
        "Figure 13 with TP searched and windows that recompute in parts",
        "The table shows some cases of the section before, with TP from 2 on (from 4 for 70B and "
        "150B) up to 8, and with windows that recompute no layers of a stage, a quarter, a half, "
        "three quarters (the number is behind the layout) or all: the least that fits. The paper's "
        "baseline recomputes in parts, too. Offloading is not modelled. *Merged* counts documents "
        f"a step that several data-parallel ranks run (DP-Merge). {few.steps} steps of each seed "
        "count. N divides by all data-parallel sizes, so a global batch has other documents than "
        "in the section before.",
        "speed-up over best-fit",
        rows,
        [("SlimPack is faster than best-fit packing where both are searched", min(values) > 1)],
        f"The gains are {min(values):.2f} to {max(values):.2f}. Against the section before, the "
        "gain is smaller where half of the layers are enough (70B-128K). Elsewhere it is within 6 "
        "%: at 256K best-fit packing must recompute nearly all layers anyway, and smaller models "
        "none. Split at the context, no document outweighs a data-parallel rank in batches of "
        "this size, so none is merged; the next section has those that do.",
        ("`slim` in the layout of best-fit", "TP × CP", "merged", "peak GiB", "bubbles"),
    )


def _layout(result: Result, *, tp: bool = True) -> str:
    p, recompute = result.run.parallelism, result.run.recompute
    said = f"{p.tp_size} × {p.cp_size}" if tp else str(p.cp_size)
    if recompute.method == "uniform":
        return f"{said}, {'all' if tp else 'full'}"
    if recompute.method == "block":
        layers = result.run.shape.num_layers // p.pp_size
        return f"{said}, {recompute.num_layers} of {layers}"
    return said


def _spread(effort: Effort) -> Section:
    rows, value = [], {}
    for data in DATA:
        case = Case("13b", 128 * K, data)
        run = slimpack.layout(case, 4, effort.hardware)
        for packing in (BEST_FIT, "hold", "slim"):
            spreads = [
                slimpack.measure(run, packing, case, replace(effort, seeds=(seed,))).spread
                for seed in effort.seeds
            ]
            (_, forward), (slowest, backward) = np.mean(spreads, axis=0)
            extra = (f"{slowest:.3f}", f"{forward:.1%}", f"{backward:.1%}")
            most = [float(each[0, 0]) for each in spreads]
            rows.append(row_of(f"{data}, {packing}", most, None, extra))
            value[data, packing] = np.array([forward, backward])
    claims = [
        ("units of slices are more even than best-fit windows, forward and backward, in each data "
         "set", all((value[data, "slim"] < value[data, BEST_FIT]).all() for data in DATA)),
        ("windows are less even backward than forward",
         all(value[data, BEST_FIT][1] > value[data, BEST_FIT][0] for data in DATA)),
        ("units that serve both passes leave the backward uneven (variation above 5 %)",
         any(value[data, "slim"][1] > 0.05 for data in DATA)),
    ]  # fmt: skip
    return Section(
        "spread",
        "Figures 14-16: spread of unit times",
        "The table shows the slowest forward over the mean forward within a step, and the same of "
        "backwards, with their coefficients of variation: standard deviation over mean. The model "
        "is 13B-128K with CP 4 and one data-parallel rank. Units of `slim` serve both passes and "
        "are balanced by the sum of both. The paper prints no numbers for its violins.",
        "slowest forward over mean",
        rows,
        claims,
        "There are no numbers to compare with. Windows are uneven, most of all backward, and units "
        "of slices are even in both passes. The few that differ are the last slices of documents "
        "and the last unit of a step.",
        ("slowest backward over mean", "variation, forward", "variation, backward"),
    )


def _merge(effort: Effort) -> Section:
    rows = []
    for data in DATA:
        for documents, whole in MERGED:
            case = Case("7b", 128 * K, data, documents, whole)
            run = slimpack.layout(case, 1, effort.hardware)
            free, paid, alone = (
                slimpack.measure(run, "slim", replace(case, merges=merges, free=free), effort)
                for merges, free in ((True, True), (True, False), (False, False))
            )
            extra = (
                f"{free.speedup(alone)[0]:.3f}",
                f"{paid.merged:.2f}",
                f"{alone.peak_gib:.0f} / {paid.peak_gib:.0f}",
            )
            name = f"{data}, {documents} documents, {'whole' if whole else 'split'}"
            rows.append(Row(name, *paid.speedup(alone), None, extra))
    prices = [float(row.extra[0]) / row.value - 1 for row in rows]
    longest = ", ".join(f"{slimpack.lengths_of(data).longest(0) / K:,.0f}K" for data in DATA)
    return Section(
        "merge",
        "Section 4: documents that several data-parallel ranks run together (DP-Merge)",
        "The table shows work a second of `slim` with merging over `slim` without, for 7B-128K "
        "with CP 1 and DP 4, whatever memory that takes. A document is merged where it outweighs "
        "what a data-parallel rank does in the mean, and the simulated step is shorter by it. "
        "Documents longer than the context are split at it, or run whole: up to "
        f"{longest} tokens in the three data sets.",
        "speed-up over `slim` without merging",
        rows,
        [("a document that outweighs a data-parallel rank is faster on several",
          min(row.value for row in rows) >= 1)],
        f"What the ranks exchange costs up to {max(prices):.1%} of the step. Keys and values of a "
        "merged document go over more ranks, in other nodes. Where global batches are large, few "
        "documents outweigh a rank.",
        ("if the exchange took no time", "merged documents a step", "peak GiB, without / with"),
        1.0,
    )  # fmt: skip


def _backward(effort: Effort) -> Section:
    rows, own, due = [], [], []
    for number in FEW_AND_MANY:
        found = unlike(number, effort)
        for name in UNLIKE:
            values = found.speedup[name]
            extra = (f"{statistics.fmean(values) - 1:+.1%}", f"{found.num_units:.0f}")
            rows.append(row_of(f"N = {number}, {name}", values, None, extra))
        mean = {name: statistics.fmean(values) for name, values in found.speedup.items()}
        own.append(mean["own cuts"])
        due.append(mean["own cuts"] - mean["cuts of the sum"])
    for name, changes in ELSEWHERE.items():
        for number in FEW_AND_MANY:
            found = unlike(number, effort, **changes)
            values = found.speedup["own cuts"]
            extra = (f"{statistics.fmean(values) - 1:+.1%}", f"{found.num_units:.0f}")
            rows.append(row_of(f"N = {number}, {name}, own cuts", values, None, extra))
            own.append(statistics.fmean(values))
    return Section(
        "backward",
        "Section 4.1.2: units of their own for the backward pass",
        "Attention's backward takes 2.5 times its forward, all else's twice. So units that are "
        "even forward are less even backward, and the paper cuts the backward anew. The project's "
        "units serve both passes. The table shows what other units gain over them, at best, with "
        "as many forward units, PP=4 and `reference` lengths. *Own cuts*: each pass is cut at "
        "equal cost of that pass, also in a longer pipeline, a longer window and on other lengths. "
        "*Cuts of the sum*: the same at equal cost of both passes, so the "
        "difference between these two is what unlike costs are worth. *Unions*: each backward unit "
        "is of 2 or 4 forward slices. *No bubbles*: no units can be faster. Keys and values are "
        "kept as they must be: a document's backward begins when all its slices have run forward.",
        "speed-up over `slim`",
        rows,
        [("a backward pass with units of its own gains 1 % or more", max(own) >= 0.01 + 1)],
        f"Own cuts gain {min(own) - 1:.1%} to {max(own) - 1:.1%}, and unlike costs alone "
        f"{min(due):.1%} to {max(due):.1%}. They would need the forward to be cut at both sets of "
        "cuts, or computed again, so the project keeps units that serve both passes. Unions lose: "
        "fewer backward units fill and drain the pipeline for longer. What is left to gain is in "
        "the last row, and it is the filling and draining.",
        ("gain", "units of `slim`"),
    )


def _hold(effort: Effort) -> Section:
    rows = []
    bars: dict[str, list[Row]] = {}
    over_chunks, net_chunks = [], []
    for number in FEW_AND_MANY:
        stock, base = pipeline("original", number, 1, effort, ["per-sequence", "adaptive"])
        net = {
            vpp_size: pipeline("original", number, vpp_size, effort, overlapped=True)[0]
            for name, vpp_size in CHUNKS
            if name == "original"
        }
        own = bars[f"N = {number}"] = []
        for name, vpp_size in CHUNKS:
            (found,) = pipeline(name, number, vpp_size, effort)
            peak = f"{found.peak_bytes / GIB:.0f}{' (too much)' if found.out_of_memory else ''}"
            extra = (
                f"{found.speedup(stock):.2f}",
                f"{found.speedup(net[1]):.2f}",
                f"{found.bubble_share:.0%}",
                peak,
            )
            speeds = found.speedup(base), *found.speedup_by_seed(base)
            own.append(Row(f"{name}, V = {vpp_size}", *speeds, None, extra))
        over_chunks.append(own[-1].value / max(row.value for row in own if "original" in row.name))
        net_chunks.append(found.mfu / max(one.mfu for one in net.values()))
        bound = 1 / (1 - base.bubble_share)
        extra = (
            f"{bound * base.speedup(stock):.2f}", f"{bound * base.speedup(net[1]):.2f}", "0%", ""
        )  # fmt: skip
        own.append(Row("no bubbles", bound, bound, bound, None, extra))
        rows += [replace(row, name=f"N = {number}, {row.name}") for row in own]
    return Section(
        "hold",
        "Beyond the paper: slices beside whole documents on an interleaved schedule",
        "The table shows work a second over `original` with one chunk a rank, for 7B at a window "
        "of 131,072 tokens, `reference` lengths, TP 8 × CP 2 × PP 4 as in WLB-LLM's Table 1. V is "
        f"the number of chunks a rank. `hold` has an S_max of {MAX_WINDOWS:g} windows. All "
        "packings have the `adaptive` sharding, `original` too: the speed-up is of the packing "
        "alone. The next column is over `original` with the per-sequence sharding that Megatron "
        "has. *Net* is over `original` with one chunk, `adaptive` sharding and "
        "`--tp-comm-overlap`, which stock Megatron has and lengths that vary turn off. The last "
        "row of each N is `original` without the time that its ranks wait.",
        "speed-up over `original`",
        rows,
        [],
        "The paper has no such figure. Slices delay no document, and in one chunk a rank hold a "
        "fraction of the memory. With few micro-batches they gain most, as the pipeline fills with "
        "units of a fraction of a window. Interleaving helps `original` and `hold` more than it "
        "helps slices. With V = 4 each, "
        f"`slim` does {min(over_chunks):.2f} to {max(over_chunks):.2f} times the work a second of "
        f"`original`, and net of the overlap {min(net_chunks):.2f} to {max(net_chunks):.2f} times. "
        "In the layout that is best for `original` ([slices.md](../slices.md)) TP is 2, and the "
        f"overlap is worth {overlap_gain(effort) - 1:.1%}.",
        ("over `original` as Megatron shards it", "net", "bubbles", "peak GiB"),
        1.0,
        bars,
    )


def _units(effort: Effort) -> Section:
    """What a number of units of each replica's own would gain."""
    rows, most = list[Row](), 0.0
    for model, context, documents in CHOOSING:
        case = slimpack.Case(model, context, documents=documents)
        found = slimpack.own_units(slimpack.layout(case, 1, effort.hardware), case, effort)
        most = max(most, *found.over_common)
        extra = (
            f"{statistics.fmean(found.over_settled):.4f}",
            f"{found.unlike:.0%}",
            f"{found.settled:.0f}",
        )
        rows.append(row_of(f"{case.name}, {documents} documents", found.over_common, None, extra))
    return Section(
        "units",
        "Section 4.1.1: a number of units for each replica",
        "In the paper each replica has a number of MicroPacks of its own. The project has one for "
        "all, which it chooses by simulation on the replica with most work, and again after 64 "
        "steps. The table shows what own numbers would gain: in each step each replica has its "
        "best, over the best one for all, with CP 1 and no document merged. *Over ours* is over "
        "the number that the package has.",
        "speed-up over one number for all",
        rows,
        [("a number of its own for each replica gains 1 % or more", most >= 1.01)],
        f"Own numbers gain {most - 1:.2%} at most. Replicas have like work after dealing out, so "
        "their best numbers are neighbours, and near the best the time hardly changes. What the "
        "package loses besides is its rule that more units must save 1 % of the step, because "
        "their kernels are smaller. One number for all keeps the plan small and lets replicas that "
        "share experts run alike, so the project keeps it.",
        ("over ours", "steps with unlike numbers", "units of ours"),
    )  # fmt: skip


def _cuts(effort: Effort) -> Section:
    check_solver()
    from _papers.slimpack_optimum_page import cuts

    return cuts(effort)


def _notes(effort: Effort) -> Sequence[str]:
    sizes = ", ".join(f"{model.upper()} on {number}" for model, number in DEVICES.items())
    shapes = []
    for data in DATA:
        stored = slimpack.lengths_of(data).stored
        assert stored is not None
        shapes.append(
            f"{data} has {np.mean(stored < 4096):.0%} of documents under 4K, "
            f"{np.mean(stored > 128 * K):.1%} above 128K and {stored.mean() / K:.1f}K in the mean"
        )
    return [
        f"- The models are Table 3's, on as many devices as in §6.2: {sizes}. Assumed are TP 8 "
        "where none is searched, PP 4 for 7B and 13B and 8 for the others, 128 channels a head "
        "and a vocabulary of "
        f"32,000. GPUs are `{effort.hardware}` "
        "(`configs/hardware`), fitted to published runs. TP and CP collectives overlap "
        "as this project's runtime lets them: in forward no TP collective is hidden.",
        f"- The paper's documents are not public. Synthetic lengths replace them. "
        f"{'; '.join(shapes)}. Common Crawl's are the shares that the paper prints for long-tailed "
        "corpora (`slimpack` in data/lengths.py). The others are ours: a lognormal of median 4K "
        "and σ 1.5, and a mixture of 80 % lognormal around 1K and 20 % around 16K. The paper says "
        "only that GitHub's are longer and less spread, and Wikipedia's in two clusters. Documents "
        "longer than the context are split at it.",
        f"- {effort.steps} steps of each seed count, after {effort.warm_up} that fill queues. "
        "Brackets are the lowest and highest seed.",
        "- `scripts/evidence/reproduce_paper.py --paper slimpack --only KEY --out FOLDER` makes "
        f"one section alone: {', '.join(f'`{key}`' for key in SLIMPACK.makers)}.",
    ]


SLIMPACK = Paper(
    "SlimPack",
    "slimpack",
    {
        "throughput": _throughput,
        "search": _search,
        "merge": _merge,
        "cuts": _cuts,
        "units": _units,
        "spread": _spread,
        "backward": _backward,
        "hold": _hold,
    },
    _notes,
    steps=20,
    warm_up=5,
)
