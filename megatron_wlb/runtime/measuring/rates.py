"""What this machine's first device reaches: the figures of a hardware file, measured.

Takes seconds. Rates are the best of several runs: what the device can do, not what it does beside
other work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from megatron_wlb.runtime.device_clock import Clock

NUM_REPEATS = 8
SMALL, NUM_LINKS = 256, 64
"""Numbers of a tensor that kernels take no time for, and operations of a chain of such kernels."""


@dataclass(frozen=True)
class Rates:
    """Measured on one device (or the threads that torch uses), in one precision."""

    device: str
    dtype: str
    num_threads: int
    square_tflops: float
    """Product of two square matrices."""
    linear_tflops: float
    """Product of a thousand tokens with a layer's weights, as in training."""
    attention_tflops: float
    """Causal attention of one document of 4,096 tokens; half of all pairs count."""
    copy_gb_s: float
    """Copying memory: bytes read and written."""
    elementwise_gb_s: float
    """An activation function: bytes read and written."""
    kernel_us: float | None = None
    """A GPU's time for a kernel without work, in a row of such kernels; None on the CPU."""
    launch_us: float | None = None
    """The host's time to launch a GPU's kernel, with autograd's part; None on the CPU."""
    host_gb_s: float | None = None
    """Bytes to pinned memory of the host while as many come back; None on the CPU."""
    scan_tflops: Mapping[str, float] = field(default_factory=dict)
    """Recurrences of one document, forward and backward, by the kind of layer with a state whose
    kernels are installed."""


def measure_rates(device: str | None = None) -> Rates:
    """Measures the GPU in bf16 or the CPU in fp32; without ``device`` the GPU if there is one."""
    cuda = torch.cuda.is_available() if device is None else device == "cuda"
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    size = 8192 if cuda else 2048
    num_tokens, hidden, ffn = (16384, 4096, 11008) if cuda else (1024, 1024, 4096)
    num_heads, length = (32, 4096) if cuda else (8, 4096)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    clock = Clock(torch.device(device))

    def best_s(run: Callable[[], object]) -> float:
        run()
        return min(clock(run) for _ in range(NUM_REPEATS)) / 1e6

    square = random(size, size)
    square_s = best_s(lambda: square @ square)
    tokens, weight = random(num_tokens, hidden), random(hidden, ffn)
    linear_s = best_s(lambda: tokens @ weight)
    head_dim = 128 if cuda else 64
    query, key, value = random(3, 1, num_heads, length, head_dim)
    attention_s = best_s(lambda: scaled_dot_product_attention(query, key, value, is_causal=True))
    numbers = random(2**28 if cuda else 2**25)
    result = torch.empty_like(numbers)
    copy_s = best_s(lambda: result.copy_(numbers))
    elementwise_s = best_s(lambda: silu(numbers, inplace=True))
    kernel_us, launch_us = _kernel_us() if cuda else (None, None)
    from megatron_wlb.runtime.measuring.scan_rates import scan_tflops  # Megatron, on that device

    moved = 2 * numbers.numel() * numbers.element_size()
    return Rates(
        torch.cuda.get_device_name() if cuda else "cpu",
        str(dtype).removeprefix("torch."),
        torch.get_num_threads(),
        2 * size**3 / square_s / 1e12,
        2 * num_tokens * hidden * ffn / linear_s / 1e12,
        2 * num_heads * head_dim * length**2 / attention_s / 1e12,
        moved / copy_s / 1e9,
        moved / elementwise_s / 1e9,
        kernel_us,
        launch_us,
        _host_gb_s(best_s) if cuda else None,
        scan_tflops(random, best_s, num_tokens),
    )


def _host_gb_s(best_s: Callable[[Callable[[], object]], float]) -> float:
    """10⁹ B/s each way between the device and pinned memory, while both ways are busy."""
    out, back = (torch.empty(2**28, dtype=torch.uint8, device="cuda") for _ in range(2))
    slabs = [torch.empty_like(out, device="cpu", pin_memory=True) for _ in range(2)]
    ways = (slabs[0], out), (back, slabs[1])
    streams = [torch.cuda.Stream() for _ in ways]  # type: ignore[no-untyped-call]

    def both() -> None:
        here = torch.cuda.current_stream()
        for stream, (target, source) in zip(streams, ways, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            here.wait_stream(stream)

    return out.numel() / best_s(both) / 1e9


def _kernel_us() -> tuple[float, float]:
    """µs of a kernel without work on the GPU, and of its launch on the host.

    The same chain of operations is replayed from a CUDA graph, which needs no host, and run forward
    and backward by Python, which a GPU without other work waits for.
    """
    numbers = torch.randn(SMALL, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def chain() -> torch.Tensor:
        out = numbers
        for _ in range(NUM_LINKS):
            out = silu(out)
        return out

    def host_s() -> float:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        torch.autograd.backward(chain(), numbers.detach())
        torch.cuda.synchronize()
        return time.perf_counter() - start_s

    host_s()
    launch_us = min(host_s() for _ in range(NUM_REPEATS)) / (2 * NUM_LINKS) * 1e6
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        chain()
    clock = Clock(numbers.device)
    clock(graph.replay)
    return min(clock(graph.replay) for _ in range(NUM_REPEATS)) / NUM_LINKS, launch_us


def machine_name(device: str) -> str:
    """The GPU, or the processors and how many threads torch uses, where Linux tells them."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processors = f"{len(names)} × {names[0]}" if names else "CPU"
    return f"{processors}, torch {torch.__version__}, num_threads {torch.get_num_threads()}"
