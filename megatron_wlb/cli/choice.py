"""What commands that recommend have in common: their limit, how many steps they try, their cost."""

from __future__ import annotations

import argparse

from megatron_wlb.cli.flags import flag
from megatron_wlb.cli.output import remark
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import CorpusError
from megatron_wlb.planning.packing.base import MOST_STEPS
from megatron_wlb.reading import whole_number
from megatron_wlb.study.advice import MAX_DELAY_STEPS

MOST_DOCUMENTS = 20_000
"""The most documents that a command packs of very few; a distribution has no end of them."""
MOST_REPEATS = 50
"""How often a packing sees each stored document at most: more say nothing new."""


def add_max_delay(group: argparse._ArgumentGroup) -> None:
    about = "most that a token may be delayed in the mean by what is recommended, as in the paper"
    flag(group, "--max-delay STEPS", about, MAX_DELAY_STEPS)


def num_steps(
    args: argparse.Namespace,
    documents: LengthSource,
    *,
    window: int,
    step_tokens: int,
    num_cases: int,
    default: tuple[int, int],
    times: int = 1,
) -> tuple[int, int]:
    """Steps that fill queues and steps that count, of each of ``num_cases``.

    They are what ``--steps`` says, else ``default``, but fewer where a few short documents would
    only be packed again and again. Notes say so, and what becomes of the documents of ``times`` so
    many steps. Raises :class:`CorpusError` where not one step is left.
    """
    warm_up, steps = default
    if args.steps is not None:
        steps = whole_number("--steps", args.steps, 1, MOST_STEPS)
    elif documents.stored is not None:
        pieces = int((-(-documents.stored // window)).sum())
        tokens = max(1, int(documents.stored.sum()))
        documents_a_step = -(-step_tokens * pieces // tokens)
        fitting = (MOST_DOCUMENTS // num_cases + MOST_REPEATS * pieces) // documents_a_step
        if fitting < warm_up + steps:
            few = (
                f"a step of {step_tokens:,} tokens takes {documents_a_step:,} documents of "
                f"{tokens / pieces:.4g} tokens, and there are {documents.num_documents:,.0f}"
            )
            if fitting < 1:
                raise CorpusError(
                    f"{documents.title}: {few}; lower --window, give more documents, or insist "
                    "with --steps"
                )
            warm_up = min(warm_up, fitting // 2)
            remark(f"{few}: {fitting - warm_up} steps instead of {steps} (--steps)")
            steps = fitting - warm_up
    tokens = times * (warm_up + steps) * step_tokens
    for text in documents.remarks(tokens, window=window, long_documents=args.long_documents):
        remark(text)
    return warm_up, steps
