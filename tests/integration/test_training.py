"""What a run promises besides exact losses: evaluation, switches of speed, measured cost."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from helpers.layouts import further
from megatron_lm_runs import (
    BOTH,
    CP2,
    DP2,
    PP2,
    RECOMPUTED,
    TP2_SP,
    Finished,
    Flags,
    launch,
    validations,
)
from rank_runs import finish, losses, read_metrics

pytestmark = pytest.mark.launcher

RUN: Flags = BOTH | {"global_batch_size": 4, "split": "70,30,0", "wlb_packing": "hold", "lr": 1e-2}


def train(folder: Path, num_processes: int, flags: Flags, name: str = "metrics") -> Finished:
    """Runs to the end, with metrics of that name."""
    return finish(launch(folder, num_processes, flags | {"wlb_metrics": name}))


@pytest.mark.parametrize("layout", [PP2, further({})], ids=["pp2", "dp2"])
def test_evaluation_depends_on_the_weights_alone(
    layout: Flags, tmp_path: Path, corpus: Path
) -> None:
    """At learning rate 0 each evaluation gives the same loss, after any step, in any packing."""
    flags = RUN | layout | {"data_path": corpus, "hidden_dropout": 0.2, "lr": 0.0}
    flags |= {"eval_interval": 1, "eval_iters": 2, "train_iters": 2, "min_lr": 0.0}
    found = [
        loss
        for packing in ("original", "wlb", "hold")
        for loss in validations(train(tmp_path, 2, flags | {"wlb_packing": packing}, packing))
    ]
    assert len(found) >= 6
    assert len(set(found)) == 1
    # Negative control: the training losses, of other documents and with dropout, all differ.
    trained = {loss for name in ("original", "hold") for loss in losses(tmp_path / name).values()}
    assert len(trained) == 4


def test_evaluation_leaves_training_alone_and_follows_it(tmp_path: Path, corpus: Path) -> None:
    flags = RUN | PP2 | {"data_path": corpus, "hidden_dropout": 0.2, "train_iters": 8}
    train(tmp_path, 2, flags, "plain")
    evaluated = train(tmp_path, 2, flags | {"eval_interval": 4, "eval_iters": 2}, "evaluated")
    assert losses(tmp_path / "evaluated") == losses(tmp_path / "plain")
    first, last, *_ = map(float, validations(evaluated))
    assert last < first - 0.1


def test_gathering_in_the_forward_pass_changes_no_loss(tmp_path: Path, corpus: Path) -> None:
    flags = RUN | DP2 | {"data_path": corpus, "train_iters": 4, "overlap_grad_reduce": True}
    flags |= {"eval_interval": 2, "eval_iters": 2}
    plain = train(tmp_path, 2, flags, "plain")
    gathered = train(tmp_path, 2, flags | {"overlap_param_gather": True}, "gathered")
    assert losses(tmp_path / "gathered") == losses(tmp_path / "plain")
    assert validations(gathered) == validations(plain) != []


def test_bf16_run_learns_as_fp32_does(tmp_path: Path, corpus: Path) -> None:
    flags = RUN | DP2 | {"data_path": corpus, "train_iters": 16}
    train(tmp_path, 2, flags, "fp32")
    train(tmp_path, 2, flags | {"bf16": True}, "bf16")
    exact, rounded = ([*losses(tmp_path / name).values()] for name in ("fp32", "bf16"))
    assert rounded != exact
    assert statistics.mean(rounded[-5:]) < rounded[0] - 1
    # bf16 has 8 bits: each step's loss is near, and a run that stands still is far away.
    assert rounded == pytest.approx(exact, abs=0.1)


RECOMPUTE: list[Flags] = [
    {"recompute_granularity": "selective"}, RECOMPUTED, RECOMPUTED | {"recompute_method": "block"},
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("layout", [PP2, TP2_SP], ids=["pp2", "tp2-sp"])
def test_recompute_changes_no_loss(layout: Flags, tmp_path: Path, corpus: Path) -> None:
    """Not by a bit, with dropout drawn twice from one state.

    Plans may differ, as recomputing costs time; those of `original` never do.
    """
    flags = RUN | layout | {"data_path": corpus, "hidden_dropout": 0.2}
    flags |= {"train_iters": 5, "wlb_packing": "original"}
    train(tmp_path, 2, flags, "kept")
    for number, recompute in enumerate(RECOMPUTE):
        train(tmp_path, 2, flags | recompute, str(number))
        assert losses(tmp_path / str(number)) == losses(tmp_path / "kept"), recompute


@pytest.mark.parametrize("layout", [PP2, further(PP2 | CP2 | {"bf16": True})], ids=["pp2", "cp2"])
def test_ranks_that_measure_other_times_come_to_one_plan(
    layout: Flags, tmp_path: Path, corpus: Path
) -> None:
    """The digest is compared."""
    num_processes = 4 if "context_parallel_size" in layout else 2
    flags = RUN | layout | {"data_path": corpus, "wlb_cost": "measured", "train_iters": 2}
    # Times must grow with it on a machine that is busy, too.
    flags |= {"seq_length": 2048, "max_position_embeddings": 2048, "hidden_dropout": 0.1}
    assert "measured cost" in train(tmp_path, num_processes, flags).output
    first, _ = read_metrics(tmp_path / "metrics")
    assert first["tokens"] > 512
    assert first["imbalance"] >= 1
