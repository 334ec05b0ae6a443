"""What a run of the trainer promises besides its losses' exactness: evaluation, logs, switches."""

from __future__ import annotations

import statistics
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers.layouts import further
from megatron_lm_runs import PP2, RECOMPUTED, TP2_SP
from trainer_runs import (
    TINY,
    Flags,
    assert_refused,
    evaluations,
    finish,
    losses,
    read_metrics,
    start,
)

from megatron_wlb.errors import TrainingError

DP2: Flags = {}


def train(folder: Path, num_processes: int, flags: Flags, name: str = "metrics") -> Path:
    """Runs to the end; the metrics."""
    finish(start(folder, num_processes, flags | {"wlb_metrics": name}))
    return folder / name


@pytest.mark.parametrize("layout", [PP2, further(DP2)], ids=["pp2", "dp2"])
def test_evaluation_depends_on_the_weights_alone(
    layout: Flags, tmp_path: Path, corpus: Path
) -> None:
    """At learning rate 0 each evaluation gives the same loss, after any step, in any packing."""
    flags = TINY | layout | {"data_path": corpus, "split": "70,30", "hidden_dropout": 0.2}
    flags |= {"lr": 0.0, "eval_interval": 1, "eval_iters": 2, "train_iters": 3}
    found = [
        loss
        for packing in ("original", "fixed-greedy", "wlb", "hold")
        for loss in evaluations(train(tmp_path, 2, flags | {"wlb_packing": packing}, packing))
    ]
    assert len(found) == 12
    assert len(set(found)) == 1
    # Negative control: the training losses, of other documents and with dropout, all differ.
    trained = [loss for name in ("original", "hold") for loss in losses(tmp_path / name).values()]
    assert len(set(trained) - set(found)) > 3


def test_evaluation_leaves_training_alone_and_follows_it(tmp_path: Path, corpus: Path) -> None:
    flags = TINY | PP2 | {"data_path": corpus, "split": "70,30", "hidden_dropout": 0.2}
    flags |= {"lr": 1e-2, "train_iters": 12}
    plain = train(tmp_path, 2, flags, "plain")
    evaluated = train(tmp_path, 2, flags | {"eval_interval": 4, "eval_iters": 2}, "evaluated")
    assert losses(evaluated) == losses(plain)
    first, _, last = evaluations(evaluated)
    assert last < first - 0.1


def test_gathering_in_the_forward_pass_changes_no_loss(tmp_path: Path, corpus: Path) -> None:
    flags = TINY | {"data_path": corpus, "split": "70,30", "lr": 1e-2, "train_iters": 4}
    flags |= {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    flags |= {"eval_interval": 2, "eval_iters": 2}
    plain = train(tmp_path, 2, flags, "plain")
    gathered = train(tmp_path, 2, flags | {"overlap_param_gather": True}, "gathered")
    assert losses(gathered) == losses(plain)
    assert evaluations(gathered) == evaluations(plain)


def test_bf16_run_learns_as_fp32_does(tmp_path: Path, corpus: Path) -> None:
    flags = TINY | {"data_path": corpus, "lr": 1e-2, "train_iters": 25}
    flags |= {"use_distributed_optimizer": True}
    exact = list(losses(train(tmp_path, 2, flags, "fp32")).values())
    rounded = list(losses(train(tmp_path, 2, flags | {"bf16": True}, "bf16")).values())
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
    flags = TINY | layout | {"data_path": corpus, "hidden_dropout": 0.2, "lr": 1e-2}
    flags |= {"seq_length": 512, "train_iters": 5, "wlb_packing": "original"}
    kept = losses(train(tmp_path, 2, flags, "kept"))
    for number, recompute in enumerate(RECOMPUTE):
        assert losses(train(tmp_path, 2, flags | recompute, str(number))) == kept, recompute


def test_tensorboard_shows_what_the_metrics_say(tmp_path: Path, corpus: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = TINY | PP2 | {"data_path": corpus, "split": "70,30", "eval_interval": 2}
    metrics = train(tmp_path, 2, flags | {"tensorboard_dir": "board"})
    assert len(list((tmp_path / "board").iterdir())) == 1, "more than one rank writes"
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    shown = {event.step: event.value for event in board.Scalars("train/loss")}
    assert shown == {step: np.float32(loss) for step, loss in losses(metrics).items()}
    assert [e.step for e in board.Scalars("valid/loss")] == [2, 4]
    for name in ("tokens", "imbalance", "delay_steps", "waiting_documents", "lr", "step_ms"):
        assert len(board.Scalars(f"train/{name}")) == 4


def test_measured_cost_trains_the_same_documents_in_every_layout(
    tmp_path: Path, corpus: Path
) -> None:
    """Ranks measure different times and must still come to one plan (the digest is compared)."""
    flags = TINY | {"data_path": corpus, "wlb_cost": "measured", "hidden_dropout": 0.1}
    flags |= {"seq_length": 2048}  # Times must grow with it on a machine that is busy, too.
    for name, layout in (("pp2", PP2), ("dp2", DP2)):
        metrics = train(tmp_path, 2, flags | layout, name)
        assert len(losses(metrics)) == 4
        (line, *_) = read_metrics(metrics)
        assert line["tokens"] > 512
        assert line["imbalance"] >= 1


def test_a_loss_that_is_not_finite_ends_training(tmp_path: Path, corpus: Path) -> None:
    diverging = {"data_path": corpus, "lr": 1e30, "clip_grad": 0.0, "save": "ck"}
    finished = start(tmp_path, 2, TINY | PP2 | diverging).wait()
    assert_refused(finished, TrainingError.exit_code, "the loss is", "lower --lr")
    names = [path.name for path in (tmp_path / "ck").iterdir()]
    assert names == ["wlb_ledger.txt"], "weights that are lost were saved"
