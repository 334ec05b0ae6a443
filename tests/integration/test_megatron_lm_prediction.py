"""Megatron-LM's own ``pretrain_gpt.py`` with multi-token prediction: trained, logged, resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from megatron_lm_runs import (
    BOTH,
    CP2,
    PP2,
    Finished,
    Flags,
    assert_equal_steps,
    finish,
    launch,
    logged,
    needs_megatron_lm,
)
from trainer_runs import read_metrics, start

from megatron_wlb.data.corpus import build_corpus

pytestmark = needs_megatron_lm

ROUNDING = 1e-6
"""Relative, of losses: fp32 sums of a thousand token losses, summed in another order."""
LOGGED = 2e-6
"""Relative, of losses in Megatron's log, which have seven digits."""
NUM_STEPS = 6
AHEAD: Flags = {"train_iters": NUM_STEPS, "seed": 7, "mtp_num_layers": 2, "wlb_packing": "hold"}
SLICES: Flags = {"wlb_packing": "slim", "wlb_units": 12, "wlb_slice_multiple": 8}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 1 to 500 tokens."""
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.RandomState(11)
    with (folder / "a.jsonl").open("w") as stream:
        for length in np.clip(generator.lognormal(3.4, 1.5, 400), 1, 500).astype(int):
            words = generator.choice(["ab", "cde", "fgh ", "the ", "sun ", "x. "], length)
            stream.write(json.dumps({"text": "".join(words)[:length]}) + "\n")
    build_corpus([folder / "a.jsonl"], folder / "a")
    return folder / "a"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, Finished]:
    """A run of one process that saves, and evaluates."""
    folder = tmp_path_factory.mktemp("one")
    flags = BOTH | AHEAD | {"data_path": corpus, "save": "ck", "save_interval": 2}
    flags |= {"eval_interval": 3, "eval_iters": 1}
    return folder, finish(launch(folder, 1, flags | {"wlb_metrics": "metrics"}))


def ahead(finished: Finished, depth: int) -> list[float]:
    """The logged losses of a depth, but for the second: Megatron counts the first one in again."""
    first, _, *others = (float(loss) for loss in logged(finished, f"mtp_{depth} loss"))
    return [first, *others]


def test_prediction_equals_the_embedded_trainer(
    one_process: tuple[Path, Finished], corpus: Path, tmp_path: Path
) -> None:
    """Which is held against documents that run alone, loss by loss."""
    folder, launched = one_process
    flags = BOTH | AHEAD | {"data_path": corpus, "wlb_metrics": "embedded"}
    finish(start(tmp_path, 1, flags))
    embedded = list(read_metrics(tmp_path / "embedded"))
    assert len(embedded) == NUM_STEPS
    for ours, theirs in zip(read_metrics(folder / "metrics"), embedded, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=ROUNDING)
    for depth in (1, 2):
        expected = [line[f"mtp_{depth}_loss"] for line in embedded if line["iteration"] != 2]
        assert ahead(launched, depth) == pytest.approx(expected, rel=LOGGED)
    assert len(re.findall("validation loss", launched.output)) >= 2


LAYOUTS: dict[str, tuple[int, Flags]] = {
    "pp2": (2, PP2 | {"pipeline_model_parallel_layout": "Et*3|tmmL"}),
    "cp2": (2, CP2),
    "dp2": (2, {"use_distributed_optimizer": True, "overlap_grad_reduce": True}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_prediction_in_layouts_equals_one_process(
    name: str, one_process: tuple[Path, Finished], corpus: Path, tmp_path: Path
) -> None:
    """From its checkpoint on, where the optimizer's form allows, else from the same weights."""
    num_processes, layout = LAYOUTS[name]
    folder, expected = one_process
    flags = BOTH | AHEAD | layout | {"data_path": corpus, "wlb_metrics": "metrics"}
    first = 1
    if "use_distributed_optimizer" not in layout:
        flags, first = flags | {"load": folder / "ck", "ckpt_step": 2}, 3
    finished = finish(launch(tmp_path, num_processes, flags))
    assert_equal_steps(tmp_path / "metrics", folder / "metrics", first)
    for depth in (1, 2):
        # Steps 5 and 6, of each run.
        assert ahead(finished, depth)[-2:] == pytest.approx(ahead(expected, depth)[-2:], rel=LOGGED)


@pytest.mark.parametrize("packing", ["hold", "slim"])
def test_prediction_resumes_exactly(packing: str, corpus: Path, tmp_path: Path) -> None:
    """Tied embeddings, over two stages: the last one's copy is saved and loaded once."""
    flags = BOTH | AHEAD | PP2 | {"data_path": corpus, "save": "ck", "save_interval": 2}
    flags |= SLICES if packing == "slim" else {}
    finish(launch(tmp_path, 2, flags | {"wlb_metrics": "whole", "exit_interval": 4}))
    again = flags | {"load": "ck", "ckpt_step": 2, "wlb_metrics": "again", "exit_interval": 4}
    finish(launch(tmp_path, 2, {k: v for k, v in again.items() if k != "save"}))
    whole = {line["iteration"]: line["loss"] for line in read_metrics(tmp_path / "whole")}
    found = {line["iteration"]: line["loss"] for line in read_metrics(tmp_path / "again")}
    assert found == {step: whole[step] for step in (3, 4)}
