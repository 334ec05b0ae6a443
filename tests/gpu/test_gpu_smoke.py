"""A few steps on one GPU give the losses of the CPU emulation, from the same weights.

This file is also the program that the tests run, one process a time:
``torchrun … test_gpu_smoke.py RESULT WEIGHTS [trainer's flags]``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUM_STEPS = 6


def run(result: Path, weights: Path, argv: Sequence[str]) -> None:
    """Trains from ``weights``, which the first run leaves there; writes the losses."""
    from megatron_wlb.runtime.trainer import distributed
    from megatron_wlb.settings.command_line import parse

    config = parse(argv)
    trainer = distributed.start(config)
    import torch

    from megatron_wlb.runtime.trainer import checkpoint

    (gpt,) = trainer.model.gpts
    device = trainer.model.device.type
    trainer.model.config.batch_p2p_sync = "P2P_SYNC" in os.environ
    if torch.distributed.get_world_size() == 1:
        parameters = dict(gpt.named_parameters())
        if not weights.exists():
            torch.save({k: p.detach().float().cpu() for k, p in parameters.items()}, weights)
        stored = torch.load(weights)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(stored[name])
        trainer.optimizer.reload_model_params()
    checkpoint.load(trainer)
    for _ in range(trainer.iteration):
        trainer.planner.next_plan()
    losses = []
    while trainer.iteration < int(os.environ.get("STOP", NUM_STEPS)):
        plan = trainer.planner.next_plan()
        assert plan is not None
        if device == "cuda" and trainer.iteration >= 2:  # states are made and kernels are chosen
            torch.cuda.set_sync_debug_mode(os.environ.get("SYNC_DEBUG_MODE", "default"))
        loss = trainer.gradients(plan)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        losses.append(loss.mean)
        trainer.update()
    if config.checkpoint.save is not None:
        checkpoint.save(trainer)
    if torch.distributed.get_rank() == 0:
        result.write_text(json.dumps({"device": device, "losses": losses}))
    distributed.shutdown()


def torchrun(file: str, folder: Path, *argv: str, num_gpus: int = 1, **more: str) -> None:
    """Runs a file of this folder in processes of its own, with ``more`` in their environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_gpus), file, *argv]
    # Megatron may be on the path instead of installed.
    known = (str(ROOT), os.path.dirname(__file__), os.environ.get("PYTHONPATH"))
    paths = os.pathsep.join(filter(None, known))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **more}
    finished = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=folder
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def train(
    folder: Path, corpus: Path, name: str, *flags: str, num_gpus: int = 1, **more: str
) -> list[float]:
    """Losses of a run in processes of its own, with ``more`` in their environment."""
    argv = [str(folder / name), str(folder / "weights"), "--data-path", str(corpus)]
    argv += ["--train-iters", str(NUM_STEPS), "--lr", "0.003", "--global-batch-size", "4"]
    argv += ["--seq-length", "512", "--hidden-size", "64", "--wlb-packing", "hold", *flags]
    torchrun(__file__, folder, *argv, num_gpus=num_gpus, **more)
    result = json.loads((folder / name).read_text())
    assert result["device"].startswith("cpu" if "cpu" in flags else "cuda")
    losses: list[float] = result["losses"]
    return losses


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from megatron_wlb.data.corpus import build_corpus

    folder = tmp_path_factory.mktemp("corpus")
    texts = [f"{'word ' * (7 * n % 150)}document {n}" for n in range(200)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    build_corpus([folder / "texts.jsonl"], folder / "texts")
    return folder / "texts"


def test_gpu_trains_as_the_cpu_does(tmp_path: Path, corpus: Path) -> None:
    # Weights of TransformerEngine's layers have other names.
    local = ["--transformer-impl", "local"]
    emulated = train(tmp_path, corpus, "emulated", *local, "--wlb-device", "cpu")
    real = train(tmp_path, corpus, "fp32", *local, "--wlb-device", "cuda")
    assert emulated[-1] < emulated[0] - 0.5
    # fp32 on both; sums in another order, over some optimizer steps.
    assert real == pytest.approx(emulated, rel=1e-3)
    # Negative control: one step earlier or later is another loss.
    assert real[:-1] != pytest.approx(emulated[1:], rel=1e-3)

    rounded = train(tmp_path, corpus, "bf16", *local, "--wlb-device", "cuda", "--bf16")
    assert rounded != real
    assert rounded == pytest.approx(real, abs=0.1)


def test_gpu_run_resumes_where_it_was_saved(tmp_path: Path, corpus: Path) -> None:
    """Weights, optimizer and the GPU's random numbers (dropout) among them."""
    flags = ["--wlb-device", "cuda", "--hidden-dropout", "0.1", "--use-distributed-optimizer"]
    whole = train(tmp_path, corpus, "whole", *flags)
    first = train(tmp_path, corpus, "first", *flags, "--save", "ck", STOP="3")
    second = train(tmp_path, corpus, "second", *flags, "--load", "ck")
    # Not bitwise: some CUDA kernels add in no fixed order.
    assert first + second == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("dtype", ["--bf16", ""])
def test_gpu_step_is_queued_up_without_waiting(tmp_path: Path, corpus: Path, dtype: str) -> None:
    """An operation for which the host waits is an error from the third step on."""
    flags = ["--wlb-device", "cuda", *dtype.split()]
    assert train(tmp_path, corpus, "queued", *flags, SYNC_DEBUG_MODE="error")


def test_gpu_pipeline_needs_no_synchronisation(tmp_path: Path, corpus: Path) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL has no two ranks on one device; a pipeline needs two")
    flags = ["--wlb-device", "cuda", "--pipeline-model-parallel-size", "2", "--num-layers", "4"]
    without = train(tmp_path, corpus, "without", *flags, num_gpus=2)
    synchronised = train(tmp_path, corpus, "with", *flags, num_gpus=2, P2P_SYNC="1")
    # Not bitwise: some CUDA kernels add in no fixed order.
    assert without == pytest.approx(synchronised, rel=1e-4)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
