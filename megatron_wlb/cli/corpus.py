"""``wlb corpus``: text files -> Megatron's ``.bin/.idx``; what documents are like."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_wlb.cli import corpus_stats
from megatron_wlb.cli.flags import add_command, flag
from megatron_wlb.cli.output import facts, progress_bar
from megatron_wlb.data.corpus import Corpus, CorpusInfo, build_corpus
from megatron_wlb.data.tokenizer import DEFAULT_VOCAB_SIZE
from megatron_wlb.reading import text_of_flag

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
    flag(build, "--exclude NAME", "folders to skip", [], nargs="+", action="extend")
    flag(build, "--force", "replace PREFIX where it exists")
    flag(build, "--reuse", "keep PREFIX where it was built from the same content and settings")
    build.add_argument("--json", action="store_true", help="print the result as one JSON object")
    build.set_defaults(run=_build)
    summary = "say how long documents are, and which hold the tokens and the work"
    corpus_stats.configure(add_command(actions, "stats", summary))


def _build(args: argparse.Namespace) -> int:
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
        Console().print(_table(info, lengths))
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
