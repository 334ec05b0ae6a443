"""Megatron-LM's own ``pretrain_gpt.py`` on documents in slices."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from megatron_lm_runs import BOTH, DP2, PP2, Flags, finish, launch, needs_megatron_lm, validations
from trainer_runs import losses, read_metrics, start

from megatron_wlb.data.corpus import build_corpus

pytestmark = needs_megatron_lm

ROUNDING = 1e-6
"""Relative, of losses: fp32 sums of a thousand token losses, summed in another order."""
NUM_STEPS = 6
SLICES: Flags = {
    "wlb_packing": "slim",
    "wlb_units": 12,
    "wlb_slice_multiple": 8,
    "wlb_dp_merge": "off",
    "train_iters": NUM_STEPS,
    "wlb_metrics": "metrics",
    "seed": 7,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents, and some that fill a window."""
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.RandomState(11)
    with (folder / "a.jsonl").open("w") as stream:
        for length in np.clip(generator.lognormal(3.8, 1.2, 400), 5, 700).astype(int):
            words = generator.choice(["ab", "cde", "fgh ", "the ", "sun ", "x. "], length)
            stream.write(json.dumps({"text": "".join(words)[:length]}) + "\n")
    build_corpus([folder / "a.jsonl"], folder / "a")
    return folder / "a"


LAYOUTS: dict[str, tuple[int, Flags]] = {
    "one": (1, {"eval_interval": 2, "eval_iters": 2}),
    "pp2-dp2": (4, PP2 | DP2 | {"overlap_grad_reduce": True}),
    "pp2-vpp2": (
        2,
        PP2 | {"num_virtual_stages_per_pipeline_rank": 2, "eval_interval": 2, "eval_iters": 2},
    ),
    "cp2-divided": (2, {"context_parallel_size": 2, "wlb_slice_cache": "divided"}),
}
TIGHT: Flags = {"wlb_memory_gib": 0.002}
"""Less than some steps need, unless they recompute."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_slices_train_as_in_the_embedded_trainer(name: str, corpus: Path, tmp_path: Path) -> None:
    num_processes, layout = LAYOUTS[name]
    flags = BOTH | layout | SLICES | {"data_path": corpus}
    only = {"overlap_param_gather": True} if "overlap_grad_reduce" in layout else TIGHT
    launched = finish(launch(tmp_path, num_processes, flags | only | {"wlb_metrics": "launched"}))
    finish(start(tmp_path, num_processes, flags | {"wlb_metrics": "embedded"}))
    expected = losses(tmp_path / "embedded")
    assert len(expected) == NUM_STEPS
    assert losses(tmp_path / "launched") == pytest.approx(expected, rel=ROUNDING)
    evaluated = [
        line["valid_loss"] for line in read_metrics(tmp_path / "embedded") if "valid_loss" in line
    ]
    found = [float(loss) for loss in validations(launched)]
    assert found[: len(evaluated)] == pytest.approx(evaluated, rel=ROUNDING)
    assert len(evaluated) == (3 if "eval_interval" in layout else 0)
    again, none = (
        sum(line.get("recomputed_tokens", 0) for line in read_metrics(tmp_path / name))
        for name in ("launched", "embedded")
    )
    assert (again > 0) == (only is TIGHT) and none == 0


def test_slices_go_on_from_a_checkpoint_and_run_again(corpus: Path, tmp_path: Path) -> None:
    """Resumed in another process, with steps replayed by Megatron's rerun machinery, one skipped,
    and Megatron's timers on."""
    flags = BOTH | PP2 | SLICES | {"data_path": corpus, "hidden_dropout": 0.1}
    flags |= {"rerun_mode": "validate_results", "timing_log_level": 2, "iterations_to_skip": 2}
    whole = {"save": "ck", "save_interval": 4}  # not at 3, which is skipped
    finished = finish(launch(tmp_path, 2, flags | whole))
    assert "forward-recv" in finished.output
    resumed = {"load": "ck", "ckpt_step": 4, "wlb_metrics": "resumed"}
    finish(launch(tmp_path, 2, flags | resumed))
    expected = losses(tmp_path / "metrics")
    # The third until Megatron-LM 0.18, the second from then on.
    assert list(expected) in ([1, 2, 4, 5, 6], [1, 3, 4, 5, 6])
    assert losses(tmp_path / "resumed") == {step: expected[step] for step in (5, 6)}


def test_chosen_packing_trains_as_if_it_were_given(corpus: Path, tmp_path: Path) -> None:
    """In Megatron-LM and here, and again where the same command goes on from a checkpoint."""
    flags = BOTH | PP2 | {"data_path": corpus, "train_iters": 4, "seed": 7, "wlb_hardware": "cpu"}
    chosen = flags | {"wlb_packing": "auto", "save": "ck", "save_interval": 2}
    launched = finish(launch(tmp_path, 2, chosen | {"wlb_metrics": "launched"}))
    (name,) = set(re.findall(r"--wlb-packing auto takes (\w+): work a second", launched.output))
    given = {"wlb_packing": name, "wlb_metrics": "embedded"}
    finish(start(tmp_path, 2, flags | given))
    expected = losses(tmp_path / "embedded")
    assert len(expected) == 4
    assert losses(tmp_path / "launched") == pytest.approx(expected, rel=ROUNDING)
    here = finish(start(tmp_path, 2, flags | {"wlb_packing": "auto", "wlb_metrics": "here"}))
    assert f"--wlb-packing auto takes {name}: " in here.output
    assert losses(tmp_path / "here") == expected
    finish(launch(tmp_path, 2, chosen | {"load": "ck", "ckpt_step": 2, "wlb_metrics": "resumed"}))
    again = {step: expected[step] for step in (3, 4)}
    assert losses(tmp_path / "resumed") == pytest.approx(again, rel=ROUNDING)
