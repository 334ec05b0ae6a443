"""Corpora of texts for runs: documents of words, with heavy-tailed lengths, the same everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megatron_wlb.data.build_corpus import build_corpus

WORDS = ["ab", "cde", "fgh ", "the ", "sun ", "x. "]


def write_texts(
    prefix: Path,
    number: int = 300,
    mean: float = 4.3,
    spread: float = 1.2,
    *,
    least: int = 5,
    most: int = 1500,
    seed: int = 11,
) -> Path:
    """Writes a corpus whose documents' lengths, in bytes, have a lognormal distribution."""
    generator = np.random.RandomState(seed)
    lengths = np.clip(generator.lognormal(mean, spread, number), least, most).astype(int)
    lines = ("".join(generator.choice(WORDS, length))[:length] for length in lengths)
    file = prefix.with_suffix(".jsonl")
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    build_corpus([file], prefix)
    return prefix
