"""``pretrain_gpt.py`` in processes of its own, with the launcher where a flag is this project's."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
MEGATRON_LM = os.environ.get("MEGATRON_LM_PATH")
MISSING = "MEGATRON_LM_PATH names no checkout of Megatron-LM"


def pretrain(folder: Path, *flags: str, num_gpus: int = 1) -> str:
    """Runs it in ``folder`` with flags that are words or several in one string; what it prints.

    Raises ``RuntimeError`` with its whole output if it fails.
    """
    words = " ".join(flags).split()
    program = ["-m", "megatron_wlb.launch"] if any(w.startswith("--wlb-") for w in words) else []
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_gpus), *program, f"{MEGATRON_LM}/pretrain_gpt.py"]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=600, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


def flash_if_there() -> str:
    """Megatron's flag for TransformerEngine's attention, which else is cuDNN's.

    Where two copies of cuDNN are on the machine that may fail.
    """
    there = any(find_spec(name) for name in ("flash_attn", "flash_attn_3"))
    return "--attention-backend flash" if there else ""
