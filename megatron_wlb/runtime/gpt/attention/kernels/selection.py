"""Which kernel runs: the fastest that all ranks can run and that computes right."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.device_clock import Clock
from megatron_wlb.runtime.gpt.attention.kernels import (
    flash,
    sdpa,
    torch_cpu,
    torch_varlen,
    transformer_engine,
)
from megatron_wlb.runtime.gpt.attention.kernels.kernel import (
    Demand,
    Segments,
    VarlenKernel,
    with_wide_values,
)
from megatron_wlb.runtime.ranks.transfer import of_all_ranks

logger = logging.getLogger(__name__)

Verdict: TypeAlias = str | float
"""Why a kernel cannot run, or its time in ms."""


class ChosenKernel(NamedTuple):
    """A kernel that all ranks run, and what it is called."""

    name: str
    kernel: VarlenKernel
    """The kernel, which drops nothing."""
    dropping: VarlenKernel | None = None
    """The same kernel where dropout is demanded; None where none is."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that may be there."""

    obstacle: Callable[[Demand], str | None]
    """Why it cannot run what is demanded, or None."""
    build: Callable[[Demand], VarlenKernel]
    build_lse: Callable[[Demand], VarlenKernel] | None = None
    """Makes it of a package's inner functions, which other versions may lack; tried first."""
    is_reference: bool = False
    """Whether others are compared with it, not it with others."""
    breaks: tuple[int, ...] = ()
    """Numbers of queries from which on it computes in larger blocks."""

    def make(self, demand: Demand) -> VarlenKernel | str:
        """The kernel with the demanded dropout, checked; or in one line why this process cannot
        run it.

        Where values are narrower than keys, and it cannot run that or computes it wrong, the values
        are filled up. Whatever a package fails with is such a reason: an error would leave other
        ranks waiting.
        """
        try:
            reason = self.obstacle(demand)
            if reason is not None:
                return reason
            check = check_dropout if demand.dropout else check_kernel
            if self.build_lse is not None and not demand.dropout:
                try:
                    made = _checked(self.build_lse(demand), demand, check)
                except Exception as error:
                    made = _one_line(error)
                if not isinstance(made, str):
                    return made
                name = next((name for name, known in CANDIDATES.items() if known is self), "it")
                logger.info(
                    "%s returns no log-sum-exps, so attention gets no head start: %s", name, made
                )
            kernel = self.build(demand)
            if self.is_reference and not demand.dropout:
                return kernel
            return _checked(kernel, demand, check)
        except Exception as error:
            return f"it cannot be set up ({_one_line(error)})"


def _checked(
    kernel: VarlenKernel, demand: Demand, check: Callable[[VarlenKernel, Demand], str | None]
) -> VarlenKernel | str:
    """``kernel``, or the same with values filled up, or what is wrong with it."""
    reason = check(kernel, demand)
    if reason is not None and demand.value_dim < demand.head_dim:
        kernel = with_wide_values(kernel)
        reason = check(kernel, demand)
    return reason or kernel


CANDIDATES: dict[str, Candidate] = {
    "flash-attn-3": Candidate(
        partial(flash.obstacle, 3), partial(flash.build, 3), partial(flash.build_lse, 3)
    ),
    "transformer-engine": Candidate(transformer_engine.obstacle, transformer_engine.build),
    "torch": Candidate(torch_varlen.obstacle, torch_varlen.build),
    "flash-attn-2": Candidate(
        partial(flash.obstacle, 2), partial(flash.build, 2), partial(flash.build_lse, 2)
    ),
    "torch-cpu": Candidate(
        torch_cpu.obstacle, lambda _: torch_cpu.torch_cpu_varlen, breaks=torch_cpu.BREAKS
    ),
    "sdpa": Candidate(lambda _: None, sdpa.build, is_reference=True),
}
"""What ``auto`` takes first that can run, where kernels are not timed or are equally fast."""

PROBLEMS = (
    ((5, 130, 1, 64), (5, 203, 90, 64)),
    # The longest are equal, and 64 divides them: cuDNN's kernels, of all that TransformerEngine
    # may choose, take only such ones in some versions, and in some align them to the top left.
    ((128, 64, 1, 37), (128, 128, 64, 37)),
)
"""Query and key lengths of the segments that a kernel is checked with."""
LARGE_PROBLEM = ((3001,), (9001,))
"""The same on a GPU, where kernels may compute long slices otherwise: alone, as its numbers are
smaller than those of short segments."""
CHECKED_REACH = 50
"""Keys that a query sees in the checks of a sliding window, besides those demanded, of which so
short segments may have no more."""

