"""Prints what this machine reaches, to write a hardware file from (see configs/hardware/cpu.yaml).

Run it as ``OMP_NUM_THREADS=1 .venv/bin/python scripts/evidence/measure_hardware.py``.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import yaml
from _common import parser_of

from megatron_wlb.runtime.emulation.heap import keep_freed_memory
from megatron_wlb.runtime.measuring.rates import measure_rates

NUM_REPEATS = 5
NUM_RANKS = 2


def gather_gb_s(rank: int, store: str, num_bytes: int = 2**26) -> float:
    """10⁹ B/s that a rank receives in an all-gather over the world; the best of several."""
    keep_freed_memory()  # as the CPU emulation does
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # needs no host name that resolves
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=NUM_RANKS)
    mine = torch.ones(num_bytes // 4)
    everything = torch.empty(mine.numel() * NUM_RANKS)
    seconds = []
    for _ in range(NUM_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        dist.all_gather_into_tensor(everything, mine)
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return num_bytes * (NUM_RANKS - 1) / min(seconds) / 1e9


def processor() -> str:
    """The processor's name, where Linux tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else f"{os.cpu_count()} processors"


def main() -> None:
    parser_of(__doc__).parse_args()
    figures = {"processor": processor(), "torch": str(torch.__version__), **asdict(measure_rates())}
    ranks = ProcessPoolExecutor(NUM_RANKS, get_context("spawn"))
    with TemporaryDirectory() as folder, ranks:
        stores = [f"{folder}/store"] * NUM_RANKS
        figures["gloo_gather_gb_s"] = min(ranks.map(gather_gb_s, range(NUM_RANKS), stores))
    print(yaml.safe_dump(figures, sort_keys=False, allow_unicode=True), end="")


if __name__ == "__main__":
    main()
