"""Many trained steps of slices in one process: memory stays flat, and no key or value is left."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import psutil

from megatron_wlb.plan import StepPlan

FLAGS = (
    "--mock-data --wlb-mock-lengths stdlib --tokenizer-type NullTokenizer --vocab-size 64 "
    "--seq-length 256 --max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 4 "
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --position-embedding-type rope "
    "--wlb-packing slim --wlb-units 6 --wlb-slice-multiple 16 --lr 1e-3 --lr-decay-style constant "
    "--wlb-device cpu --distributed-backend gloo --transformer-impl local --no-rope-fusion "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --eval-interval 1000 "
    "--eval-iters 0"
)
EXPERTS = (
    " --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.01 --moe-router-dtype fp32 --disable-bias-linear"
)


@dataclass(frozen=True)
class Trained:
    """What became of a run."""

    steps: int
    slices: int
    """Micro-batches that ran a part of a document."""
    seconds: float
    rss_mib: tuple[float, ...]
    """The process's memory at each tenth of the run."""
    tensors: tuple[int, ...]
    """Tensors that live after a step, at each tenth."""

    def refusal(self) -> str:
        """What is wrong; nothing if all is as it should be."""
        if not self.slices:
            return "no document was cut"
        if self.tensors[-1] > max(self.tensors[: len(self.tensors) // 2]):
            return f"tensors are left: {self.tensors}"
        if self.rss_mib[-1] > self.rss_mib[2] + 8:
            return f"memory grows: {self.rss_mib} MiB"
        return ""

    def flat(self) -> dict[str, object]:
        return asdict(self)


def train(num_steps: int, seed: int = 1, *, experts: bool = False) -> Trained:
    """Trains a tiny model in this process, also one with experts; needs ten steps at least."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    # oneDNN keeps up to 1024 kernels by their shapes, which are others in each step: some 10 MiB
    # that come bit by bit and are no leak.
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"
    from megatron_wlb.runtime.megatron_lm import cpu_loop

    cpu_loop.install()
    import torch

    from megatron_wlb.launch import launch
    from megatron_wlb.runtime.stepping.step import StepRunner

    process, run_schedule = psutil.Process(), StepRunner.run_schedule
    start_s, slices = time.perf_counter(), 0
    rss: list[float] = []
    tensors: list[int] = []

    def measured(runner: StepRunner, plan: StepPlan, *args: Any, **kwargs: Any) -> list[Any]:
        nonlocal slices
        result = run_schedule(runner, plan, *args, **kwargs)
        left = [*runner.batches.slices.buffers]
        assert not left, f"step {plan.step} leaves keys and values of {left}"
        slices += sum(micro_batch.slice is not None for micro_batch in plan)
        if (plan.step + 1) * 10 // num_steps > len(rss):
            gc.collect()
            rss.append(round(process.memory_info().rss / 2**20, 1))
            tensors.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
        return result

    more = f" --train-iters {num_steps} --log-interval {num_steps} --seed {seed + 1}"  # never 0
    with (
        mock.patch.object(StepRunner, "run_schedule", measured),
        contextlib.redirect_stdout(sys.stderr),
    ):
        launch(None, (FLAGS + EXPERTS * experts + more).split())
    seconds = time.perf_counter() - start_s
    return Trained(num_steps, slices, seconds, tuple(rss), tuple(tensors))
