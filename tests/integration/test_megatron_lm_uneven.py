"""Megatron-LM's own ``pretrain_gpt.py`` on plans, with unlike numbers of layers in its stages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from megatron_lm_runs import (
    BOTH,
    DP2,
    PP2,
    Flags,
    assert_equal_steps,
    finish,
    launch,
    needs_megatron_lm,
)
from trainer_runs import losses, start

from megatron_wlb.data.corpus import build_corpus

pytestmark = needs_megatron_lm

NUM_STEPS, SAVED = 5, 2
"""Each layout goes on from the checkpoint of one process after so many steps."""
RUN: Flags = BOTH | {
    "num_layers": 6, "train_iters": NUM_STEPS, "wlb_packing": "hold", "wlb_metrics": "metrics",
    "seed": 7,
}  # fmt: skip
PP4: Flags = {"pipeline_model_parallel_size": 4}
ENDS: Flags = {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1}
ACCOUNTS: Flags = {
    "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
    "num_virtual_stages_per_pipeline_rank": 2,
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, Flags]] = {
    "first-and-last": (4, PP4 | ENDS),
    # As Megatron's own recipe has it: the first and the last chunk are without layers.
    "accounts-vpp2": (4, PP4 | ACCOUNTS),
    "chunk-without-anything": (2, PP2 | {"pipeline_model_parallel_layout": "Et*3|t||ttL"}),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short and long documents, of which some wait."""
    folder = tmp_path_factory.mktemp("texts")
    generator = np.random.RandomState(11)
    with (folder / "a.jsonl").open("w") as stream:
        for length in np.clip(generator.lognormal(4.3, 1.2, 200), 5, 1500).astype(int):
            words = generator.choice(["ab", "cde", "fgh ", "the ", "sun ", "x. "], length)
            stream.write(json.dumps({"text": "".join(words)[:length]}) + "\n")
    build_corpus([folder / "a.jsonl"], folder / "a")
    return folder / "a"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("one")
    flags = RUN | {"data_path": corpus, "save": "ck", "save_interval": SAVED}
    finish(launch(folder, 1, flags))
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_uneven_stages_equal_one_process(
    name: str, one_process: Path, corpus: Path, tmp_path: Path
) -> None:
    num_processes, layout = LAYOUTS[name]
    flags = RUN | layout | {"data_path": corpus, "load": one_process / "ck", "ckpt_step": SAVED}
    finish(launch(tmp_path, num_processes, flags))
    assert_equal_steps(tmp_path / "metrics", one_process / "metrics", SAVED + 1)


def test_slices_through_uneven_stages_train_as_in_the_embedded_trainer(
    corpus: Path, tmp_path: Path
) -> None:
    flags = RUN | PP2 | DP2 | {"decoder_last_pipeline_num_layers": 2, "data_path": corpus}
    flags |= {"wlb_packing": "slim", "wlb_dp_merge": "off", "wlb_units": 12}
    flags |= {"wlb_slice_multiple": 8}
    finish(launch(tmp_path, 4, flags | {"wlb_metrics": "launched"}))
    finish(start(tmp_path, 4, flags | {"wlb_metrics": "embedded"}))
    expected = losses(tmp_path / "embedded")
    assert len(expected) == NUM_STEPS
    assert losses(tmp_path / "launched") == pytest.approx(expected, rel=1e-6)
