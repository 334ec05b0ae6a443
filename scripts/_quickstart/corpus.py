"""The quickstart's corpus: the interpreter's own standard library, a document a definition."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from rich.console import Console

from megatron_wlb.data.build_corpus import build_corpus

EXCLUDED = ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3")


def corpus(folder: Path, console: Console) -> Path:
    """Builds the corpus, or keeps the one of an earlier start; returns its prefix."""
    console.print("corpus: reading the interpreter's standard library")
    info = build_corpus(
        [sysconfig.get_path("stdlib")],
        folder / f"stdlib-{sysconfig.get_python_version()}",
        python_definitions=True,
        exclude=EXCLUDED,
        force=True,
        reuse=True,
    )
    console.print(
        f"corpus: {info.num_documents:,} documents (functions and classes), "
        f"{info.num_tokens:,} tokens (bytes), in {info.prefix}.bin",
        soft_wrap=True,
    )
    return Path(info.prefix)
