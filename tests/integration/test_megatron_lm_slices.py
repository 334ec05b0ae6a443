"""The launcher on documents in slices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from helpers.texts import write_texts
from megatron_lm_runs import (
    BOTH,
    PP2,
    SLICES,
    Flags,
    assert_equal_steps,
    launch,
)
from rank_runs import finish, losses

from megatron_wlb.reading import shipped

pytestmark = pytest.mark.launcher

ROUNDING = 1e-6
"""Relative, of losses: fp32 sums of a thousand token losses, summed in another order."""
NUM_STEPS = 6
RUN: Flags = SLICES | {
    "wlb_dp_merge": "off",
    "train_iters": NUM_STEPS,
    "wlb_metrics": "metrics",
    "seed": 7,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents, and some that fill a window."""
    return write_texts(tmp_path_factory.mktemp("texts") / "a", 400, 3.8, most=700)


def test_slices_go_on_from_a_checkpoint_and_run_again(corpus: Path, tmp_path: Path) -> None:
    """Resumed in another process, with steps replayed by Megatron's rerun machinery, one skipped,
    and Megatron's timers on."""
    flags = BOTH | PP2 | RUN | {"data_path": corpus, "hidden_dropout": 0.1}
    flags |= {"rerun_mode": "validate_results", "timing_log_level": 2, "iterations_to_skip": 2}
    whole = {"save": "ck", "save_interval": 4}  # not at 3, which is skipped
    finished = finish(launch(tmp_path, 2, flags | whole))
    assert "forward-backward ...." in finished.output
    resumed = {"load": "ck", "ckpt_step": 4, "wlb_metrics": "resumed"}
    finish(launch(tmp_path, 2, flags | resumed))
    expected = losses(tmp_path / "metrics")
    assert list(expected) == [1, 3, 4, 5, 6]
    assert losses(tmp_path / "resumed") == {step: expected[step] for step in (5, 6)}


def test_chosen_packing_trains_as_if_it_were_given(corpus: Path, tmp_path: Path) -> None:
    """And again where the same command goes on from a checkpoint."""
    flags = BOTH | PP2 | {"data_path": corpus, "train_iters": 4, "seed": 7, "wlb_hardware": "cpu"}
    chosen = flags | {"wlb_packing": "auto", "save": "ck", "save_interval": 2}
    launched = finish(launch(tmp_path, 2, chosen | {"wlb_metrics": "chosen"}))
    (name,) = set(re.findall(r"--wlb-packing auto takes (\w+): work a second", launched.output))
    finish(launch(tmp_path, 2, flags | {"wlb_packing": name, "wlb_metrics": "given"}))
    expected = losses(tmp_path / "given")
    assert len(expected) == 4 and name == "hold"
    assert losses(tmp_path / "chosen") == expected
    again = {step: expected[step] for step in (3, 4)}
    # One process alone would take another packing.
    for number, other in enumerate(({}, {"pipeline_model_parallel_size": None})):
        resumed = chosen | other | {"load": "ck", "ckpt_step": 2, "wlb_metrics": f"again-{number}"}
        finished = finish(launch(tmp_path, 1 if other else 2, resumed))
        assert losses(tmp_path / f"again-{number}") == pytest.approx(again, rel=ROUNDING)
        assert f"--wlb-packing auto goes on with the checkpoint's packing, {name}" in (
            finished.output
        )


@pytest.mark.parametrize("packing", ["auto", "hold"])
def test_s_max_that_fits_memory_is_kept_by_a_resumed_run(
    corpus: Path, tmp_path: Path, packing: str
) -> None:
    """Also where more would fit now."""
    figures = yaml.safe_load(shipped("hardware")["cpu"].read_text())
    figures["memory_gib"]["value"] = 0.0035
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(figures))
    flags: Flags = BOTH | {"data_path": corpus, "train_iters": 4, "wlb_packing": packing}
    small: Flags = {"wlb_hardware": "small.yaml", "wlb_metrics": "small", "save": "ck"}
    output = finish(launch(tmp_path, 2, flags | small | {"save_interval": 2})).output
    (s_max,) = re.findall("S_max is ([0-9]+) tokens, which fit memory", output)
    assert ("auto takes hold: " in output) == (packing == "auto")
    assert 128 < int(s_max) < 256
    resumed: Flags = {"wlb_hardware": "cpu", "load": "ck", "ckpt_step": 2, "wlb_metrics": "resumed"}
    output = finish(launch(tmp_path, 2, flags | resumed)).output
    said = f"the checkpoint's packing, hold, and an S_max of {s_max} tokens"
    assert (said in output) == (packing == "auto")
    assert_equal_steps(tmp_path / "resumed", tmp_path / "small", first=3)
