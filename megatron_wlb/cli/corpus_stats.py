"""``wlb corpus stats``: WLB-LLM's Figure 3 of the user's documents."""

from __future__ import annotations

import argparse
import json

from rich.table import Table

from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.inputs import SOURCES, add_source, source
from megatron_wlb.cli.output import check_picture, console, facts, say, table_of
from megatron_wlb.data.length_statistics import PERCENTILES, LengthStatistics
from megatron_wlb.planning.packing.reference import REFERENCE_WINDOW
from megatron_wlb.reading import whole_number

BAR = 24
"""Characters of the longest bar."""

_EPILOG = f"""\
{SOURCES}
The window marks which documents are long; documents and tokens are counted as they are stored.
'attention' is a document's share of all causal attention work: the square of its length, or where
it is longer than the window, of the pieces that training cuts it into.

examples:
  wlb corpus stats corpora/books --window 32768 --plot lengths.png
  wlb corpus stats --distribution slimpack --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    add_source(parser)
    flag(parser, "--windows N", "of --distribution: so many windows' worth is drawn", 4096)
    flag(parser, "--plot FILE", "picture, PNG")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_picture("--plot", args.plot)
    window = REFERENCE_WINDOW if args.window is None else args.window
    documents = source(args, window)
    whole_number("--windows", args.windows, 1)
    statistics = LengthStatistics.of(
        documents.lengths(args.windows, window=window, seed=args.seed), window
    )
    if args.plot:
        from megatron_wlb.study.plot import plot_lengths

        plot_lengths(statistics, window, args.plot)
    if args.json:
        print(json.dumps({"source": documents.title} | statistics.as_dict(window), indent=1))
        return 0
    out = console()
    out.print(_summary(statistics, documents.title))
    out.print(_long(statistics, window))
    out.print(_histogram(statistics, window))
    say(out, _advice(statistics, window))
    if args.plot:
        say(out, f"picture: {args.plot}")
    return 0


def _summary(statistics: LengthStatistics, title: str) -> Table:
    rows = {
        "documents": statistics.documents,
        "documents without tokens": statistics.num_empty,
        "tokens": statistics.tokens,
        "length, mean": statistics.tokens / statistics.documents,
        **{f"length, p{p:g}": statistics.percentile(p) for p in PERCENTILES},
        "length, longest": statistics.longest,
    }
    return facts(title, rows)


def _long(statistics: LengthStatistics, window: int) -> Table:
    headers = "at least", "tokens", "documents", "share", "of tokens", "of attention"
    table = table_of("long documents and what they hold", headers)
    for fraction, part in statistics.at_least(window):
        table.add_row(
            f"{fraction:g} window",
            f"{int(fraction * window):,}",
            f"{part.documents:,}",
            f"{part.documents_share:.2%}",
            f"{part.tokens_share:.2%}",
            f"{part.attention_share:.2%}",
        )
    return table


def _histogram(statistics: LengthStatistics, window: int) -> Table:
    headers = (
        "tokens, from", "to below", "documents", "", "of tokens", "tokens up to here",
        "of attention",
    )  # fmt: skip
    title = f"lengths; attention of pieces of at most {window:,} tokens"
    table = table_of(title, headers, [""])
    bins = statistics.histogram()
    most = max(part.documents for _, _, part in bins)
    cumulative = 0.0
    for start, stop, part in bins:
        cumulative += part.tokens_share
        table.add_row(
            f"{start:,}",
            f"{stop:,}",
            f"{part.documents:,}",
            "█" * round(BAR * part.documents / most),
            f"{part.tokens_share:.1%}",
            f"{cumulative:.1%}",
            f"{part.attention_share:.1%}",
        )
    return table


def _advice(statistics: LengthStatistics, window: int) -> str:
    half, over = statistics.part(window / 2), statistics.part(window + 1)
    said = (
        f"Documents of half a window and longer are {half.documents_share:.2%} of the documents, "
        f"{half.tokens_share:.1%} of the tokens and {half.attention_share:.1%} of the attention: "
    )
    if half.attention_share < 0.05:
        said += "too little to unbalance micro-batches of this window much"
    else:
        said += "whichever micro-batch gets one is the slowest"
    if over.documents:
        said += f"; {over.documents:,} are longer than the window and would be split in training"
    return f"{said} ('wlb pack' says by how much, and which packing helps)."
