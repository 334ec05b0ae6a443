#!/usr/bin/env python3
"""What samples that begin alike gain where they share it, against each one whole.

    scripts/evidence/shared_prefixes.py                                      # simulated: minutes
    scripts/evidence/shared_prefixes.py --page docs/results/samples.md       # and its table
    scripts/evidence/shared_prefixes.py --rollouts FILE.json…                # of rollouts of yours
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 scripts/evidence/shared_prefixes.py --train

Simulated are 128 samples of groups (answers lognormal, sigma 0.8, at most four times the mean) and
trees of agents, on H100s, over ``plan_batch`` with whole samples, forward and backward of one
replica; behind an arrow with trees over micro-batches (``slices=True``). Files of ``--rollouts``
are lists of objects with messages, ``traj`` or ``messages``. The table has each as one sample, and
with a sample for each turn of the assistant; four bytes of JSON count as a token. With ``--train``
a small model trains steps of 4 groups on CPUs at PP 2, whole and shared in turns; more flags are
the trainer's, such as ``--wlb-packing slim`` for slices and trees.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np
from _common import parser_of, put

import megatron_wlb as wlb
from megatron_wlb.errors import ConfigError, run_program
from megatron_wlb.settings.config import DEFAULT_MACHINE

SP: dict[str, Any] = {"sequence_parallel": True}
EXPERTS: dict[str, Any] = {"tp_size": 4, "ep_size": 4, "etp_size": 1, **SP}
LAYOUTS = {
    "7B, PP 1": ("7b", wlb.Parallelism(tp_size=8, **SP)),
    "7B, PP 4": ("7b", wlb.Parallelism(tp_size=4, pp_size=4, **SP)),
    "7B, PP 4 × 4": ("7b", wlb.Parallelism(tp_size=4, pp_size=4, vpp_size=4, **SP)),
    "30B-A3B, PP 1": ("qwen3-30b-a3b", wlb.Parallelism(**EXPERTS)),
    "30B-A3B, PP 4": ("qwen3-30b-a3b", wlb.Parallelism(pp_size=4, **EXPERTS)),
    "30B-A3B, PP 4, EP 4 over DP": (
        "qwen3-30b-a3b",
        wlb.Parallelism(pp_size=4, dp_size=4, ep_size=4, etp_size=1),
    ),
    "Qwen3.5, PP 4": (
        "qwen3.5-35b-a3b",
        wlb.Parallelism(pp_size=4, tp_size=2, ep_size=2, etp_size=1, **SP),
    ),
}
NUM_SAMPLES, SIGMA, MOST = 128, 0.8, 4
K = 1024

Branches = list[tuple[int, int] | None]
Samples = tuple[list[int], Branches | list[Any]]
"""Lengths, and what each shares with an earlier one, or the token ids of all."""


def groups(size: int, prompt: int, mean: int) -> Samples:
    """Answers to prompts."""
    random = np.random.default_rng(size + prompt + mean)
    drawn = random.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, NUM_SAMPLES)
    lengths = [prompt + int(min(MOST * mean, max(16, answer))) for answer in drawn]
    branches: Branches = [(n - n % size, prompt) if n % size else None for n in range(NUM_SAMPLES)]
    return lengths, branches


def trees(number: int, depth: int, branch: int, rows: int, spread: float = 0.0) -> Samples:
    """Trees of nodes of about so many tokens; each leaf is a sample."""
    random = np.random.default_rng(7)
    lengths: list[int] = []
    branches: Branches = []
    for _ in range(number):
        nodes: dict[tuple[int, ...], int] = {}
        before: tuple[int, ...] = ()
        for leaf in product(range(branch), repeat=depth - 1):
            path = [leaf[:level] for level in range(depth)]
            for node in path:
                if node not in nodes:
                    nodes[node] = int(rows * random.uniform(1 - spread, 1 + spread))
            common = [node for node in path if before[: len(node)] == node] if before else []
            shared = sum(nodes[node] for node in common)
            branches.append((len(lengths) - 1, shared) if common else None)
            lengths.append(sum(nodes[node] for node in path))
            before = leaf
    return lengths, branches


def cases() -> Iterator[tuple[str, Samples]]:
    for size in (8, 16):
        for prompt in (1, 4, 16, 32):
            for mean in (2, 8, 16):
                yield f"{size} × {mean}K behind {prompt}K", groups(size, prompt * K, mean * K)
    yield "agents, 3 levels of 3 × 4K", trees(16, 3, 3, 4 * K)
    yield "agents, 4 levels of 3 × 4K", trees(8, 4, 3, 4 * K)
    yield "the same, nodes unlike", trees(8, 4, 3, 4 * K, spread=0.5)
    for number in (16, 4):
        lengths, branches = trees(number, 2, 8, 10 * K)
        yield (
            f"software agents, {number} of 8 × 10K behind 20K",
            (
                [length + 10 * K for length in lengths],
                [each and (each[0], each[1] + 10 * K) for each in branches],
            ),
        )


def rollouts(paths: Sequence[Path]) -> Iterator[tuple[str, Samples]]:
    """Rollouts of files, as whole samples and as one for each turn."""
    for path in paths:
        whole, turns = [], []
        try:
            for rollout in json.loads(path.read_text()):
                said = b""
                for message in rollout.get("traj") or rollout["messages"]:
                    said += json.dumps(message).encode()
                    if message["role"] == "assistant":
                        turns.append(said)
                whole.append(said)
            if not turns:
                raise ValueError("no message of an assistant")
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(
                f"{path}: {type(error).__name__} {error}; give a JSON list of objects, each with a "
                "list of messages as traj or messages, which have a role"
            ) from None
        for name, texts in (("whole", whole), ("a sample a turn", turns)):
            ids = [np.frombuffer(text[: len(text) // 4 * 4], dtype=np.uint32) for text in texts]
            yield f"{path.stem}, {name}: {len(ids)}", (list(map(len, ids)), ids)


def simulated(
    cases: Iterable[tuple[str, Samples]], hardware: str
) -> tuple[list[list[str]], dict[str, list[list[float]]]]:
    """The table's lines, and the gains of each layout."""
    lines: list[list[str]] = []
    gains: dict[str, list[list[float]]] = {name: [] for name in LAYOUTS}
    for title, (lengths, branches) in cases:
        cap = 64 * K if max(lengths) <= 64 * K else 128 * K
        cells: list[str] = []
        for name, (model, layout) in LAYOUTS.items():
            given: dict[str, Any] = {
                "max_tokens": cap, "layout": layout, "cost": model, "hardware": hardware,
            }  # fmt: skip
            start_s = time.perf_counter()
            plans = [wlb.plan_batch(lengths, shared=each, **given) for each in (None, branches)]
            if layout.pp_size > 1:
                plans.append(wlb.plan_batch(lengths, shared=branches, slices=True, **given))
            took_s = time.perf_counter() - start_s
            us = [
                wlb.simulate_step(plan, layout, model=model, hardware=hardware).pipeline_us
                for plan in plans
            ]
            own = [us[0] / each for each in us[1:]]
            gains[name].append(own)
            if not cells:
                cells = [title, f"{plans[0].num_tokens / plans[1].num_tokens:.2f}"]
            cells.append(" → ".join(f"{gain:.2f}" for gain in own))
            print(f"{title}, {name}: {cells[-1]}, {took_s:.2f} s", file=sys.stderr)
        lines.append(cells)
    return lines, gains


