"""On one GPU ``pretrain_gpt.py`` is its own oracle: with the launcher and without it.

Each document fills a window, so that both compute the same. With its own layers Megatron alone runs
its unfused attention, which shares nothing with the kernels here; with TransformerEngine's that of
TransformerEngine.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.pretrain import FUSED, UNFUSED, flash_if_there, pretrain
from helpers.whole_windows import two_corpora

WINDOW, SEED, END = 1024, 1234, 1023
FLAGS = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 4 --group-query-attention "
    f"--num-query-groups 2 --seq-length {WINDOW} --max-position-embeddings {WINDOW} "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 3 --init-method-std 0.1 "
    "--lr 1e-3 --lr-decay-style constant "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights "
    f"--tokenizer-type NullTokenizer --vocab-size {END} --split 1 --seed {SEED} --log-interval 1 "
    "--eval-interval 1000 --eval-iters 0 --num-workers 0"
)
FUSED_BF16 = f"{FUSED} --bf16"
ROUNDING = {UNFUSED: 1e-5, f"{UNFUSED} --bf16": 1.5e-3, FUSED_BF16: 1.5e-3}
"""Relative, of losses: on a CPU they are 1.5e-6 and 6e-4 apart, those of two steps 3e-3."""
ALONE = "--eod-mask-loss --data-cache-path cache"
SLICES = "--wlb-packing slim --wlb-units 12"


def losses(folder: Path, prefix: Path, *flags: str) -> list[float]:
    """What Megatron's log says of each step."""
    said = pretrain(folder, FLAGS, f"--data-path {prefix}", *flags)
    return [float(word) for word in re.findall(r"\| lm loss: +(\S+)", said)]


@pytest.mark.parametrize("packing", ["--wlb-packing hold", SLICES])
@pytest.mark.parametrize(
    ("layers", "off"), ROUNDING.items(), ids=["fp32", "bf16", "transformer-engine"]
)
def test_gpu_trains_what_megatron_alone_does(
    tmp_path: Path, layers: str, off: float, packing: str
) -> None:
    if layers == FUSED_BF16:
        pytest.importorskip("transformer_engine.pytorch")
    corpora = two_corpora(tmp_path, WINDOW, seed=SEED, end=END)
    flash = flash_if_there() if layers == FUSED_BF16 else ""
    alone = losses(tmp_path, corpora["alone"], layers, ALONE, flash)
    ours = losses(tmp_path, corpora["ours"], layers, packing)
    assert len(alone) == 3 and ours == pytest.approx(alone, rel=off)
    # Negative control: another step has another loss.
    assert ours[:-1] != pytest.approx(alone[1:], rel=off)
