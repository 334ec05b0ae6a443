"""Computes attention by its definition, in slices, and that of all CP ranks on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from megatron_wlb.plan.sharding import Sharding, rank_layout
from megatron_wlb.runtime.gpt.attention import key_exchange
from megatron_wlb.runtime.gpt.attention.context_parallel import context_attention
from megatron_wlb.runtime.gpt.attention.joined_rows import RowsSeen
from megatron_wlb.runtime.gpt.attention.kernels import Segments, VarlenKernel
from megatron_wlb.runtime.gpt.attention.key_exchange import ContextParallel, KeyGather
from megatron_wlb.runtime.gpt.attention.slice_attention import (
    KVSlice,
    LayerSlice,
    SliceStore,
    slice_attention,
)


@contextmanager
def packed_on_cpu(forward: Callable[..., Any], backward: Callable[..., Any]) -> Iterator[None]:
    """torch's operations for packed segments, which it has for GPUs alone, on the CPU."""
    register: Any = torch.library.Library
    library = register("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


def document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    scale: float,
    reach_tokens: int | None = None,
) -> torch.Tensor:
    """Each segment alone, its scores written out: ``[Tq, H, D], [Tk, G, D] ×2 -> [Tq, H, D]``.

    Query ``i`` of a segment sees keys ``0 … k - q + i``, the last ``reach_tokens`` of them.
    """
    outputs = []
    first_q = first_k = 0
    for num_q, num_k in zip(lengths_q, lengths_k, strict=True):
        q = query[first_q : first_q + num_q]
        # Query head h takes key/value head h // (H / G).
        repeats = query.shape[1] // key.shape[1]
        k = key[first_k : first_k + num_k].repeat_interleave(repeats, dim=1)
        v = value[first_k : first_k + num_k].repeat_interleave(repeats, dim=1)
        first_q, first_k = first_q + num_q, first_k + num_k
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        at_key = torch.arange(num_k, device=query.device)[None, :]
        at_query = torch.arange(num_k - num_q, num_k, device=query.device)[:, None]
        seen = at_key <= at_query
        if reach_tokens is not None:
            seen &= at_query - at_key < reach_tokens
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scale: float,
    causal: bool,
    factors: Callable[[torch.Tensor], torch.Tensor] = torch.ones_like,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp ``[H, Tq]`` by their definition, as flash kernels give them.

    ``factors`` gives those of a segment's probabilities, ``[H, q, k]``: dropout's.
    """
    outputs, lses = [], []
    for q, _, v, scores in _scores(query, key, value, segments, scale, causal):
        weights = scores.softmax(dim=-1) * factors(scores)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype))
        lses.append(scores.logsumexp(dim=-1))
    return torch.cat(outputs), torch.cat(lses, dim=1)


def flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    scale: float,
    causal: bool,
    factors: Callable[[torch.Tensor], torch.Tensor] = torch.ones_like,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients by the output and log-sum-exp that are given, as flash kernels compute them."""
    parts: list[list[torch.Tensor]] = [[], [], []]
    lengths = list(segments.lengths_q)
    for (q, k, v, scores), g, o, total in zip(
        _scores(query, key, value, segments, scale, causal),
        torch.split(grad, lengths),
        torch.split(out, lengths),
        torch.split(lse, lengths, dim=1),
        strict=True,
    ):
        weights = (scores - total.unsqueeze(-1)).exp()
        delta = (g * o).sum(-1).t().unsqueeze(-1)
        factor = factors(scores)
        d_scores = weights * (torch.einsum("qhd,khd->hqk", g, v) * factor - delta) * scale
        parts[0].append(torch.einsum("hqk,khd->qhd", d_scores, k))
        shared = (
            torch.einsum("hqk,qhd->khd", d_scores, q),
            torch.einsum("hqk,qhd->khd", weights * factor, g),
        )
        for kept, heads in zip(parts[1:], shared, strict=True):
            kept.append(heads.view(len(heads), key.shape[1], -1, key.shape[2]).sum(2))
    return tuple(torch.cat(part).to(query.dtype) for part in parts)  # type: ignore[return-value]


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scale: float,
    causal: bool,
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Each segment's query, key and value, a head of all for each query head, and its scores."""
    heads = [t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value)]
    for q, k, v in zip(
        torch.split(query, list(segments.lengths_q)),
        *(torch.split(t, list(segments.lengths_k)) for t in heads),
        strict=True,
    ):
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        if segments.reach_tokens is not None:
            seen = seen.triu(len(k) - len(q) + 1 - segments.reach_tokens)
        yield q, k, v, scores.masked_fill(~seen, -torch.inf) if causal else scores


