"""Training on random tokens, without a corpus: the same in every layout and resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_lm_runs import BOTH, LAYOUTS, launch, validations
from rank_runs import Flags, assert_refused, finish, losses

from megatron_wlb.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.launcher

NUM_STEPS = 4
MOCK: Flags = BOTH | {"mock_data": True, "train_iters": NUM_STEPS, "wlb_packing": "hold"}
ROUNDING = 1e-6
"""Relative: fp32 sums of a thousand token losses, in another order."""


def test_mock_data_resume_exactly_and_in_another_layout(tmp_path: Path) -> None:
    flags = MOCK | {"eval_interval": 2, "eval_iters": 2, "save_interval": 2}
    plain = finish(launch(tmp_path, 1, flags | {"save": "ck", "wlb_metrics": "plain"}))
    expected = {step: loss for step, loss in losses(tmp_path / "plain").items() if step > 2}
    assert [*expected] == [3, 4]
    flags |= {"load": "ck", "ckpt_step": 2}
    other = launch(tmp_path, 1, flags | {"wlb_mock_lengths": "stdlib"}).wait()
    assert_refused(other, CheckpointError.exit_code, "mock data (distribution stdlib)")
    finish(launch(tmp_path, 1, flags | {"wlb_metrics": "resumed"}))
    assert losses(tmp_path / "resumed") == expected
    num_processes, layout = LAYOUTS["pp2-cp2-dp2"]
    shared = finish(launch(tmp_path, num_processes, flags | layout | {"wlb_metrics": "shared"}))
    assert losses(tmp_path / "shared") == pytest.approx(expected, rel=ROUNDING)
    evaluated, found = ([*map(float, validations(run))] for run in (plain, shared))
    assert len(evaluated) > 2 and found == pytest.approx(evaluated[1:], rel=ROUNDING)


@pytest.mark.long
def test_mock_data_of_other_lengths_train_otherwise(tmp_path: Path) -> None:
    """Negative control of the equalities above, and a resumed run of the launcher."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(str(3 + number * 37 % 200) for number in range(400)))
    flags = MOCK | {"seed": 5}
    finish(launch(tmp_path, 1, flags | {"wlb_metrics": "reference"}))
    flags |= {"wlb_mock_lengths": lengths, "save": "ck", "save_interval": 2, "load": "ck"}
    flags |= {"wlb_metrics": "file"}
    finish(launch(tmp_path, 1, flags | {"exit_interval": 2}))
    moved = lengths.rename(tmp_path / "moved.txt")
    again = finish(launch(tmp_path, 1, flags | {"wlb_mock_lengths": moved}))
    assert "other settings than the checkpoint's" not in again.output
    alone = {"wlb_mock_lengths": moved, "load": None, "save": None, "save_interval": None}
    finish(launch(tmp_path, 1, flags | alone | {"wlb_metrics": "plain"}))
    ours, others = losses(tmp_path / "plain"), losses(tmp_path / "reference")
    assert losses(tmp_path / "file") == ours
    for step, loss in others.items():
        assert abs(loss - ours[step]) > 100 * ROUNDING * loss


def test_mock_data_beside_a_corpus_are_refused(tmp_path: Path) -> None:
    refused = launch(tmp_path, 1, MOCK | {"train_data_path": "a"}).wait()
    assert_refused(refused, ConfigError.exit_code, "--mock-data", "leave one of them out")
