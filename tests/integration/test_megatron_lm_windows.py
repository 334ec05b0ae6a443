"""Megatron-LM's own ``pretrain_gpt.py`` with sliding windows, as the embedded trainer has them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from megatron_lm_runs import BOTH, CP2, PP2, Flags, finish, launch, needs_megatron_lm
from trainer_runs import losses, start

from megatron_wlb.data.corpus import build_corpus

pytestmark = needs_megatron_lm

ROUNDING = 1e-6
"""Relative, of losses: fp32 sums of a thousand token losses, summed in another order."""
NUM_STEPS = 4
WINDOWS: Flags = {"train_iters": NUM_STEPS, "seed": 7, "window_size": "19,0"}
LAYOUTS: dict[str, tuple[Flags, Flags]] = {
    "cp2": (CP2, {"wlb_packing": "original"}),
    "pp2-slices": (
        PP2 | {"window_attn_skip_freq": "([1]+[0])*2"},
        {"wlb_packing": "slim", "wlb_units": 12, "wlb_slice_multiple": 8},
    ),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents within reach, and some that fill a window of the data."""
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.RandomState(11)
    with (folder / "a.jsonl").open("w") as stream:
        for length in np.clip(generator.lognormal(3.8, 1.2, 300), 5, 700).astype(int):
            words = generator.choice(["ab", "cde", "fgh ", "the ", "sun ", "x. "], length)
            stream.write(json.dumps({"text": "".join(words)[:length]}) + "\n")
    build_corpus([folder / "a.jsonl"], folder / "a")
    return folder / "a"


@pytest.mark.parametrize("name", LAYOUTS)
def test_windows_train_as_in_the_embedded_trainer(name: str, corpus: Path, tmp_path: Path) -> None:
    layout, packing = LAYOUTS[name]
    flags = BOTH | layout | packing | WINDOWS | {"data_path": corpus}
    finish(launch(tmp_path, 2, flags | {"wlb_metrics": "launched"}))
    finish(start(tmp_path, 2, flags | {"wlb_metrics": "embedded"}))
    expected = losses(tmp_path / "embedded")
    assert len(expected) == NUM_STEPS
    assert losses(tmp_path / "launched") == pytest.approx(expected, rel=ROUNDING)
    if name == "cp2":  # Negative control: another window is another model.
        finish(launch(tmp_path, 2, flags | {"window_size": "1,0", "wlb_metrics": "other"}))
        for step, loss in losses(tmp_path / "other").items():
            assert abs(loss - expected[step]) > 10 * ROUNDING * loss
