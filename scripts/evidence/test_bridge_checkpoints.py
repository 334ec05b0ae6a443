"""From a Hugging Face model to training with slices and back, by Megatron-Bridge, on a CPU.

BRIDGE_PYTHON names a Python that has megatron-bridge 0.6 and this project's packages.
``_bridge_checkpoints.py`` converts; the launcher trains.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_wlb.data.corpus import megatron_indexed_dataset

FOLDER, NUM_TOKENS, NUM_DOCUMENTS = Path(__file__).parent, 128, 64
FLAGS = """
--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 16
--group-query-attention --num-query-groups 2 --position-embedding-type rope --rotary-base 10000
--normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--seq-length 128 --max-position-embeddings 512 --tokenizer-type NullTokenizer --vocab-size 256
--make-vocab-size-divisible-by 1 --micro-batch-size 1 --global-batch-size 4 --train-iters 3
--lr 1e-3 --lr-decay-style constant --weight-decay 0 --split 100,0,0 --eval-iters 0
--eval-interval 1000 --log-interval 1 --save-interval 3 --transformer-impl local
--distributed-backend gloo --no-gradient-accumulation-fusion --no-persist-layer-norm
--no-rope-fusion --no-masked-softmax-fusion --pipeline-model-parallel-size 2 --wlb-packing slim
"""


def run(*command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parents[1]), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, env=environment
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def trained(folder: Path, load: Path, *more: str) -> list[float]:
    """The losses of three steps on the same document, again and again."""
    metrics = folder / "steps.jsonl"
    metrics.unlink(missing_ok=True)
    run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "megatron_wlb.launch", *FLAGS.split(), "--data-path", str(folder / "corpus")),
        *("--load", str(load), "--finetune", "--ckpt-format", "torch_dist"),
        *("--wlb-metrics", str(metrics), *more),
    )
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_a_model_comes_from_hugging_face_trains_in_slices_and_goes_back(tmp_path: Path) -> None:
    python = os.environ.get("BRIDGE_PYTHON")
    if python is None:
        pytest.skip("BRIDGE_PYTHON names no Python with megatron-bridge")
    tokens = np.random.default_rng(1).integers(0, 250, NUM_TOKENS)
    (tmp_path / "tokens.json").write_text(json.dumps(tokens.tolist()))
    builder = megatron_indexed_dataset().IndexedDatasetBuilder(f"{tmp_path / 'corpus'}.bin")
    for _ in range(NUM_DOCUMENTS):
        builder.add_document(tokens, [NUM_TOKENS])
    builder.finalize(f"{tmp_path / 'corpus'}.idx")

    def converted(way: str) -> dict[str, Any]:
        printed = run(python, str(FOLDER / "_bridge_checkpoints.py"), way, str(tmp_path))
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return found

    came = converted("in")
    losses = trained(tmp_path, tmp_path / "megatron", "--save", str(tmp_path / "trained"))
    assert losses[0] == pytest.approx(came["loss"], abs=1e-5)
    assert losses[-1] < losses[0] - 0.1
    went = converted("out")
    assert went["equal"] < went["tensors"]
    (after, *_) = trained(tmp_path, tmp_path / "trained")
    assert after == pytest.approx(went["loss"], abs=1e-5)