def table(cases: Iterable[tuple[str, Samples]], hardware: str) -> str:
    lines, gains = simulated(cases, hardware)
    head = ["Samples", "tokens ÷ those that run", *LAYOUTS]

    def of_each(made: Callable[[Sequence[float]], float]) -> list[str]:
        return [
            " → ".join(f"{made(ways):.2f}" for ways in zip(*own, strict=True))
            for own in gains.values()
        ]

    means, least = of_each(geometric_mean), of_each(min)
    lines += [["geometric mean", "", *means], ["least", "", *least]]
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *lines))


MODEL = """
--wlb-device cpu --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 4096
--max-position-embeddings 4096 --swiglu --normalization RMSNorm --disable-bias-linear
--position-embedding-type rope --pipeline-model-parallel-size 2 --lr 0.001 --wlb-max-tokens 4608
--wlb-hardware cpu --vocab-size 512
"""
NUM_GROUPS, ANSWERS, PROMPT, ANSWER, NUM_STEPS = 4, 8, 2048, 256, 3


def resident_mib(name: str) -> float:
    """What Linux says of this process's memory: VmRSS now, VmHWM at most since it was reset."""
    (line,) = [o for o in Path("/proc/self/status").read_text().splitlines() if o.startswith(name)]
    return int(line.split()[1]) / 1024


