"""Strategies on TransformerEngine's layers: ``pretrain_gpt.py`` as on one GPU without them."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.pretrain import losses

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 1024 "
    "--micro-batch-size 1 "
    "--max-position-embeddings 1024 --global-batch-size 8 --train-iters 6 --lr 1e-3 --seed 7 "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --bf16 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights "
    "--tokenizer-type NullTokenizer --vocab-size 255 --mock-data --wlb-mock-lengths reference "
    "--eval-interval 100 --eval-iters 0 --transformer-impl transformer_engine "
    "--make-vocab-size-divisible-by 128 --no-gradient-accumulation-fusion"
)


@pytest.mark.parametrize("precision", ["", "--fp8-format hybrid --fp8-recipe tensorwise"])
def test_gpu_trains_strategies_as_it_does_one_layout(tmp_path: Path, precision: str) -> None:
    import torch

    pytest.importorskip("transformer_engine")
    if precision and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    num = min(torch.cuda.device_count(), 2)
    texts = ["tp1:2k"] if num == 1 else ["2*tp1:2k", "tp2:2k", "pp2:2k", "cp2:2k"]
    lines = [f"num_devices: {num}", f"devices_per_node: {num}", "strategies:"]
    (tmp_path / "strategies.yaml").write_text("\n".join([*lines, *(f"- {text}" for text in texts)]))
    alone = losses(tmp_path, "alone", FLAGS, "--wlb-packing slim", precision)
    unlike = losses(
        tmp_path, "unlike", FLAGS, "--wlb-strategies strategies.yaml", precision, num_gpus=num
    )
    # Other micro-batches, layouts and orders of sums in bf16.
    assert unlike == pytest.approx(alone, abs=0.03)
    assert alone[-1] < alone[0] - 0.3
