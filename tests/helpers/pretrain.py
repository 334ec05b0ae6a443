"""``pretrain_gpt.py`` in processes of its own, with the launcher where a flag is this project's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKOUT = os.environ.get("MEGATRON_LM_PATH")
SCRIPT = [f"{CHECKOUT}/pretrain_gpt.py"] if CHECKOUT else []
"""What the launcher is told to run: a checkout's, or nothing, for the script that stands in."""
FUSED = "--transformer-impl transformer_engine --no-gradient-accumulation-fusion"
UNFUSED = (
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-rope-fusion"
)
"""Layers of torch and Megatron alone, which a CPU has too."""
EMULATED = f"--wlb-device cpu --distributed-backend gloo {UNFUSED}"


def pretrain(folder: Path, *flags: str, num_gpus: int = 1) -> str:
    """Runs it in ``folder`` with flags that are words or several in one string; what it prints.

    Raises ``RuntimeError`` with its whole output if it fails.
    """
    words = " ".join(flags).split()
    program = SCRIPT or ["-m", "megatron_wlb.pretrain_gpt"]
    if any(word.startswith("--wlb-") for word in words):
        program = ["-m", "megatron_wlb.launch", *SCRIPT]
    return torchrun(folder, [*program, *words], num_gpus)


def torchrun(folder: Path, program: list[str], num_gpus: int = 1, **more: str) -> str:
    """What ranks of a program print, run in ``folder`` with ``more`` in their environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_gpus), *program]
    # Megatron may be on the path instead of installed.
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **more}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=folder,
        env={**os.environ, **own},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def losses(folder: Path, name: str, *flags: str, num_gpus: int = 1) -> list[float]:
    """The loss of each step of a launched run, by the metrics that it leaves as ``name``."""
    (folder / name).unlink(missing_ok=True)  # of a run that did not end
    pretrain(folder, *flags, f"--wlb-metrics {name}", num_gpus=num_gpus)
    return [json.loads(line)["loss"] for line in (folder / name).read_text().splitlines()]


def flash_if_there() -> str:
    """Megatron's flag for TransformerEngine's attention, which else is cuDNN's.

    Where two copies of cuDNN are on the machine that may fail.
    """
    there = any(find_spec(name) for name in ("flash_attn", "flash_attn_3"))
    return "--attention-backend flash" if there else ""
