"""Megatron-LM's own ``pretrain_gpt.py`` with multi-latent attention: layouts, and resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.layouts import further
from megatron_lm_runs import BOTH, CP2, PP2, TP2_SP, Flags, finish, launch, needs_megatron_lm
from trainer_runs import losses, start

pytestmark = needs_megatron_lm

ROUNDING = 1e-6
"""Relative, of losses: fp32 sums of a thousand token losses, summed in another order."""
NUM_STEPS = 4
LATENT: Flags = {
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 14,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "rotary_scaling_factor": 4.0,
    "mscale": 1.3,
    "init_method_std": 0.2,  # with which heads see more than means
    "train_iters": NUM_STEPS,
    "wlb_packing": "original",
}
SELECTIVE: Flags = {"recompute_granularity": "selective"}


def launched(folder: Path, num_processes: int, flags: Flags, name: str) -> dict[int, float]:
    """Losses by step."""
    finish(launch(folder, num_processes, BOTH | LATENT | flags | {"wlb_metrics": name}))
    return losses(folder / name)


def test_latents_equal_one_process_and_resume_exactly(tmp_path: Path, corpus: Path) -> None:
    alone: Flags = {"data_path": corpus}
    expected = launched(tmp_path, 1, alone, "alone")
    assert len(expected) == NUM_STEPS
    divided = alone | CP2 | SELECTIVE | {"recompute_modules": "mla_up_proj"}
    found = launched(tmp_path, 2, divided, "divided")
    assert found == pytest.approx(expected, rel=ROUNDING)
    divided |= {"save": "ck", "load": "ck", "save_interval": 2, "exit_interval": 2}
    for _ in range(2):
        resumed = launched(tmp_path, 2, divided, "resumed")
    assert resumed == found


@pytest.mark.parametrize(
    "layout",
    [further(TP2_SP | SELECTIVE), PP2 | {"wlb_packing": "slim"}],
    ids=["tp2-sp", "pp2-slim"],
)
def test_latents_train_as_in_the_embedded_trainer(
    layout: Flags, tmp_path: Path, corpus: Path
) -> None:
    flags = {"data_path": corpus} | layout
    found = launched(tmp_path, 2, flags, "launched")
    finish(start(tmp_path, 2, BOTH | LATENT | flags | {"wlb_metrics": "embedded"}))
    expected = losses(tmp_path / "embedded")
    assert len(expected) == NUM_STEPS
    assert found == pytest.approx(expected, rel=ROUNDING)
