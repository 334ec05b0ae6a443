"""Megatron-LM on plans of batches that grow."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_lm_runs import (
    BOTH,
    PP2_VPP2,
    assert_equal_steps,
    launch,
    logged,
    validations,
)
from rank_runs import Flags, assert_refused, finish, losses, read_metrics

from megatron_wlb.data.ramp import Ramp
from megatron_wlb.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.launcher

GROWING: Flags = BOTH | {
    "train_iters": None,
    "train_samples": 38,
    "wlb_packing": "hold",
    "global_batch_size": None,
}
STEPS = (0, 2), (4, 4), (8, 6), (14, 8)
"""Windows of a step, from so many on."""
SIZES = [2, 2, 4, 6, 8, 8, 8]
"""By hand."""


@pytest.mark.long
def test_a_growing_batch_has_megatrons_sizes_and_resumes_in_its_midst(
    corpus: Path, tmp_path: Path
) -> None:
    window = GROWING["seq_length"]
    schedule = " ".join(f"{start * window}:{size}" for start, size in STEPS)
    flags = GROWING | {"data_path": corpus, "step_batch_size_schedule": schedule}
    ramp = Ramp.schedule(schedule, window)
    plain = finish(launch(tmp_path, 1, flags | {"wlb_metrics": "plain"}))
    assert [ramp.windows(step) for step in range(len(SIZES))] == SIZES
    assert logged(plain, "global batch size") == list(map(str, SIZES))
    consumed = [str(ramp.before(step + 1)) for step in range(len(SIZES))]
    assert logged(plain, "consumed samples") == consumed
    tokens = [line["tokens"] for line in read_metrics(tmp_path / "plain")]
    assert tokens[0] < tokens[3] < tokens[-1]
    # Megatron saves by itself each time that the batch has grown, and we leave inside the ramp.
    flags |= {"save": "ck", "load": "ck", "save_interval": 100, "wlb_metrics": "resumed"}
    for stop in (3, 5):
        finish(launch(tmp_path, 1, flags | {"exit_interval": stop}))
    finish(launch(tmp_path, 1, flags))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "plain")
    dp2 = {"load": "ck", "ckpt_step": 3, "wlb_metrics": "dp2", "save": None}
    finish(launch(tmp_path, 2, flags | dp2))
    assert_equal_steps(tmp_path / "dp2", tmp_path / "plain", first=4)
    other = {"step_batch_size_schedule": "0:4 1K:8", "override_opt_param_scheduler": True}
    finished = launch(tmp_path, 1, flags | other).wait()
    assert_refused(finished, CheckpointError.exit_code, "batch size", ramp.title)


def test_a_ramp_that_megatron_ignores_is_told_and_ignored(corpus: Path, tmp_path: Path) -> None:
    flags = GROWING | {"data_path": corpus, "train_samples": 16, "global_batch_size": 8}
    flags |= {"rampup_batch_size": [2, 2, 9]}
    ended = finish(launch(tmp_path, 1, flags))
    assert "--rampup-batch-size 2 2 9 has no effect" in ended.output
    assert logged(ended, "global batch size") == ["8", "8"]


def test_evaluation_beside_a_schedule_has_batches_of_its_own(corpus: Path, tmp_path: Path) -> None:
    """Megatron's default of one micro-batch a rank is too few for virtual stages."""
    flags = GROWING | PP2_VPP2 | {"data_path": corpus, "train_samples": 8, "eval_interval": 2}
    flags |= {"step_batch_size_schedule": "0:4", "eval_iters": 2}
    flags |= {"wlb_hardware": "cpu", "wlb_metrics": "metrics"}
    refused = launch(tmp_path, 2, flags).wait()
    said = "these are steps of evaluation, of 1 windows"
    assert_refused(refused, ConfigError.exit_code, said, "give --eval-global-batch-size")
    ended = finish(launch(tmp_path, 2, flags | {"eval_global_batch_size": 2}))
    assert logged(ended, "global batch size") == ["4", "4"]
    assert len(validations(ended)) >= 1
    steps = [line for line in read_metrics(tmp_path / "metrics") if "step_ms" in line]
    assert [line["predicted_original_ms"] > 0 for line in steps] == [True, True]
