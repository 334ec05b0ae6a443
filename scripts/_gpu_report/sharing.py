"""What lets several ranks share one GPU: NCCL 2.30 or later, and MPS, under which they run at once.

Without MPS the ranks take turns on the GPU. That shows whether they compute right, not how fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from _gpu_report.running import end
from megatron_wlb.errors import CompatibilityError

NCCL = "GPU_REPORT_NCCL"
"""Names a ``libnccl.so.2`` that ranks load in place of torch's: ``--nccl``."""
LEAST_NCCL = (2, 30)
MPS = "nvidia-cuda-mps-control"
MPS_FOLDERS = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/local/cuda/bin", "/opt/nvidia/bin")
NUM_CTAS = 8
"""Blocks of NCCL's kernels over all ranks: where a rank's find no room, its peers wait for ever."""
START_S = QUIT_S = 10.0
LAST_LINES = 8


def environment(num_ranks: int) -> dict[str, str]:
    """What each of so many ranks on the first GPU starts with."""
    library = os.environ.get(NCCL)
    return {
        "CUDA_VISIBLE_DEVICES": first_gpu(),
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_CTAS": str(max(NUM_CTAS // num_ranks, 1)),
        "NCCL_NVLS_ENABLE": "0",  # there is none between ranks of one GPU
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        **({"LD_PRELOAD": library} if library else {}),
    }


def first_gpu() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


def loaded_nccl() -> str:
    """The version that this process runs once it has imported torch; empty where there is none."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def nccl_of_ranks() -> str:
    """The version that ranks will run, as one of them says."""
    program = "import torch; from _gpu_report import sharing; print(sharing.loaded_nccl())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env={**os.environ, **environment(2)},
    )  # fmt: skip
    if done.returncode:
        raise CompatibilityError(
            f"{os.environ.get(NCCL, 'torch')} cannot be loaded ({done.stderr.strip()[-300:]}); "
            "give another file with --nccl"
        )
    return done.stdout.strip()


def check_nccl() -> str:
    """The version that ranks run.

    Raises :class:`CompatibilityError` where there is none that lets them share a GPU.
    """
    version = nccl_of_ranks()
    if not version or tuple(map(int, version.split(".")[:2])) < LEAST_NCCL:
        raise CompatibilityError(
            f"NCCL {version or 'that can be asked'} runs no two ranks on one GPU, which takes 2.30 "
            "or later; give its libnccl.so.2 with --nccl (the wheel nvidia-nccl-cu13 has it)"
        )
    return version


def mps_program() -> str | None:
    return shutil.which(MPS, path=os.pathsep.join([os.environ.get("PATH", ""), *MPS_FOLDERS]))


@contextlib.contextmanager
def mps(num_clients: int) -> Iterator[dict[str, str]]:
    """A server of our own: what clients that run at once, each on its share of the SMs, need.

    No setting of the GPU changes. Raises :class:`CompatibilityError` where there is no MPS, or it
    does not start.
    """
    program = mps_program()
    if program is None:
        raise CompatibilityError(
            f"there is no {MPS}, so ranks take turns on the GPU; it comes with NVIDIA's driver "
            "(package nvidia-compute-utils)"
        )
    with TemporaryDirectory(prefix="mps-") as place:  # a short path: sockets' are limited
        pipes, logs = Path(place, "pipe"), Path(place, "log")
        pipes.mkdir()
        logs.mkdir()
        own = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        served = {**os.environ, **own, "CUDA_VISIBLE_DEVICES": first_gpu()}
        # In the foreground: whoever ends this process, ends the server with it.
        server = subprocess.Popen(
            [program, "-f"], env=served, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + START_S
            while not (pipes / "control").exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise CompatibilityError(f"{program} does not start: {_said(logs)}")
                time.sleep(0.05)
            share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // num_clients)}
            # Its clients count the GPUs that the server sees.
            yield {**own, **share, "CUDA_VISIBLE_DEVICES": "0"}
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([program], input="quit\n", text=True, env=served, check=False,
                               capture_output=True, timeout=QUIT_S)  # fmt: skip
            if server.poll() is None:
                end(server)
            print(f"MPS: {_said(logs)}", flush=True)


def _said(logs: Path) -> str:
    lines = [line for log in sorted(logs.glob("*.log")) for line in log.read_text().splitlines()]
    return " | ".join(lines[-LAST_LINES:]) or "it has no log"
