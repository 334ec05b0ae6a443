"""Whatever is wrong, a run ends soon, with one line that says what, and with no traceback."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from helpers.layouts import further
from megatron_lm_runs import BOTH, CP2, MEGATRON_LM, PP2, launch
from rank_runs import Finished, Flags, assert_refused, spawn, torchrun

from megatron_wlb.errors import CheckpointError, ConfigError, CorpusError

pytestmark = pytest.mark.launcher

RUN: Flags = BOTH | {"train_iters": 2, "wlb_packing": "hold"}
STARTS: dict[str, tuple[int, Flags, list[str]]] = {
    # Name: processes, flags, what the line must hold: value, limit, remedy. What one process is
    # refused is in test_megatron_lm_manners.py, the rules in tests/unit/planning/test_guards.py.
    "gbs-by-dp": (2, {"global_batch_size": 3}, ["Megatron-LM refuses the arguments", "(3)"]),
    "world-size": (3, PP2, ["3 processes", "PP", "start a multiple of that"]),
    "overlap-groups": (
        2,
        CP2 | {"wlb_cp_overlap_groups": 3},
        ["--wlb-cp-overlap-groups is 3", "the 2 key/value heads", "use a divisor"],
    ),
}


@pytest.mark.parametrize("name", STARTS)
def test_bad_layout_is_one_line(name: str, tmp_path: Path, corpus: Path) -> None:
    num_processes, flags, fragments = STARTS[name]
    finished = launch(tmp_path, num_processes, RUN | {"data_path": corpus} | flags).wait()
    assert_refused(finished, ConfigError.exit_code, *fragments)


def test_bad_corpus_is_one_line(tmp_path: Path, corpus: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", tmp_path / f"copy{suffix}")
    os.truncate(tmp_path / "copy.bin", 1000)
    finished = launch(tmp_path, 2, RUN | {"data_path": tmp_path / "copy"}).wait()
    assert_refused(finished, CorpusError.exit_code, "copy.bin", "has 1000", "build")


def test_empty_folder_makes_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "megatron_wlb.cli.main", "corpus", "build", "empty"]
    finished = spawn(tmp_path, [*command, "--out", "corpus"]).wait()
    assert_refused(finished, CorpusError.exit_code, "empty")
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".log"] == ["empty"]


@pytest.mark.parametrize("layout", [PP2, further({})], ids=["pp2", "dp2"])
def test_token_beyond_the_vocabulary_is_one_line_under_torchrun(
    layout: Flags, tmp_path: Path, corpus: Path
) -> None:
    """One rank meets it in the middle of a step; the other loses its peer and must keep quiet."""
    flags = MEGATRON_LM | RUN | layout | {"data_path": corpus, "vocab_size": 100}
    finished = torchrun(tmp_path, 2, flags).wait()
    ours = finished.output.split("torch/distributed/elastic")[0]  # torchrun's report follows
    (line,) = Finished(finished.code, ours).errors
    assert finished.code and "vocabulary has 100" in line and "--vocab-size" in line
    assert "[rank" not in finished.output


@pytest.mark.parametrize("flag", ["save", "wlb-metrics", "tensorboard-dir"])
@pytest.mark.parametrize("place", ["file/below", further("/proc/none/below")])
def test_unwritable_output_is_refused_before_training(
    flag: str, place: str, tmp_path: Path, corpus: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    flags = RUN | PP2 | {"data_path": corpus, "save_interval": 2, flag: place}
    finished = launch(tmp_path, 2, flags).wait()
    assert_refused(finished, None, f"cannot write --{flag} {place}", "choose another")
    assert "lm loss" not in finished.output


def test_full_disk_under_the_metrics_ends_with_one_line(tmp_path: Path, corpus: Path) -> None:
    finished = launch(tmp_path, 1, RUN | {"data_path": corpus, "wlb_metrics": "/dev/full"}).wait()
    assert_refused(finished, CheckpointError.exit_code, "--wlb-metrics", "No space left", "room")