def by_definition(
    inputs: Sequence[torch.Tensor],
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    scale: float,
    dtype: torch.dtype,
    reach_tokens: int | None = None,
) -> list[torch.Tensor]:
    """Output, dQ, dK and dV of :func:`document_attention` in ``dtype``; ``inputs`` are query, key,
    value and the output's gradient.
    """
    query, key, value, grad = (t.to(dtype) for t in inputs)
    query, key, value = leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    out = document_attention(query, key, value, lengths_q, lengths_k, scale, reach_tokens)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def errors_over_bf16(
    found: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    scale: float,
    reach_tokens: int | None = None,
) -> list[float]:
    """Errors of output, dQ, dK and dV over those of the definition itself in bf16."""
    rest = lengths_q, lengths_k, scale
    exact = by_definition(inputs, *rest, torch.float64, reach_tokens)
    plain = by_definition(inputs, *rest, torch.bfloat16, reach_tokens)
    return [
        float((ours.double() - true).norm() / (reference.double() - true).norm())
        for ours, reference, true in zip(found, plain, exact, strict=True)
    ]


def in_slices(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad: torch.Tensor,
    cuts: Sequence[int],
    kernel: VarlenKernel,
    scale: float,
    reach_tokens: int | None = None,
    joined_from: int = 2,
) -> list[torch.Tensor]:
    """Output, dQ, dK and dV of one document in slices: ``cuts`` are 0, where each stops, and ``L``.

    ``[L, H, D]`` for query and ``grad``, the output's gradient; ``[L, G, D]`` for key and value.
    """
    store = SliceStore()
    passes = []
    for start, stop in pairwise(cuts):
        q, k, v = (t[start:stop].detach().requires_grad_() for t in (query, key, value))
        in_reach = min(stop, stop - start + (reach_tokens or stop) - 1)
        chunk = Segments.of([stop - start], [in_reach], query.device, reach_tokens)
        cut = KVSlice(store, (0, 0), start, stop, cuts[-1], (chunk,), (stop - in_reach,))
        if joined_from == 1:
            own = Segments.of([stop - start], device=query.device)
            rows = slice(0, start), [slice(0, stop - start)]
            before = RowsSeen.of(*rows, query.device) if start else None
            cut = replace(cut, own=own, before=before)
        run = LayerSlice(cut, 1, kernel, scale, joined_from=joined_from)
        out = slice_attention(q, k, v, run)
        passes.append((out, (q, k, v), grad[start:stop]))
    gradients = [torch.autograd.grad(*of_slice) for of_slice in reversed(passes)]
    store.end()
    outputs = torch.cat([out.detach() for out, _, _ in passes])
    return [outputs, *(torch.cat(parts[::-1]) for parts in zip(*gradients, strict=True))]


def ranks_in_turn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad: torch.Tensor,
    lengths: Sequence[int],
    cp_size: int,
    sharding: Sharding,
    kernel: VarlenKernel,
    scale: float,
) -> list[torch.Tensor]:
    """Output, dQ, dK and dV of all tokens, each rank's attention run in turn on this device.

    ``[T, H, D]`` for query and ``grad``, the output's gradient; ``[T, G, D]`` for key and value.
    Collectives are stood in for; what ranks would reduce is added up in fp32.
    """
    layouts = [rank_layout(lengths, cp_size, rank, sharding) for rank in range(cp_size)]
    tokens = [torch.from_numpy(layout.tokens).to(query.device) for layout in layouts]
    gathered = torch.stack((key, value), dim=1)[torch.cat(tokens)].detach()
    rows = torch.zeros_like(gathered, dtype=torch.float32)
    group, done = mock.Mock(**{"size.return_value": cp_size}), mock.Mock()

    def gather(out: torch.Tensor, _: torch.Tensor, **__: Any) -> Any:
        out.copy_(gathered)
        return done

    def reduce(out: torch.Tensor, summand: torch.Tensor, **_: Any) -> Any:
        rows.add_(summand)
        out.zero_()
        return done

    results = [torch.empty_like(query), torch.empty_like(query)]
    with mock.patch.multiple(key_exchange, all_gather=gather, reduce_scatter=reduce):
        for layout, local in zip(layouts, tokens, strict=True):
            q, k, v = (t[local].detach().requires_grad_() for t in (query, key, value))
            segments = Segments.of(
                layout.lengths_q.tolist(), layout.lengths_k.tolist(), query.device
            )
            index = KeyGather.of(layout, query.device)
            rest = segments, index, kernel, scale, group, ContextParallel()
            out = context_attention(q, k, v, *rest)
            results[0][local] = out.detach()
            results[1][local] = torch.autograd.grad(out, (q, k, v), grad[local])[0]
    by_token = torch.empty_like(rows)
    by_token[torch.cat(tokens)] = rows
    return [*results, by_token[:, 0].to(key.dtype), by_token[:, 1].to(key.dtype)]