def train(flags: list[str]) -> None:
    """Prints, on the first rank, what steps take whole and shared; ``flags`` are the trainer's."""
    import torch

    trainer = wlb.SampleTrainer([*MODEL.split(), *flags])
    random = np.random.default_rng(0)
    samples, weights = [], []
    for _ in range(NUM_GROUPS):
        prompt = random.integers(0, 512, PROMPT)
        for _ in range(ANSWERS):
            samples.append(np.concatenate([prompt, random.integers(0, 512, ANSWER)]))
            weights.append(np.repeat([0.0, 1 / ANSWER], [PROMPT, ANSWER]))
    advantages = torch.from_numpy(random.normal(size=len(samples)).astype(np.float32))
    took: dict[bool, list[float]] = {False: [], True: []}
    held: dict[bool, list[float]] = {False: [], True: []}
    batches = {shared: trainer.batch(samples, weights, shared=shared) for shared in took}
    noted = {shared: trainer.log_probs(batch) for shared, batch in batches.items()}

    def loss(log_probs: Any, targets: Any) -> Any:
        return -log_probs * advantages[targets.samples]

    for _ in range(NUM_STEPS):
        for shared, batch in batches.items():
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before_mib, start_s = resident_mib("VmRSS"), time.perf_counter()
            trainer.step(batch, loss)
            torch.distributed.barrier()
            took[shared].append(time.perf_counter() - start_s)
            held[shared].append(resident_mib("VmHWM") - before_mib)
    if torch.distributed.get_rank() == 0:
        for shared, name in ((False, "whole"), (True, "shared")):
            plan, own = batches[shared].plan, took[shared]
            print(
                f"{name}: {median(own):.2f} s a step ({min(own):.2f} to {max(own):.2f}), "
                f"{len(samples) / median(own):.1f} samples a second, {plan.num_tokens} tokens in "
                f"{len(plan.micro_batches[0])} micro-batches, {median(held[shared]):.0f} MiB more "
                f"at most ({min(held[shared]):.0f} to {max(held[shared]):.0f})"
            )
        pairs = zip(noted[False], noted[True], strict=True)
        differ = max(float(np.abs(whole - shared).max()) for whole, shared in pairs)
        ratio = median(took[False]) / median(took[True])
        print(f"{ratio:.2f} times as fast; log-probabilities differ by {differ:.1e} at most")
    trainer.close()


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--train", action="store_true", help="measure steps; under torchrun")
    parser.add_argument("--hardware", default=DEFAULT_MACHINE, help="the machine that is simulated")
    parser.add_argument("--page", type=Path, help="page whose table is written")
    parser.add_argument("--rollouts", type=Path, nargs="+", help="JSON files, in place of cases")
    args, flags = parser.parse_known_args()
    if args.train:
        train(flags)
        return 0
    if flags:
        parser.error(f"unknown flags without --train: {' '.join(flags)}")
    if args.page and args.rollouts:
        parser.error("--page has the table of cases; leave out --rollouts")
    made = table(rollouts(args.rollouts) if args.rollouts else cases(), args.hardware)
    if args.page is not None:
        put(args.page, "shared prefixes", made.rstrip())
    print(made, end="")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
