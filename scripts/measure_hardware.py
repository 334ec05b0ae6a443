"""Prints what this machine reaches, to write a hardware file from (see configs/hardware/cpu.yaml).

Run it as ``OMP_NUM_THREADS=1 .venv/bin/python scripts/measure_hardware.py``.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from _common import parser_of
from helpers.gloo import GlooPool

from megatron_wlb.bench.rates import measure_rates

NUM_REPEATS = 5


def gather_gb_s(num_bytes: int = 2**26) -> float:
    """10⁹ B/s that a rank receives in an all-gather over the world; the best of several."""
    mine = torch.ones(num_bytes // 4)
    everything = torch.empty(mine.numel() * dist.get_world_size())
    seconds = []
    for _ in range(NUM_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        dist.all_gather_into_tensor(everything, mine)
        seconds.append(time.perf_counter() - start)
    return num_bytes * (dist.get_world_size() - 1) / min(seconds) / 1e9


def processor() -> str:
    """The processor's name, where Linux tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else f"{os.cpu_count()} processors"


def main() -> None:
    parser_of(__doc__).parse_args()
    figures = {"processor": processor(), "torch": str(torch.__version__), **asdict(measure_rates())}
    with GlooPool() as pool:
        figures["gloo_gather_gb_s"] = min(pool.run(2, gather_gb_s))
    print(yaml.safe_dump(figures, sort_keys=False, allow_unicode=True), end="")


if __name__ == "__main__":
    main()
