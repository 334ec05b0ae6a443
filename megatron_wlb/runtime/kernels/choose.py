"""Which kernel runs: the first that can run what is demanded and computes it right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.kernels import flash, sdpa, torch_cpu, torch_varlen, transformer_engine
from megatron_wlb.runtime.kernels.base import Demand, Segments, VarlenKernel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that may be there."""

    obstacle: Callable[[Demand], str | None]
    """Why it cannot run what is demanded, or None."""
    build: Callable[[Demand], VarlenKernel]
    is_reference: bool = False
    """Whether others are compared with it, not it with others."""
    breaks: tuple[int, ...] = ()
    """Numbers of queries from which on it computes in larger blocks."""


CANDIDATES: dict[str, Candidate] = {
    "flash-attn-3": Candidate(flash.obstacle_3, flash.build_3),
    "torch": Candidate(torch_varlen.obstacle, torch_varlen.build),
    "flash-attn-2": Candidate(flash.obstacle_2, flash.build_2),
    "transformer-engine": Candidate(transformer_engine.obstacle, transformer_engine.build),
    "torch-cpu": Candidate(torch_cpu.obstacle, torch_cpu.build, breaks=torch_cpu.BREAKS),
    "sdpa": Candidate(sdpa.obstacle, sdpa.build, is_reference=True),
}
"""Fastest first; what ``auto`` takes first that can run."""


def choose_kernel(name: str, demand: Demand) -> VarlenKernel:
    """The kernel called ``name``, or with ``auto`` the first of :data:`CANDIDATES` that can run.

    A kernel runs only after a small problem, forward and backward, gave what it should: some
    versions take segments with more keys than queries and align their mask to the top left.
    One log line says which kernel runs, and why no faster one.

    Raises:
        CompatibilityError: the named kernel cannot run this, with the reason.
    """
    passed_over: dict[str, list[str]] = {}
    for candidate_name, candidate in CANDIDATES.items():
        if name not in ("auto", candidate_name):
            continue
        reason = candidate.obstacle(demand)
        if reason is None:
            kernel = candidate.build(demand)
            reason = None if candidate.is_reference else check_kernel(kernel, demand)
        if reason is None:
            why = "; ".join(
                f"not {' or '.join(names)}: {reason}" for reason, names in passed_over.items()
            )
            if name != "auto":
                why = "as demanded"
            logger.info(
                "attention kernel: %s (%s, %s, %d query and %d key/value heads of %d)%s",
                candidate_name,
                demand.device.type,
                str(demand.dtype).removeprefix("torch."),
                demand.num_heads,
                demand.num_groups,
                demand.head_dim,
                f"; {why}" if why else "",
            )
            return kernel
        passed_over.setdefault(reason, []).append(candidate_name)
        if name != "auto":
            raise CompatibilityError(
                f"--wlb-attention-kernel {name} cannot run: {reason}; leave it at auto, or install "
                "what is missing"
            )
    known = ", ".join(["auto", *CANDIDATES])
    raise CompatibilityError(f"--wlb-attention-kernel {name} is not known; use one of {known}")


def check_kernel(kernel: VarlenKernel, demand: Demand) -> str | None:
    """What ``kernel`` does wrong on a small problem with segments of all kinds, or None.

    Compared in fp32, output and gradients, with tolerances of the demanded dtype. Takes
    milliseconds; the random-number streams are left alone.
    """
    segments = Segments.of((5, 130, 1, 64), (5, 203, 90, 64), demand.device)
    generator = torch.Generator().manual_seed(0)

    def draw(num_tokens: int, num_heads: int) -> torch.Tensor:
        values = torch.randn(num_tokens, num_heads, demand.head_dim, generator=generator)
        return values.to(demand.device, demand.dtype)

    query = draw(sum(segments.lengths_q), demand.num_heads)
    # As attention under context parallelism has them: strided halves of one tensor.
    pair = torch.stack([draw(sum(segments.lengths_k), demand.num_groups) for _ in range(2)], dim=1)
    grad = draw(*query.shape[:2])
    scale = demand.head_dim**-0.5

    def run(function: VarlenKernel, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [t.to(dtype).detach().requires_grad_() for t in (query, pair)]
        out = function(inputs[0], inputs[1][:, 0], inputs[1][:, 1], segments, scale)
        gradients = torch.autograd.grad(out, inputs, grad.to(dtype))
        return [t.detach().float() for t in (out, *gradients)]

    try:
        found = run(kernel, demand.dtype)
    except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
        return f"it fails on a small problem ({' '.join(str(error).split())[:200]})"
    expected = run(sdpa.sdpa_varlen, torch.float32)
    tolerance = 8 * torch.finfo(demand.dtype).eps
    for what, a, b in zip(("output", "dQ", "dK and dV"), found, expected, strict=True):
        off = float((a - b).abs().max() / b.abs().max())
        if not off <= tolerance:
            return f"its {what} is wrong on a small problem, by {off:.1e} of the largest value"
    return None