TIMED_PROBLEM = (
    (4096, 1531, 1024, 700, 333, 257, 251),
    (8192, 1531, 1024, 700, 333, 257, 7001),
)
"""The lengths that it is timed with: whole documents, the later half of one of 8192 tokens, and a
short late slice."""
NUM_WARM_UPS, NUM_TIMED = 3, 15
"""Passes: packages compile and choose in the first ones."""
TIE = 0.03
"""By how much a faster kernel must be faster than one before it in :data:`CANDIDATES`."""


def choose_kernel(name: str, demand: Demand) -> ChosenKernel:
    """The kernel called ``name``, or with ``auto`` the fastest that can run.

    A kernel runs only after :func:`check_kernel`, and with dropout after :func:`check_dropout`. On
    a GPU ``auto`` times all that pass; a kernel is as slow as on its slowest rank. On the CPU it
    takes the first of :data:`CANDIDATES`, so that it is the same in each run. One log line says
    which one runs, the times, and why none before it in the table. In a world of ranks all of them
    call this (before Megatron builds chunks, in which ranks wait for each other) and get the same
    kernel, one that all can run: another would compute other numbers, and a slower one would make
    all others wait. They talk once.

    Raises:
        CompatibilityError: on every rank, if the named kernel cannot run this on any, with the
            reason, or if ranks name different ones.
    """
    kernels: dict[str, ChosenKernel] = {}
    mine: dict[str, Verdict] = {}
    for candidate_name, candidate in CANDIDATES.items():
        if name not in ("auto", candidate_name):
            continue
        made = _made(candidate_name, demand)
        if isinstance(made, str):
            mine[candidate_name] = made
            continue
        kernels[candidate_name] = made
        mine[candidate_name] = 0.0
        if name == "auto" and demand.device.type == "cuda":
            # The reference is for where no other runs.
            mine[candidate_name] = (
                math.inf if candidate.is_reference else _timed(made.dropping or made.kernel, demand)
            )
    names, verdicts = zip(*of_all_ranks((name, mine)), strict=True)
    if len(set(names)) > 1:
        raise CompatibilityError(
            f"--wlb-attention-kernel differs over ranks ({', '.join(dict.fromkeys(names))}); give "
            "the same to all"
        )
    if not mine:
        known = ", ".join(["auto", *CANDIDATES])
        raise CompatibilityError(f"--wlb-attention-kernel {name} is not known; use one of {known}")
    agreed = {called: _of_all([ours[called] for ours in verdicts]) for called in mine}
    times_ms = {called: said for called, said in agreed.items() if not isinstance(said, str)}
    if not times_ms:
        raise CompatibilityError(
            f"--wlb-attention-kernel {name} cannot run: {agreed[name]}; leave it at auto, or "
            "install what is missing"
        )
    slowest_ms = min(times_ms.values()) * (1 + TIE)
    chosen = next(called for called, time_ms in times_ms.items() if time_ms <= slowest_ms)
    logger.info(
        "attention kernel: %s (%s, %s, %d query and %d key/value heads of %s)%s",
        chosen,
        demand.device.type,
        str(demand.dtype).removeprefix("torch."),
        demand.num_heads,
        demand.num_groups,
        demand.head_dim
        if demand.value_dim == demand.head_dim
        else f"{demand.head_dim} and {demand.value_dim}",
        "".join(f"; {why}" for why in _reasons(chosen, agreed))
        if name == "auto"
        else "; as demanded",
    )
    if demand.dropout and times_ms[chosen] == math.inf:
        logger.warning(
            "attention runs %s, which may hold the probabilities of all pairs, because no kernel "
            "of packed attention can run here with --attention-dropout %g; train in bf16, install "
            "flash-attn 2 or TransformerEngine, or give --attention-dropout 0",
            chosen,
            demand.dropout,
        )
    return kernels[chosen]


def agreed_kernel(name: str, demand: Demand) -> ChosenKernel:
    """The kernel that :func:`choose_kernel` gave, for another demand; ranks do not talk.

    Raises :class:`CompatibilityError` where it cannot run this.
    """
    made = _made(name, demand)
    if isinstance(made, str):
        raise CompatibilityError(
            f"attention kernel {name} cannot run {demand.num_heads} query heads ({made}); "
            "name another with --wlb-attention-kernel"
        )
    return made


def _made(name: str, demand: Demand) -> ChosenKernel | str:
    """A candidate without dropout, and with it if that is demanded; or why it cannot run."""
    made = CANDIDATES[name].make(replace(demand, dropout=0.0))
    dropping = CANDIDATES[name].make(demand) if demand.dropout else None
    if isinstance(made, str):
        return made
    return dropping if isinstance(dropping, str) else ChosenKernel(name, made, dropping)


