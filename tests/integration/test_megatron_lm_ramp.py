"""Megatron-LM on plans of batches that grow: ``--rampup-batch-size``."""

from __future__ import annotations

from pathlib import Path

from megatron_lm_runs import (
    BOTH,
    assert_equal_steps,
    finish,
    launch,
    logged,
    needs_megatron_lm,
)
from trainer_runs import Flags, assert_refused, losses, read_metrics

from megatron_wlb.data.ramp import Ramp
from megatron_wlb.errors import CheckpointError, ConfigError

pytestmark = needs_megatron_lm

RAMP = (2, 2, 9)
GROWING: Flags = BOTH | {
    "train_iters": None,
    "train_samples": 42,
    "rampup_batch_size": list(RAMP),
    "wlb_packing": "hold",
}
SIZES = [2, 2, 4, 6, 8, 8, 8]
"""By hand: a third of 9 samples is 3; the batch is 2 up to 3 samples, then 4, 6 and 8."""


def test_a_growing_batch_has_megatrons_sizes_and_resumes_in_its_midst(
    corpus: Path, tmp_path: Path
) -> None:
    ramp = Ramp(*RAMP, 8)
    flags = GROWING | {"data_path": corpus}
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
    other = flags | {"rampup_batch_size": [4, 4, 9], "override_opt_param_scheduler": True}
    finished = launch(tmp_path, 1, other).wait()
    assert_refused(finished, CheckpointError.exit_code, "batch size", "2 2 9 to 8")


def test_batches_are_rounded_down_to_what_replicas_divide(corpus: Path, tmp_path: Path) -> None:
    flags = GROWING | {"data_path": corpus, "micro_batch_size": 2, "wlb_packing": "fixed-greedy"}
    flags |= {"rampup_batch_size": [5, 4, 12], "global_batch_size": 13, "train_samples": 50}
    finished = launch(tmp_path, 2, flags).wait()
    assert_refused(finished, ConfigError.exit_code, "batch of 5", "× DP 2 = 4")
    rounded = flags | {"decrease_batch_size_if_needed": True, "wlb_fixed_batches": 3}
    ended = finish(launch(tmp_path, 2, rounded | {"wlb_metrics": "metrics"}))
    consumed = list(map(int, logged(ended, "consumed samples")))
    ramp = Ramp(5, 4, 12, 13, multiple=4)
    assert consumed == [ramp.before(step + 1) for step in range(len(consumed))]
    assert consumed[:4] == [4, 8, 16, 28]
