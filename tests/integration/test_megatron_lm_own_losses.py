"""The launcher with ``--wlb-loss``: a loss of the user's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.texts import write_texts
from megatron_lm_runs import (
    BOTH,
    PP2,
    Flags,
    assert_equal_steps,
    launch,
    logged,
    validations,
)
from rank_runs import assert_refused, finish

from megatron_wlb.data.corpus import Corpus
from megatron_wlb.data.targets import write_targets
from megatron_wlb.errors import ConfigError, TrainingError

pytestmark = pytest.mark.launcher

FLAGS: Flags = BOTH | {"wlb_packing": "hold", "seed": 7, "train_iters": 3}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Flags:
    return {"data_path": write_texts(tmp_path_factory.mktemp("texts") / "a", 200, 3.8, most=700)}


def with_loss(folder: Path, text: str) -> Flags:
    (folder / "mine.py").write_text(text)
    return FLAGS | {"wlb_loss": folder / "mine.py"}


def test_cross_entropy_as_a_loss_of_ones_own_is_the_loss_without(
    corpus: Flags, tmp_path: Path
) -> None:
    plain = with_loss(tmp_path, "def loss(log_probs, targets): return -log_probs") | corpus
    finish(launch(tmp_path, 1, plain | {"wlb_metrics": "written"}))
    finish(launch(tmp_path, 1, FLAGS | corpus | {"wlb_metrics": "without"}))
    assert_equal_steps(tmp_path / "written", tmp_path / "without")


def test_loss_that_was_edited_is_told_where_a_run_resumes(corpus: Flags, tmp_path: Path) -> None:
    text = "def loss(log_probs, targets): return -log_probs"
    saves: Flags = {"save": tmp_path / "ck", "load": tmp_path / "ck", "save_interval": 1}
    flags = with_loss(tmp_path, text) | corpus | saves | {"exit_interval": 1}
    warning = f"--wlb-loss {tmp_path / 'mine.py'} holds another text than when"
    assert warning not in finish(launch(tmp_path, 1, flags)).output
    assert warning not in finish(launch(tmp_path, 1, flags)).output
    with_loss(tmp_path, "def loss(log_probs, targets): return -2 * log_probs")
    assert warning in finish(launch(tmp_path, 1, flags)).output


def test_files_that_are_no_loss_are_refused_before_training(corpus: Flags, tmp_path: Path) -> None:
    for text, words in (
        ("import nowhere", "cannot be imported (ModuleNotFoundError"),
        ("def other(): pass", "has no function `loss`"),
    ):
        refused = launch(tmp_path, 1, corpus | with_loss(tmp_path, text)).wait()
        assert_refused(refused, ConfigError.exit_code, "--wlb-loss", words)
    flags = corpus | with_loss(tmp_path, "def loss(log_probs, targets): return log_probs.mean()")
    refused = launch(tmp_path, 1, flags).wait()
    assert_refused(refused, TrainingError.exit_code, "return a tensor with a loss for each")


def test_steps_without_a_target_have_the_loss_0(corpus: Flags, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus['data_path']}{suffix}", tmp_path / f"masked{suffix}")
    lengths = Corpus.open(corpus["data_path"]).lengths
    write_targets(tmp_path / "masked", [np.zeros(length) for length in lengths])
    flags = FLAGS | {"data_path": tmp_path / "masked", "vocab_size": 257, "eval_iters": 1}
    finished = finish(launch(tmp_path, 2, flags | PP2 | {"wlb_packing": "hold"}))
    assert logged(finished, "number of nan iterations") == ["0"] * 3
    assert {float(loss) for loss in validations(finished)} == {0.0}
