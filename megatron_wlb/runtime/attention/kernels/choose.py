"""Which kernel runs: the first that all ranks can run and that computes right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.attention.kernels import (
    flash,
    sdpa,
    torch_cpu,
    torch_varlen,
    transformer_engine,
)
from megatron_wlb.runtime.attention.kernels.base import Demand, Segments, VarlenKernel
from megatron_wlb.runtime.transfer import of_all_ranks

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

    def make(self, demand: Demand) -> VarlenKernel | str:
        """The kernel, checked; or in one line why this process cannot run it.

        Whatever a package fails with is such a reason: an error would leave other ranks waiting.
        """
        try:
            reason = self.obstacle(demand)
            if reason is not None:
                return reason
            kernel = self.build(demand)
        except Exception as error:
            return f"it cannot be set up ({_one_line(error)})"
        return kernel if self.is_reference else check_kernel(kernel, demand) or kernel


CANDIDATES: dict[str, Candidate] = {
    "flash-attn-3": Candidate(partial(flash.obstacle, 3), partial(flash.build, 3)),
    "torch": Candidate(torch_varlen.obstacle, torch_varlen.build),
    "flash-attn-2": Candidate(partial(flash.obstacle, 2), partial(flash.build, 2)),
    "transformer-engine": Candidate(transformer_engine.obstacle, transformer_engine.build),
    "torch-cpu": Candidate(
        torch_cpu.obstacle, lambda _: torch_cpu.torch_cpu_varlen, breaks=torch_cpu.BREAKS
    ),
    "sdpa": Candidate(lambda _: None, lambda _: sdpa.sdpa_varlen, is_reference=True),
}
"""Fastest first; what ``auto`` takes first that can run."""

PROBLEMS = (
    ((5, 130, 1, 64), (5, 203, 90, 64)),
    # The longest are equal, and 64 divides them: cuDNN's kernels, of all that TransformerEngine
    # may choose, take only such ones in some versions, and in some align them to the top left.
    ((128, 64, 1, 37), (128, 128, 64, 37)),
)
"""Query and key lengths of the segments that a kernel is checked with."""


def choose_kernel(name: str, demand: Demand) -> VarlenKernel:
    """The kernel called ``name``, or with ``auto`` the first of :data:`CANDIDATES` that can run.

    A kernel runs only after :func:`check_kernel`. One log line says which one runs, and why no
    faster one. In a world of ranks all of them call this (before Megatron builds chunks, in which
    ranks wait for each other) and get the same kernel, one that all can run: another would compute
    other numbers, and a slower one would make all others wait.

    Raises:
        CompatibilityError: on every rank, if the named kernel cannot run this on any, with the
            reason, or if ranks name different ones.
    """
    passed_over: dict[str, list[str]] = {}
    if len(set(names := of_all_ranks(name))) > 1:
        raise CompatibilityError(
            f"--wlb-attention-kernel differs over ranks ({', '.join(dict.fromkeys(names))}); give "
            "the same to all"
        )
    for candidate_name, candidate in CANDIDATES.items():
        if name not in ("auto", candidate_name):
            continue
        made = candidate.make(demand)
        reason = _reason_of_all(made if isinstance(made, str) else None)
        if reason is None:
            assert not isinstance(made, str)
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
            return made
        passed_over.setdefault(reason, []).append(candidate_name)
        if name != "auto":
            raise CompatibilityError(
                f"--wlb-attention-kernel {name} cannot run: {reason}; leave it at auto, or install "
                "what is missing"
            )
    known = ", ".join(["auto", *CANDIDATES])
    raise CompatibilityError(f"--wlb-attention-kernel {name} is not known; use one of {known}")


def _reason_of_all(reason: str | None) -> str | None:
    """The first reason of any rank, equal on all ranks; it says whose it is unless all have it."""
    reasons = of_all_ranks(reason)
    if len(set(reasons)) == 1:
        return reason
    rank, first = next((rank, said) for rank, said in enumerate(reasons) if said is not None)
    return f"on rank {rank} {first}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def check_kernel(kernel: VarlenKernel, demand: Demand) -> str | None:
    """What ``kernel`` does wrong on small problems with segments of all kinds, or None.

    Some versions take segments with more keys than queries and align their mask to the top left.
    Compared in fp32, output and gradients, with tolerances of the demanded dtype. Takes
    milliseconds; the random-number streams are left alone.
    """
    for lengths_q, lengths_k in PROBLEMS:
        reason = _mistake(kernel, demand, Segments.of(lengths_q, lengths_k, demand.device))
        if reason is not None:
            return reason
    return None


def _mistake(kernel: VarlenKernel, demand: Demand, segments: Segments) -> str | None:
    generator = torch.Generator().manual_seed(0)

    def draw(num_tokens: int, num_heads: int) -> torch.Tensor:
        values = torch.randn(num_tokens, num_heads, demand.head_dim, generator=generator)
        return values.to(demand.device, demand.dtype)

    query = draw(sum(segments.lengths_q), demand.num_heads)
    # Keys and values are strided halves of one tensor, as under context parallelism.
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
    except Exception as error:
        return f"it fails on a small problem ({_one_line(error)})"
    expected = run(sdpa.sdpa_varlen, torch.float32)
    tolerance = 8 * torch.finfo(demand.dtype).eps
    for what, a, b in zip(("output", "dQ", "dK and dV"), found, expected, strict=True):
        off = float((a - b).abs().max() / b.abs().max())
        if not off <= tolerance:
            return f"its {what} is wrong on a small problem, by {off:.1e} of the largest value"
    return None
