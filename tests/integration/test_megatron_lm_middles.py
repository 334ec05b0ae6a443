"""The launcher with fill-in-the-middle: the same in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.texts import write_texts
from megatron_lm_runs import BOTH, CP2, Flags, assert_equal_steps, launch
from rank_runs import assert_refused, finish, losses

from megatron_wlb.errors import ConfigError

pytestmark = pytest.mark.launcher

TOKENS: Flags = {
    f"fim_{name}_token": token
    for name, token in {"prefix": 256, "middle": 257, "suffix": 258, "pad": 259, "eod": 0}.items()
}
MIDDLES: Flags = {"fim_data": True, "fim_rate": 0.7, "fim_spm_rate": 0.5, "vocab_size": 511}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of several windows, too."""
    return write_texts(tmp_path_factory.mktemp("texts") / "a", 200, 4.0, 1.1, most=500)


def test_middles_are_the_same_in_spans_of_ranks_and_after_resuming(
    corpus: Path, tmp_path: Path
) -> None:
    flags = BOTH | MIDDLES | TOKENS | {"data_path": corpus, "wlb_packing": "hold", "seed": 7}
    saves: Flags = {"save": tmp_path / "ck", "save_interval": 2}
    finish(launch(tmp_path, 1, flags | saves | {"train_iters": 4, "wlb_metrics": "one"}))
    resumed: Flags = {"load": tmp_path / "ck", "ckpt_step": 2, "wlb_metrics": "resumed"}
    finish(launch(tmp_path, 2, flags | CP2 | resumed | {"train_iters": 4}))
    assert_equal_steps(tmp_path / "resumed", tmp_path / "one", first=3)
    # Negative control: documents as they are.
    plain = {name: value for name, value in flags.items() if not name.startswith("fim_")}
    finish(launch(tmp_path, 1, plain | {"train_iters": 1, "wlb_metrics": "plain"}))
    expected = losses(tmp_path / "one")[1]
    assert abs(losses(tmp_path / "plain")[1] - expected) > 1e-4 * expected


def test_tokenizer_without_tokens_of_middles_is_refused(corpus: Path, tmp_path: Path) -> None:
    flags = BOTH | MIDDLES | {"data_path": corpus, "wlb_packing": "hold", "train_iters": 1}
    finished = launch(tmp_path, 1, flags).wait()
    assert_refused(finished, ConfigError.exit_code, "--fim-prefix-token", "add it to the tokenizer")