def _reasons(chosen: str, agreed: Mapping[str, Verdict]) -> list[str]:
    """The kernels' times, and why those before the chosen one cannot run."""
    measured = [
        f"{name} {said:.2f} ms"
        for name, said in agreed.items()
        if not isinstance(said, str) and 0 < said < math.inf
    ]
    reasons = []
    if measured:
        num_tokens = sum(TIMED_PROBLEM[0])
        reasons = [f"forward and backward of {num_tokens} tokens: {', '.join(measured)}"]
    passed_over: dict[str, list[str]] = {}
    for name, said in agreed.items():
        if name == chosen:
            break
        if isinstance(said, str):
            passed_over.setdefault(said, []).append(name)
    return [*reasons, *(f"not {' or '.join(n)}: {reason}" for reason, n in passed_over.items())]


def _of_all(verdicts: Sequence[Verdict]) -> Verdict:
    """The longest time, or any rank's first reason, which says whose it is unless all have it."""
    times_ms = [said for said in verdicts if not isinstance(said, str)]
    if len(times_ms) == len(verdicts):
        return max(times_ms)
    rank, first = next((rank, said) for rank, said in enumerate(verdicts) if isinstance(said, str))
    return first if set(verdicts) == {first} else f"on rank {rank} {first}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def check_kernel(kernel: VarlenKernel, demand: Demand) -> str | None:
    """What ``kernel`` does wrong on small problems with segments of all kinds, or None.

    Some versions take segments with more keys than queries and align their mask to the top left. If
    a sliding window is demanded, it is tried as well. Compared in fp32, output and gradients, with
    tolerances of the demanded dtype. Takes milliseconds; the random-number streams are left alone.
    """
    for reach in _reaches(demand):
        for lengths in problems(demand):
            problem = Problem.of(demand, *lengths, reach)
            reason = problem.mistake(partial(problem.solve, kernel, demand.dtype))
            if reason is not None:
                return reason if reach is None else f"with a sliding window {reason}"
    return None


def problems(demand: Demand) -> tuple[tuple[Sequence[int], Sequence[int]], ...]:
    """The lengths that a kernel is checked with on the demanded device."""
    return (*PROBLEMS, LARGE_PROBLEM) if demand.device.type == "cuda" else PROBLEMS


def _reaches(demand: Demand) -> list[int | None]:
    """The reaches to try: none, as some layers may have, and the one that is demanded."""
    if demand.reach_tokens is None:
        return [None]
    wanted = max(2, demand.reach_tokens)  # Of one key, queries' gradients are rounding alone.
    return [None, *sorted({min(wanted, CHECKED_REACH), wanted})]


DROPPED_DOCUMENTS = 8
"""Documents of the problem that dropout is checked with, each as long as a value's head is wide."""
DROPPED_OFF = 1 / 128
"""By how much the dropped share may be off, besides chance: kernels compare 8 random bits."""


def check_dropout(kernel: VarlenKernel, demand: Demand) -> str | None:
    """What the dropout of ``kernel`` does wrong on a small problem, or None.

    The values are rows of the identity. So the output is the probabilities, which shows the dropped
    ones: they must be as many as demanded, and output and gradients must be those of the others. It
    draws alike each time; the random-number streams are left alone.
    """
    return next(filter(None, (_dropout(kernel, demand, reach) for reach in _reaches(demand))), None)


def _dropout(kernel: VarlenKernel, demand: Demand, reach_tokens: int | None) -> str | None:
    lengths = [demand.value_dim] * DROPPED_DOCUMENTS
    problem = Problem.of(demand, lengths, lengths, reach_tokens)
    values = torch.eye(demand.value_dim, device=demand.device).repeat(DROPPED_DOCUMENTS, 1)
    problem.pair[:, 1, :, : demand.value_dim] = values.unsqueeze(1)
    try:
        with _drawn_alike(demand.device):
            found = problem.solve(kernel, demand.dtype)
    except Exception as error:
        return f"it fails with dropout on a small problem ({_one_line(error)})"

    def by_document(tensor: torch.Tensor) -> torch.Tensor:  # [Tq, H, D] -> [documents, H, q, D]
        return tensor.view(DROPPED_DOCUMENTS, -1, *tensor.shape[1:]).transpose(1, 2)

    is_kept = by_document(found[0] != 0)  # [documents, H, q, k]
    is_seen = torch.ones(is_kept.shape[-2:], dtype=torch.bool, device=demand.device).tril()
    is_seen = is_seen.triu(1 - (reach_tokens or demand.value_dim))
    seen = is_kept[:, :, is_seen]
    share, expected = 1 - seen.float().mean().item(), demand.dropout
    if abs(share - expected) > DROPPED_OFF + 6 * math.sqrt(expected / seen.numel()):
        return f"it drops {share:.4f} of attention's probabilities where {expected} is asked for"

    def dropped(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Segments,
        scale: float,
    ) -> torch.Tensor:
        times = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(times, dim=1) for t in (key, value))
        q, k, v = (by_document(t) for t in (query, key, value))
        scores = (q @ k.mT * scale).masked_fill(~is_seen, -math.inf)
        out: torch.Tensor = scores.softmax(-1) * is_kept / (1 - demand.dropout) @ v
        return out.transpose(1, 2).flatten(0, 1)

    return problem.mistake(lambda: found, dropped)


