"""Whatever is wrong, a run ends soon, with one line that says what, and with no traceback."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from helpers.layouts import further
from trainer_runs import TINY, Finished, Flags, assert_refused, spawn, start, torchrun

from megatron_wlb.errors import CheckpointError, ConfigError, CorpusError

PP2: Flags = {"pipeline_model_parallel_size": 2}
DP2: Flags = {}

CONFIG: dict[str, tuple[int, Flags, list[str]]] = {
    # Name: processes, flags, what the line must hold: value, limit, remedy. One of each place that
    # refuses, and limits of the trainer's own; tests/unit/planning/test_guards.py has the rules.
    "gbs-by-dp": (2, {"global_batch_size": 3}, ["--global-batch-size is 3", "DP 2", "multiple"]),
    "world-size": (3, PP2, ["3 processes", "PP 2", "multiple of 2"]),
    "micro-batch-size": (1, {"micro_batch_size": 0}, ["--micro-batch-size is 0", "at least 1"]),
    "fp8": (1, {"fp8_format": "e4m3"}, ["--fp8-format is e4m3", "for the launcher"]),
    "nccl-on-cpu": (1, {"distributed_backend": "nccl"}, ["nccl", "needs GPUs", "use gloo"]),
    "mistyped-flag": (1, {"seq_lenght": 256}, ["--seq-lenght", "did you mean --seq-length?"]),
    "save-interval-0": (1, {"save": "x", "save_interval": 0}, ["--save-interval is 0", "least 1"]),
    "log-interval-0": (1, {"log_interval": 0}, ["--log-interval is 0", "at least 1"]),
    "exit-interval-0": (1, {"exit_interval": 0}, ["--exit-interval is 0", "at least 1"]),
    "no-such-cost": (1, {"wlb_cost": "none.json"}, ["--wlb-cost none.json", "give the path"]),
    "tau": (1, {"wlb_hold_tau": 0}, ["--wlb-hold-tau is 0.0", "it must be in [1, inf)"]),
    "lr-nan": (1, {"lr": "nan"}, ["--lr", "nan is not finite"]),
    "weight-decay": (1, {"weight_decay": -1.0}, ["--weight-decay is -1.0", "[0, inf)"]),
}


@pytest.mark.parametrize("name", CONFIG)
def test_bad_setting_is_one_line(name: str, tmp_path: Path, corpus: Path) -> None:
    num_processes, flags, fragments = CONFIG[name]
    finished = start(tmp_path, num_processes, TINY | {"data_path": corpus} | flags).wait()
    assert_refused(finished, ConfigError.exit_code, *fragments)


def test_bad_corpus_is_one_line(tmp_path: Path, corpus: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", tmp_path / f"copy{suffix}")
    flags = TINY | {"data_path": tmp_path / "copy"}
    finished = start(tmp_path, 2, flags).wait()
    assert_refused(finished, ConfigError.exit_code, "copy.json", "--vocab-size")
    os.truncate(tmp_path / "copy.bin", 1000)
    finished = start(tmp_path, 2, flags).wait()
    assert_refused(finished, CorpusError.exit_code, "copy.bin", "has 1000", "build")


def test_corpus_left_out_is_one_line(tmp_path: Path) -> None:
    finished = start(tmp_path, 1, TINY).wait()
    assert_refused(finished, ConfigError.exit_code, "--data-path is missing", "wlb corpus build")


def test_empty_validation_split_is_refused_before_training(tmp_path: Path, corpus: Path) -> None:
    flags = TINY | {"data_path": corpus, "split": "1", "eval_interval": 4}
    finished = start(tmp_path, 1, flags).wait()
    assert_refused(finished, CorpusError.exit_code, "no documents", "another --split")
    assert "iteration" not in finished.output


def test_empty_folder_makes_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "megatron_wlb.cli.main", "corpus", "build", "empty"]
    finished = spawn(tmp_path, [*command, "--out", "corpus"]).wait()
    assert_refused(finished, CorpusError.exit_code, "empty")
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".log"] == ["empty"]


def test_start_without_torchrun_is_one_line(tmp_path: Path, corpus: Path) -> None:
    flags = ["--data-path", str(corpus)]
    finished = spawn(tmp_path, [sys.executable, "-m", "megatron_wlb.pretrain_gpt", *flags]).wait()
    assert_refused(finished, ConfigError.exit_code, "RANK is not set", "torchrun --nproc-per-node")


@pytest.mark.parametrize("layout", [PP2, further(DP2)], ids=["pp2", "dp2"])
def test_token_beyond_the_vocabulary_is_one_line_under_torchrun(
    layout: Flags, tmp_path: Path, corpus: Path
) -> None:
    """One rank meets it in the middle of a step; the other loses its peer and must keep quiet."""
    run = torchrun(tmp_path, 2, TINY | layout | {"data_path": corpus, "vocab_size": 100})
    finished = run.wait()
    ours = finished.output.split("torch/distributed/elastic")[0]  # torchrun's report follows
    assert_refused(Finished(finished.code, ours), None, "vocabulary has 100", "--vocab-size")
    assert "[rank" not in finished.output


@pytest.mark.parametrize("flag", ["save", "wlb-metrics", "tensorboard-dir"])
@pytest.mark.parametrize("place", ["file/below", "/proc/none/below"])
def test_unwritable_output_is_refused_before_training(
    flag: str, place: str, tmp_path: Path, corpus: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    finished = start(tmp_path, 2, TINY | PP2 | {"data_path": corpus, flag: place}).wait()
    assert_refused(finished, CheckpointError.exit_code, f"--{flag} {place}", "choose another")
    assert "iteration" not in finished.output


def test_full_disk_under_the_metrics_ends_with_one_line(tmp_path: Path, corpus: Path) -> None:
    finished = start(tmp_path, 1, TINY | {"data_path": corpus, "wlb_metrics": "/dev/full"}).wait()
    assert_refused(finished, CheckpointError.exit_code, "--wlb-metrics", "No space left", "room")
