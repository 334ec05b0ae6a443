"""Strategies and documents that are run against the oracle, and how they are compared with it."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np

from helpers.layouts import MODELS
from helpers.oracle import OracleRun, State, run_oracle
from helpers.strategy_ranks import StrategyRecord, strategies_file, with_strategies
from helpers.workload import Workload, make_workload
from megatron_wlb.settings.command_line import parse
from megatron_wlb.settings.config import Config

STRATEGIES = (
    "tp2:128+pp2:128",
    "tp1:64+pp3:64",
    "tp2cp2:128",
    "pp2vpp3:64+tp2:128",
    "tp2pp2:64",
    "tp1:64@1+tp1:64@3",  # two ranks are idle, one replica has nothing to run
    "cp2:64+tp2:64",
    "4*tp1:128",
    "pp2sliced:64+tp2:128",
    "tp2pp2sliced:64",
    "pp2vpp3sliced:64+pp2sliced:64",
    "cp2pp2sliced:64",
)
WORKLOAD = make_workload(
    [
        [37, 1, 5, 60, 12, 29, 2, 48, 1, 17, (33, 20), 9],
        [8, 60, 1, 44, 21, (60, 1, 50, 7), 30, 2, 13],
        [51, 1, 1, (5, 1), 26, 40, 11, 60, 33, 6],
        [3, 14, 15, 9, 26, 53, 58, 9],
        [60, 2, 7, 18, 28, 18, 28, 4],
        [5, 9, 4],
        [45, 23, 53, 60, 28, 7, 47, 13],
        [5, 26, 60, 24, 9, 7, 7],
        [57, 2, 47, 9],
        [36, 9, 9, 59, 5, 7],
        [51, 10, 58, 20, 9],
        [7, 49, 44, 59, 23, 7, 8],
    ],
    vocab_size=59,
)
FLAGS = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--make-vocab-size-divisible-by 32 --global-batch-size 4 --train-iters 14 "
    "--lr 0.01 --min-lr 0.001 --adam-eps 1e-5 --weight-decay 0.1 --clip-grad 0.5"
)
NUM_ORDERS = 4
LOSS_RTOL = 1e-6
"""For fp32 sums of some hundred token losses, and a norm that Megatron sums in fp32, by which
gradients are clipped: 4.2e-7 was seen, 1.6e-7 of the fp32 oracle, whose norm is summed in fp64."""
ATOL, OF_ONE_PROCESS = 5e-6, 2.0
"""Gradients and final weights differ from those of an oracle in fp64 by no more than this share of
an array's largest entry, and of the model's; or by so many times what one process in fp32 does,
with a step's documents in the worst of :data:`NUM_ORDERS` orders.

That is more after the first step, as weights differ by roundings, which normalised queries and keys
amplify: of the llama-like model up to 9.7e-5 of an array and 1.2e-5 of the model for one process,
8.3e-5 and 1.0e-5 for strategies. How much depends on the processor and, by a factor of two, on the
order of sums: at any step 1.7 times as much as for the worst of four orders was seen.
"""


def config_of(model: str, folder: Path, strategies: tuple[str, ...] = STRATEGIES) -> Config:
    path, (name, *more) = strategies_file(folder, strategies), model.split()
    return with_strategies(parse([*FLAGS.split(), *MODELS[name].split(), *more]), path)


def joined(parts: list[State]) -> State:
    whole: State = {}
    for part in parts:
        assert not whole.keys() & part.keys()
        whole |= part
    return whole


def worst(expected: State, found: State, least_share: float = 1e-2) -> float:
    """The largest difference, as a share of an array's largest entry, which counts as no less than
    ``least_share`` of the model's.
    """
    assert expected.keys() == found.keys()
    floor = least_share * max(float(np.abs(array).max()) for array in expected.values())
    shares = []
    for name, array in expected.items():
        most = max(float(np.abs(array).max()), floor)
        shares.append(float(np.abs(array - found[name].reshape(array.shape)).max()) / most)
    return max(shares)


def oracles(config: Config, workload: Workload) -> list[OracleRun]:
    """One process in fp64, and in fp32 with documents in several orders."""
    from megatron.core import parallel_state

    runs = [run_oracle(config, workload, None, "float64")]
    for seed in range(NUM_ORDERS):
        parallel_state.destroy_model_parallel()
        draw = random.Random(seed).sample
        steps = tuple(tuple(draw(documents, len(documents))) for documents in workload.steps)
        runs.append(run_oracle(config, dataclasses.replace(workload, steps=steps)))
    return runs


def differences(
    oracles: list[OracleRun], runs: list[StrategyRecord], times: float = 1.0
) -> list[str]:
    """What differs by more than so many times the tolerances."""
    exact, *alone = oracles
    found = []
    for rank, run in enumerate(runs):
        for number, step in enumerate(exact.steps):
            for label, loss in (("", run.losses[number]), ("evaluated ", run.evaluated[number])):
                if not abs(loss - step.loss) <= times * LOSS_RTOL * step.loss:
                    found.append(f"step {number}, rank {rank}: {label}loss {loss}, not {step.loss}")
    finals = [one.final for one in alone]
    compared = [(exact.final, finals, joined([run.final for run in runs]), "final weights")]
    for number, step in enumerate(exact.steps):
        gradients = joined([run.gradients[number] for run in runs])
        own = [one.steps[number].gradients for one in alone]
        compared.append((step.gradients, own, gradients, f"step {number}: gradients"))
        squares = [float((g.astype(np.float64) ** 2).sum()) for g in step.gradients.values()]
        if (
            not abs(runs[0].norms[number] - sum(squares) ** 0.5)
            <= times * 1e-5 * sum(squares) ** 0.5
        ):
            found.append(f"step {number}: norm {runs[0].norms[number]}, not {sum(squares) ** 0.5}")
    for expected, alike, state, label in compared:
        for least_share in (1e-2, 1.0):
            rounded = max(worst(expected, one, least_share) for one in alike)
            limit = times * max(ATOL, OF_ONE_PROCESS * rounded)
            share = worst(expected, state, least_share)
            if not share <= limit:
                found.append(f"{label} differ by {share:.1e}, above {limit:.1e}")
    return found