@contextlib.contextmanager
def _drawn_alike(device: torch.device) -> Iterator[None]:
    """Starts the device's random numbers at a known place, and leaves them as they were."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([torch.cuda.current_device()] if is_cuda else []):
        torch.cuda.manual_seed(0) if is_cuda else torch.default_generator.manual_seed(0)
        yield


@contextlib.contextmanager
def _any_algorithm() -> Iterator[None]:
    """Lets torch compute without being deterministic, for which cuBLAS asks for an environment."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


@dataclass(frozen=True, slots=True)
class Problem:
    """Inputs of a kernel, drawn alike each time."""

    query: torch.Tensor
    pair: torch.Tensor
    """Keys and values are strided halves of one tensor, as under context parallelism. Values may be
    narrower than their half."""
    grad: torch.Tensor
    """The output's gradient."""
    segments: Segments

    @classmethod
    def of(
        cls,
        demand: Demand,
        lengths_q: Sequence[int],
        lengths_k: Sequence[int],
        reach_tokens: int | None = None,
    ) -> Problem:
        """Segments of so many queries and keys, or of the keys in reach."""
        generator = torch.Generator(demand.device).manual_seed(0)
        if reach_tokens is not None:
            both = zip(lengths_q, lengths_k, strict=True)
            lengths_k = [min(k, q + reach_tokens - 1) for q, k in both]

        def draw(lengths: Sequence[int], *heads: int, dim: int = demand.head_dim) -> torch.Tensor:
            shape = (sum(lengths), *heads, dim)
            values = torch.randn(shape, generator=generator, device=demand.device)
            return values.to(demand.dtype)

        return cls(
            draw(lengths_q, demand.num_heads),
            draw(lengths_k, 2, demand.num_groups),
            draw(lengths_q, demand.num_heads, dim=demand.value_dim),
            Segments.of(lengths_q, lengths_k, demand.device, reach_tokens),
        )

    def solve(self, kernel: VarlenKernel, dtype: torch.dtype) -> list[torch.Tensor]:
        """Output, dQ, and dK with dV."""
        query, pair = inputs = [
            t.to(dtype).detach().requires_grad_() for t in (self.query, self.pair)
        ]
        scale = query.shape[-1] ** -0.5
        value = pair[:, 1, :, : self.grad.shape[-1]]
        out = kernel(query, pair[:, 0], value, self.segments, scale)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.grad.to(dtype))]

    def mistake(
        self,
        solve: Callable[[], list[torch.Tensor]],
        reference: VarlenKernel = sdpa.sdpa_varlen,
    ) -> str | None:
        """What is wrong with a solution, or None."""
        try:
            found = solve()
        except Exception as error:
            return f"it fails on a small problem ({_one_line(error)})"
        try:
            with _any_algorithm():
                expected = self.solve(reference, torch.float32)
        except Exception as error:
            return f"it cannot be compared on a small problem ({_one_line(error)})"
        tolerance = 8 * torch.finfo(self.query.dtype).eps
        for what, a, b in zip(("output", "dQ", "dK and dV"), found, expected, strict=True):
            off = float((a.float() - b).abs().max() / b.abs().max())
            if not off <= tolerance:
                return f"its {what} is wrong on a small problem, by {off:.1e} of the largest value"
        return None


def _timed(kernel: VarlenKernel, demand: Demand) -> Verdict:
    """The kernel's time, or why it has none."""
    try:
        with _drawn_alike(demand.device):
            return time_ms(kernel, demand)
    except Exception as error:  # as in Candidate.make
        return f"it fails on a problem of {sum(TIMED_PROBLEM[0])} tokens ({_one_line(error)})"


def time_ms(
    kernel: VarlenKernel, demand: Demand, lengths: Sequence[Sequence[int]] = TIMED_PROBLEM
) -> float:
    """Times one forward and backward pass, in ms: the least of several.

    On a GPU it is the GPU's time: for few heads some packages take the host longer, which is ahead
    in training. Takes some tens of passes, a tenth of a second on a GPU for 32 heads of 128, and as
    much memory as attention in one layer; that is given back.
    """
    lengths_q, lengths_k = lengths
    problem = Problem.of(demand, lengths_q, lengths_k, demand.reach_tokens)
    solve = partial(problem.solve, kernel, demand.dtype)
    clock = Clock(demand.device, of_processor=False)
    for _ in range(NUM_WARM_UPS):
        clock(solve)
    least_us = min(clock(solve) for _ in range(NUM_TIMED))
    del problem, solve
    if demand.device.type == "cuda":
        torch.cuda.empty_cache()
    return least_us / 1e3
