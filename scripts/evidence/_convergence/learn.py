"""Trains one packing with one seed, and looks at held-out documents as it goes.

Run by ``scripts/evidence/convergence.py`` under torchrun; flags it does not know are the trainer's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_wlb.files import write_text
from megatron_wlb.runtime.rank_main import rank_main
from megatron_wlb.settings.command_line import Parser, parse

if TYPE_CHECKING:
    from megatron_wlb.plan import Document, StepPlan
    from megatron_wlb.runtime.trainer.loop import Trainer

BUCKETS = (256, 1024)
"""Tokens up to which held-out documents are short, and then middling."""
SAMPLE_SEED = 20
"""Of the held-out documents: the same ones for all runs."""


@dataclass(frozen=True)
class Look:
    """What held-out documents say of the weights at one moment."""

    tokens: int
    """Trained so far."""
    seconds: float
    """Spent on steps so far, and none on looking."""
    steps: int
    losses: list[float]
    """Nats a token, of short, middling and long documents, each whole (at most a window)."""
    loss: float
    """Over the tokens of all of them."""


def held_out(trainer: Trainer, documents_each: int) -> list[StepPlan]:
    """A plan of held-out documents for each of the three lengths."""
    from megatron_wlb.plan import Document, MicroBatchPlan, Span, StepPlan

    window = trainer.config.data.seq_length
    ((first, stop),) = trainer.corpora.ranges["valid"]
    lengths = np.minimum(trainer.corpora.corpora[0].lengths[first:stop], window)
    random = np.random.default_rng(SAMPLE_SEED)
    plans = []
    for least, most in zip((2, *(b + 1 for b in BUCKETS)), (*BUCKETS, window), strict=True):
        (inside,) = np.nonzero((lengths >= least) & (lengths <= most))
        chosen = random.permutation(inside)[:documents_each]
        batches: list[list[Document]] = [[]]
        for arrival, number in enumerate(chosen.tolist()):
            stored, length = first + number, int(lengths[number])
            ends = length == trainer.corpora.corpora[0].lengths[stored]
            if sum(d.length for d in batches[-1]) + length > window:
                batches.append([])
            batches[-1].append(Document(0, stored, 0, length, bool(ends), 0, arrival, 0))
        rows = tuple(
            MicroBatchPlan(
                number, tuple(Span(d, 0, d.length) for d in own), sum(d.length for d in own), 0.0
            )
            for number, own in enumerate(batches)
        )
        plans.append(StepPlan(0, "held-out", (rows,), 0, 0))
    return plans


def look(
    trainer: Trainer, plans: Sequence[StepPlan], tokens: int, seconds: float, steps: int
) -> Look:
    import torch

    for chunk in trainer.model.chunks:
        chunk.eval()
    with torch.no_grad():
        losses = [trainer.runner.run(plan, forward_only=True) for plan in plans]
    targets = sum(loss.num_targets for loss in losses)
    mean = sum(loss.loss_sum for loss in losses) / targets
    return Look(tokens, seconds, steps, [loss.mean for loss in losses], mean)


def learn(own: Any, flags: list[str]) -> None:
    """Trains until so many tokens, or seconds, and writes what each look saw."""
    config = parse(flags)
    from megatron_wlb.runtime.trainer import distributed

    device = distributed.choose_device(config.wlb.wlb_device)
    distributed.initialize(config, device)
    import torch

    from megatron_wlb.runtime.trainer.loop import Trainer

    trainer = Trainer(config, device)
    plans = held_out(trainer, own.documents)
    looks, losses = [look(trainer, plans, 0, 0.0, 0)], []
    trained, seconds, steps = 0, 0.0, 0
    while True:
        begin_s = time.monotonic()
        plan = trainer.planner.next_plan()
        if plan is None:
            break
        losses.append(trainer.train_step(plan)[0].mean)
        trained, steps = trained + plan.num_tokens, steps + 1
        # The first rank's clock counts for all.
        taken = torch.tensor([time.monotonic() - begin_s], dtype=torch.float64)
        torch.distributed.broadcast(taken, src=0)
        seconds += float(taken)
        share = max(trained / own.tokens, seconds / own.seconds if own.seconds else 0.0)
        if share >= len(looks) / own.looks:
            looks.append(look(trainer, plans, trained, seconds, steps))
            if torch.distributed.get_rank() == 0:
                print(f"{trained} tokens, held-out loss {looks[-1].loss:.4f}", flush=True)
        if share >= 1:
            break
    if torch.distributed.get_rank() == 0:
        content = {"looks": [asdict(one) for one in looks], "train_losses": losses, "flags": flags}
        write_text(own.result, json.dumps(content) + "\n")
    distributed.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="learn.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--tokens", type=float, required=True, help="to train on")
    parser.add_argument("--seconds", type=float, default=0.0, help="to train at most; 0: any")
    parser.add_argument("--looks", type=int, default=8, help="at held-out documents")
    parser.add_argument("--documents", type=int, default=60, help="of each length, held out")
    return rank_main(lambda: learn(*parser.parse_known_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
