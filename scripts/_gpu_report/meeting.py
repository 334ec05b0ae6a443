"""What ranks that share a device can do together: one rank, ``python -m _gpu_report.meeting``.

Over NCCL on a GPU, over gloo on a CPU. Rank 0 prints JSON in its last line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist

from _gpu_report import sharing

MESSAGES_MIB = (0.25, 4, 64)
REPEATS = 10


def measure(size: int, messages_mib: tuple[float, ...], device: str) -> dict[str, float]:
    """Figures of this rank; ``size`` is that of the matrices which it multiplies."""
    rank, num = dist.get_rank(), dist.get_world_size()
    found: dict[str, float] = {}

    def tell(name: str, value: float) -> None:
        found[name] = value
        print(f"rank {rank}: {name}: {value:.4g}", flush=True)

    ones = torch.full((1 << 20,), rank + 1.0, device=device)
    dist.all_reduce(ones)
    tell("sum is right", float((ones == num * (num + 1) / 2).all()))
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)

    def multiply() -> None:
        torch.mm(a, a)

    flops, alone = 2 * size**3, 0.0
    for turn in range(num):  # the others wait in NCCL's barrier, which takes some SMs of theirs
        _meet(device)
        if turn == rank:
            alone = flops / _seconds(multiply, device) / 1e12
    tell("TFLOP/s alone", alone)
    _meet(device)
    tell("TFLOP/s together", flops / _seconds(multiply, device) / 1e12)
    for mib in messages_mib:
        mine = (torch.arange(int(mib * 2**18), device=device) % 1000 + rank).float()
        got = torch.empty_like(mine)
        before, after = (rank - 1) % num, (rank + 1) % num

        def ring(mine: torch.Tensor = mine, got: torch.Tensor = got) -> None:
            ops = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, got, before)]  # noqa: B023
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        def line(mine: torch.Tensor = mine, got: torch.Tensor = got) -> None:
            """From each rank to the next, one after another, as through a pipeline."""
            for one, next_one in pairwise(range(num)):
                if rank == one:
                    dist.send(mine, next_one)
                elif rank == next_one:
                    dist.recv(got, one)

        for name, exchange in (("ring", ring), ("line", line)):
            exchange()
            _meet(device)
            tell(f"{name}, {mib:g} MiB, us", _seconds(exchange, device) * 1e6)
        if rank:
            tell(f"{mib:g} MiB is right", float(torch.equal(got, mine - 1)))
        _meet(device)
        tell(
            f"all-reduce, {mib:g} MiB, us",
            _seconds(lambda m=mine: dist.all_reduce(m), device) * 1e6,
        )
    return found


def _meet(device: str) -> None:
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()


def _seconds(call: Callable[[], object], device: str) -> float:
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(REPEATS):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / REPEATS


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    own = measure(*((4096, MESSAGES_MIB) if on_gpu else (64, MESSAGES_MIB[:1])), device)
    every: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, own)
    if dist.get_rank() == 0:
        print(json.dumps({"nccl": sharing.loaded_nccl() if on_gpu else "", "ranks": every}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
