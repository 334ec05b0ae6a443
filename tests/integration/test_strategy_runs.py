"""Runs with strategies: they evaluate, save, are killed, and resume: also otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.strategy_ranks import strategies_file
from trainer_runs import Flags, Run, assert_refused, losses, read_metrics, start

NUM_STEPS = 6
BASE: Flags = {
    "train_iters": NUM_STEPS,
    "global_batch_size": 4,
    "seq_length": 512,
    "hidden_size": 32,
    "num_layers": 6,
    "num_attention_heads": 4,
    "lr": 1e-2,
    "wlb_hardware": "cpu",
    "make_vocab_size_divisible_by": 64,
}
SAVING: Flags = {"save": "checkpoints", "load": "checkpoints", "save_interval": 2}


def run(folder: Path, num_processes: int, name: str, flags: Flags) -> dict[int, float]:
    """The losses that a run writes, which must come to its end.

    Its lines name each step's strategy, and ranks save the same.
    """
    finished = start(folder, num_processes, flags | {"wlb_metrics": folder / name}).wait()
    assert finished.code == 0, finished.output
    assert "differs from rank 0" not in finished.output
    named = {line["strategy"] for line in read_metrics(folder / name) if "strategy" in line}
    if flags.get("wlb_strategies"):
        assert named and any(f"tokens/s | {one}\n" in finished.output for one in named)
    return losses(folder / name)


def killed_after(folder: Path, num_steps: int, flags: Flags) -> None:
    metrics = Path(flags["wlb_metrics"])
    started: Run = start(folder, 4, flags)
    started.wait_until(lambda: metrics.exists() and metrics.read_text().count("loss") >= num_steps)
    started.kill()


def test_killed_run_of_strategies_resumes_with_the_same_losses_and_other_strategies_follow(
    tmp_path: Path, corpus: Path
) -> None:
    texts = ("tp2:1k+pp2:1k", "tp1:1k+pp3:1k", "2*tp2:1k")
    flags = BASE | {"data_path": corpus, "wlb_strategies": strategies_file(tmp_path, texts)}
    expected = run(tmp_path, 4, "whole", flags | {"eval_interval": 3, "eval_iters": 2})
    assert list(expected) == list(range(1, NUM_STEPS + 1))
    lines = [*read_metrics(tmp_path / "whole")]
    assert sum("valid_loss" in line for line in lines) == 2
    assert {line["strategy"] for line in lines if "loss" in line} <= {*texts}

    killed_after(tmp_path, 4, flags | SAVING | {"wlb_metrics": tmp_path / "killed"})
    loading: Flags = {"load": "checkpoints"}
    assert run(tmp_path, 4, "killed", flags | loading) == expected

    # A copy of the first checkpoint, for runs that are not quite this one.
    tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.write_text("2\n")
    (tmp_path / "others").mkdir()
    others = strategies_file(tmp_path / "others", ("cp2:1k", "2*tp1:1k"), 2)
    # Its vocabulary is the same, though no replica has TP here.
    same: Flags = {"make_vocab_size_divisible_by": 128, "wlb_strategies": others}
    found = run(tmp_path, 2, "resumed", flags | loading | same)
    assert found == pytest.approx({n: expected[n] for n in range(3, NUM_STEPS + 1)}, rel=1e-4)

    plain: Flags = {"wlb_strategies": None, "make_vocab_size_divisible_by": 128}
    found = run(tmp_path, 1, "plain", flags | loading | plain)
    assert list(found) == list(range(3, NUM_STEPS + 1))
    assert max(found.values()) < expected[2]


@pytest.mark.long
def test_run_without_strategies_goes_on_with_proposed_ones(tmp_path: Path, corpus: Path) -> None:
    flags = BASE | SAVING | {"data_path": corpus, "num_layers": 4}
    plain = run(
        tmp_path, 2, "plain", flags | {"exit_interval": 2, "pipeline_model_parallel_size": 2}
    )
    assert list(plain) == [1, 2]
    # Two TP ranks at most, as the machine has two devices a node.
    found = run(
        tmp_path, 2, "auto", flags | {"wlb_strategies": "auto", "make_vocab_size_divisible_by": 32}
    )
    assert list(found) == list(range(3, NUM_STEPS + 1))
    assert max(found.values()) < plain[1]


def test_strategies_of_other_devices_are_refused(tmp_path: Path, corpus: Path) -> None:
    path = strategies_file(tmp_path, ("4*tp1:1k",))
    refused = start(tmp_path, 2, BASE | {"data_path": corpus, "wlb_strategies": path}).wait()
    assert_refused(refused, 2, "for 4 devices", "2 processes")
