"""WLB-LLM's Figures 7 and 10 as sections of a page."""

from __future__ import annotations

from _sections import Section, row_of

from _papers.kernels import FEW_QUERIES, KEYS, LENGTHS
from _papers.kernels import figure_7 as operations
from _papers.kernels import figure_10 as attention
from _papers.paper import Effort, K


def figure_7(effort: Effort) -> Section:
    """What operations take by the length of a document."""
    found = operations(effort)
    rows = []
    for length, own in found.items():
        parts = (own.linear, own.matrix, own.collectives, own.elementwise, own.hidden)
        extra = (*(f"{value:.2f}" for value in parts), f"{own.attention / own.linear:.2f}")
        rows.append(row_of(f"{length // K}K", [own.attention], None, extra))
    # Attention is a · d², all else b · d: they are equal at d = b / a.
    longest = found[LENGTHS[-1]]
    even = LENGTHS[-1] * longest.linear / longest.attention
    hidden = LENGTHS[-1] * (longest.linear - longest.collectives + longest.hidden)
    twice = found[2 * LENGTHS[-2]].attention / found[LENGTHS[-2]].attention
    return Section(
        "figure-7",
        "Figure 7: what operations take by document length",
        "The table shows the forward of one layer of 7B for one document, over attention at 4,096 "
        "tokens, which is 1: attention, and the operations that grow with tokens. The paper "
        "measured it on 16 GPUs, in a layout that it does not say; TP 8 and PP 2 are assumed. "
        "*Collectives hidden* are tensor-parallel ones that overlap (§6). The figure's numbers are "
        "in its picture alone, so nothing is compared.",
        "attention",
        rows,
        [],
        f"In the model both laws are assumptions, not findings: from 64K to 128K attention takes "
        f"{twice:.2f} times as long, all else twice. What follows from the rates is where they "
        f"meet: attention is half of a layer at {even / K:.0f}K tokens, with collectives hidden at "
        f"{hidden / longest.attention / K:.0f}K. So a window of 128K with one document has "
        f"{(longest.attention + longest.linear) / longest.linear:.1f} times the work of one with "
        "many short ones. `wlb profile` measures both laws on a device.",
        ("all linear", "matrix products", "collectives", "element-wise", "collectives hidden",
         "attention over linear"),
        0.0,
    )  # fmt: skip


def figure_10(effort: Effort) -> Section:
    """What attention takes and reaches by the number of queries."""
    found = attention(effort)
    rows = [
        row_of(f"{queries} queries", [own.latency], None, (f"{own.tflops:.0f}",))
        for queries, own in found.items()
    ]  # fmt: skip
    short = [found[queries].latency for queries in (16, 32, 64, 128)]
    claims = [
        ("from 16 to 128 queries the kernel takes as long", max(short) < 1.02 * min(short)),
        ("from 128 to 256 queries it takes much longer", found[256].latency > 1.5),
        ("from 128 to 256 queries it reaches far more TFLOPs (a tenth or more)",
         found[256].tflops > 1.1 * found[128].tflops),
    ]  # fmt: skip
    return Section(
        "figure-10",
        "Figure 10: the attention kernel by queries",
        "The table shows the forward of attention of 7B at TP 8, over that of 128 queries, and "
        f"what it reaches, for queries that attend to {KEYS // K}K keys. The paper's numbers, and "
        "its keys, are in the picture alone; its text says what the conclusions above say.",
        "latency over that of 128 queries",
        rows,
        claims,
        "The model has whole tiles of 128 queries at one rate: its first two conclusions follow "
        f"from that. It does not know that from {FEW_QUERIES} queries on blocks share loads of "
        "keys (TMA multicast), so it reaches as much with 128. Figure 15 shows what that would "
        "change. With `--hardware` and a table of `wlb profile` this section shows a measured "
        "kernel.",
        ("TFLOPs",),
        0.0,
    )
