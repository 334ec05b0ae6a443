"""``wlb corpus``: text files -> Megatron's ``.bin/.idx``; WLB-LLM's Figure 3 of documents."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict

import numpy as np
from rich.table import Table

from megatron_wlb.cli.flags import add_command, flag
from megatron_wlb.cli.inputs import SOURCES, add_source, source
from megatron_wlb.cli.model import USUAL, given
from megatron_wlb.cli.output import check_picture, console, facts, progress_bar, say, table_of
from megatron_wlb.data.build_corpus import build_corpus
from megatron_wlb.data.corpus import Corpus, CorpusInfo
from megatron_wlb.data.length_statistics import PERCENTILES, LengthStatistics
from megatron_wlb.data.tokenizer import DEFAULT_VOCAB_SIZE
from megatron_wlb.reading import MOST_DEVICES, text_of_flag, whole_number
from megatron_wlb.settings.config import from_flat

_EPILOG = f"""\
what a document is:
  a .jsonl file is one document a line, also as .jsonl.gz, .jsonl.bz2 or .jsonl.xz; every other
  text file is one document; folders are walked recursively, without hidden files, __pycache__
  and binary files

tokenizers:
  bytes   a token a byte, 256 ids, EOD 0 (a NUL in a text becomes a space)
  bpe     byte-level BPE trained on this text, saved as PREFIX.tokenizer.json
          ({DEFAULT_VOCAB_SIZE} ids unless --vocab-size says otherwise)
  FILE    a tokenizer.json of the tokenizers library

examples:
  wlb corpus build ~/books notes.jsonl --out corpora/books --tokenizer bpe
  wlb corpus build /usr/lib/python3.11 --python-definitions --exclude test --out corpora/python
"""

_STATS_EPILOG = f"""\
{SOURCES}
The window marks which documents are long; documents and tokens are counted as they are stored.
'attention' is a document's share of all causal attention work: the square of its length, or where
it is longer than the window, of the pieces that training cuts it into.

examples:
  wlb corpus stats corpora/books --window 32768 --plot lengths.png
  wlb corpus stats --distribution slimpack --json
"""
BAR = 24
"""Characters of the longest bar."""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    summary = "write the documents of files and folders as PREFIX.bin, PREFIX.idx and PREFIX.json"
    build = add_command(actions, "build", summary, epilog=_EPILOG)
    build.add_argument("paths", nargs="+", type=text_of_flag, metavar="PATH", help="file or folder")
    flag(build, "--out PREFIX", "corpus to write", required=True)
    flag(build, "--tokenizer bytes|bpe|FILE", "what makes tokens", "bytes")
    flag(build, "--vocab-size N", "token ids (bpe only)")
    flag(build, "--json-key KEY", "where JSONL has the text", "text")
    about = "in .py files, each top-level function or class is a document"
    flag(build, "--python-definitions", about)
    flag(build, "--workers N", "threads that make tokens (default: all processors; not for bytes)")
    flag(build, "--exclude NAME", "folders to skip", [], nargs="+", action="extend")
    flag(build, "--force", "replace PREFIX where it exists, and remove its masks")
    flag(build, "--reuse", "keep PREFIX where it was built from the same content and settings")
    build.add_argument("--json", action="store_true", help="print the result as one JSON object")
    build.set_defaults(run=_build)
    summary = "say how long documents are, and which hold the tokens and the work"
    stats = add_command(actions, "stats", summary, epilog=_STATS_EPILOG)
    add_source(stats)
    flag(stats, "--windows N", "of --distribution: so many windows' worth is drawn", 4096)
    flag(stats, "--plot FILE", "picture, PNG")
    stats.add_argument("--json", action="store_true", help="print one JSON object instead")
    stats.set_defaults(run=_stats)


def _build(args: argparse.Namespace) -> int:
    if args.workers is not None:  # as the library reads it when it begins
        os.environ["RAYON_NUM_THREADS"] = str(
            whole_number("--workers", args.workers, 1, MOST_DEVICES)
        )
    with progress_bar("building", of_bytes=True) as progress:
        info = build_corpus(
            args.paths,
            args.out,
            tokenizer=args.tokenizer,
            vocab_size=args.vocab_size,
            json_key=args.json_key,
            python_definitions=args.python_definitions,
            exclude=args.exclude,
            force=args.force,
            reuse=args.reuse,
            progress=lambda what, done, total: progress(done, total, what),
        )
    lengths = _summary(info)
    if args.json:
        print(json.dumps(asdict(info) | {"length_tokens": lengths}))
    else:
        out = console()
        out.print(_table(info, lengths))
        known = f"--tokenizer-type NullTokenizer --vocab-size {info.vocab_size}"
        say(out, f"to train: --data-path {info.prefix} {known}")
        if info.tokenizer == "bpe":
            own = f"{info.prefix}.tokenizer.json"
            say(out, f"to give {own} to Megatron instead: docs/data-and-checkpoints.md")
    return 0


def _summary(info: CorpusInfo) -> dict[str, float]:
    """What the documents' lengths in tokens are, EOD included."""
    lengths = Corpus.open(info.prefix).lengths
    percentiles = {f"p{p}": float(np.percentile(lengths, p)) for p in (50, 90, 99)}
    return {"mean": float(lengths.mean()), **percentiles, "max": float(lengths.max())}


def _table(info: CorpusInfo, lengths: dict[str, float]) -> Table:
    rows = {
        "documents": info.num_documents,
        "tokens": info.num_tokens,
        "vocabulary": info.vocab_size,
        "EOD token": info.eod,
        **{f"length in tokens, {name}": value for name, value in lengths.items()},
        "documents with invalid UTF-8": info.num_utf8_errors,
        "files": info.num_files,
        "skipped: documents without text": info.num_empty,
        "skipped: binary files": info.num_binary_files,
        "skipped: Python files that do not parse": info.num_unparsable_files,
    }
    return facts(f"corpus {info.prefix}", rows)


def _stats(args: argparse.Namespace) -> int:
    check_picture("--plot", args.plot)
    config = from_flat(USUAL | given(args))
    window, seed = config.data.seq_length, config.training.seed
    documents = source(args)
    whole_number("--windows", args.windows, 1)
    statistics = LengthStatistics.of(
        documents.lengths(args.windows, window=window, seed=seed), window
    )
    if args.plot:
        from megatron_wlb.study.plot import plot_lengths

        plot_lengths(statistics, window, args.plot)
    if args.json:
        print(json.dumps({"source": documents.title} | statistics.as_dict(window), indent=1))
        return 0
    out = console()
    out.print(_lengths(statistics, documents.title))
    out.print(_long(statistics, window))
    out.print(_histogram(statistics, window))
    say(out, _advice(statistics, window))
    if args.plot:
        say(out, f"picture: {args.plot}")
    return 0


def _lengths(statistics: LengthStatistics, title: str) -> Table:
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
