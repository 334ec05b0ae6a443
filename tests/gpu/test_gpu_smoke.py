"""A few steps on one GPU give the losses of the CPU emulation, from the same weights.

This file is also the program of the tests that ask something of each step, or change a setting that
is no flag: ``torchrun … test_gpu_smoke.py NAME [flags]`` with the name of a function.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.pretrain import EMULATED, FUSED, UNFUSED, losses, torchrun

NUM_STEPS = 6
MODEL = "--hidden-size 64 --seq-length 512 --global-batch-size 4 --lr 0.003"
FLAGS = (
    f"{MODEL} --num-layers 4 --num-attention-heads 4 --max-position-embeddings 512 "
    "--micro-batch-size 1 --lr-decay-style constant --position-embedding-type rope "
    "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 256 "
    f"--split 1 --log-interval 1 --eval-interval 1000 --eval-iters 0 --train-iters {NUM_STEPS}"
)
FIRST = "--train-iters 1 --save weights --save-interval 1"
"""Leaves weights, which all others begin with."""
THEN = "--load weights --finetune --no-load-optim --no-load-rng"
LAYERS = FUSED if find_spec("transformer_engine") else UNFUSED


def train(folder: Path, corpus: Path, name: str, *flags: str, num_gpus: int = 1) -> list[float]:
    """Losses of a launched run."""
    own = f"--data-path {corpus} --wlb-packing hold"
    return losses(folder, name, FLAGS, own, *flags, num_gpus=num_gpus)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron_wlb.data.build_corpus import build_corpus

    folder = tmp_path_factory.mktemp("corpus")
    texts = [f"{'word ' * (7 * n % 150)}document {n}" for n in range(200)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    build_corpus([folder / "texts.jsonl"], folder / "texts")
    return folder / "texts"


def test_gpu_trains_as_the_cpu_does(tmp_path: Path, corpus: Path) -> None:
    train(tmp_path, corpus, "first", EMULATED, FIRST)
    emulated = train(tmp_path, corpus, "emulated", EMULATED, THEN)
    # Weights of TransformerEngine's layers have other names.
    real = train(tmp_path, corpus, "fp32", UNFUSED, THEN)
    assert emulated[-1] < emulated[0] - 0.5
    # fp32 on both; sums in another order, over some optimizer steps.
    assert real == pytest.approx(emulated, rel=1e-3)
    # Negative control: one step earlier or later is another loss.
    assert real[:-1] != pytest.approx(emulated[1:], rel=1e-3)

    rounded = train(tmp_path, corpus, "bf16", UNFUSED, THEN, "--bf16")
    assert rounded != real
    assert rounded == pytest.approx(real, abs=0.1)


def test_gpu_run_resumes_where_it_was_saved(tmp_path: Path, corpus: Path) -> None:
    """Weights, optimizer, packing and the GPU's random numbers (dropout) among them."""
    sharded = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
    flags = [LAYERS, f"--hidden-dropout 0.1 {sharded} --ckpt-format torch_dist"]
    whole = train(tmp_path, corpus, "whole", *flags)
    saves = "--save ck --save-interval 3 --exit-interval 3"
    first = train(tmp_path, corpus, "first", *flags, saves)
    second = train(tmp_path, corpus, "second", *flags, "--load ck")
    # Not bitwise: some CUDA kernels add in no fixed order.
    assert first + second == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("dtype", ["--bf16", ""])
def test_gpu_passes_are_queued_up_without_waiting(tmp_path: Path, corpus: Path, dtype: str) -> None:
    """An operation for which the host waits is an error from the third step on; Megatron's update
    waits, for the gradients' norm.
    """
    flags = f"{MODEL} --wlb-device cuda --wlb-packing hold --data-path {corpus} {dtype}".split()
    torchrun(tmp_path, [__file__, "without_waiting", *flags])


def test_gpu_pipeline_needs_no_synchronisation(tmp_path: Path, corpus: Path) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL has no two ranks on one device; a pipeline needs two")
    flags = f"{LAYERS} --pipeline-model-parallel-size 2 --num-layers 4"
    without = train(tmp_path, corpus, "without", flags, num_gpus=2)
    words = f"{FLAGS} {flags} --data-path {corpus} --wlb-packing hold --wlb-metrics with".split()
    torchrun(tmp_path, [__file__, "synchronised", *words], num_gpus=2)
    lines = (tmp_path / "with").read_text().splitlines()
    # Not bitwise: some CUDA kernels add in no fixed order.
    assert without == pytest.approx([json.loads(line)["loss"] for line in lines], rel=1e-4)


def without_waiting() -> None:
    from megatron_wlb.runtime.trainer import distributed
    from megatron_wlb.settings.command_line import parse

    trainer = distributed.start(parse(sys.argv[2:]))
    import torch

    for number in range(NUM_STEPS):
        plan = trainer.planner.next_plan()
        assert plan is not None
        # States are made and kernels are chosen in the first two.
        torch.cuda.set_sync_debug_mode("error" if number >= 2 else "default")
        loss = trainer.gradients(plan)
        torch.cuda.set_sync_debug_mode("default")
        trainer.update()
        assert loss.mean > 0
    distributed.shutdown()


def synchronised() -> None:
    """The launcher, with stages that wait for the device at each exchange."""
    from megatron_wlb import launch
    from megatron_wlb.runtime.megatron_lm import chunks

    chunks.BATCH_P2P_SYNC = True
    sys.exit(launch.main(sys.argv[2:]))


if __name__ == "__main__":
    program: Callable[[], None] = globals()[sys.argv[1]]
    program()
