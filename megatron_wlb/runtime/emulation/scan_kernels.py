"""The kernels of layers with a state, in torch: what Megatron takes of ``fla`` on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.ssm import gated_delta_net, mamba_mixer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_wlb.runtime.compat.patching import PatchSet

CHUNK = 16
"""Tokens that the recurrence takes at once."""


def install_scans(patches: PatchSet) -> None:
    """Lets gated delta nets be built and run; ``patches`` restores it."""
    kernels = {
        "HAVE_FLA": True,
        "causal_conv1d": causal_conv1d,
        "chunk_gated_delta_rule": chunk_gated_delta_rule,
        "l2norm": l2norm,
    }
    # One module up to 0.18.
    modules = {getattr(gated_delta_net, name, gated_delta_net) for name in ("common", "gdn")}
    for module in {gated_delta_net} | modules:
        for name, value in kernels.items():
            if hasattr(module, name):
                patches.replace(module, name, value)
    for name, value in {
        "HAVE_MAMBA_SSM": True,
        "causal_conv1d_fn": causal_conv1d_fn,
        "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        "_check_mamba_sequence_packing_support": lambda **_: (True, None),
        "ExtendedRMSNorm": type(
            "ExtendedRMSNorm",
            (RMSNormGated,),
            {"sharded_state_dict": _sharded_norm},
        ),
    }.items():
        patches.replace(mamba_mixer, name, value)


def _sharded_norm(
    norm: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
) -> Any:
    group = getattr(norm, "tp_group", None) or get_tensor_model_parallel_group()  # up to 0.18
    return make_sharded_tensors_for_checkpoint(
        norm.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets,
        tp_group=group, dp_cp_group=metadata["dp_cp_group"],
    )  # fmt: skip


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """``fla``'s convolution: ``[1, T, C] -> [1, T, C]`` with weights ``[C, W]``. Each document
    comes after a state ``[C, W]``, of which its first token sees the last ``W - 1``.
    """
    channels, taps = weight.shape
    outs = []
    for number, rows in enumerate(_documents(x, cu_seqlens)):
        before = x.new_zeros(channels, taps - 1)
        if initial_state is not None:
            before = initial_state[number, :, 1:]
        whole = torch.cat([before, rows.t()], dim=1)
        outs.append(F.conv1d(whole[None], weight[:, None], bias, groups=channels)[0].t())
    out = torch.cat(outs)[None]
    return (F.silu(out) if activation else out), None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``fla``'s gated delta rule: ``[1, T, H, K] ×2, [1, T, H, V] -> [1, T, H, V]``, and the states
    ``[N, H, K, V]`` behind the documents.

    ``S ← S·exp(g) + k·(β·(v − kᵀ·S·exp(g)))ᵀ`` and ``o = Sᵀ·q ÷ √K`` a token (Yang et al. 2024,
    equation 10), chunk by chunk in their WY form.
    """
    outs, states = [], []
    parts = zip(*(_documents(t, cu_seqlens) for t in (q, k, v, g, beta)), strict=True)
    for number, part in enumerate(parts):
        query, key, value, gate, weight = (_exact(t).transpose(0, 1) for t in part)
        state = key.new_zeros(*q.shape[2:], v.shape[3])
        if initial_state is not None:
            state = initial_state[number]
        rows = []
        for q_, k_, v_, g_, beta_ in _chunks(query, key, value, gate, weight):
            out, state = _chunk(q_, k_, v_, g_, beta_, state)
            rows.append(out)
        outs.append(torch.cat(rows, 1).transpose(0, 1))
        states.append(state)
    made = torch.cat(outs)[None].to(q.dtype)
    return made, torch.stack(states) if output_final_state else None


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[H, c, K] ×2, [H, c, V], [H, c] ×2, [H, K, V]`` -> ``[H, c, V]`` and the next state."""
    g = g.cumsum(-1)
    decay = (g[:, :, None] - g[:, None]).tril().exp().tril()
    grown = g.exp()[..., None]
    lower = (beta[..., None] * k @ k.mT * decay).tril(-1)
    eye = torch.eye(q.shape[1], dtype=q.dtype)
    new = torch.linalg.solve_triangular(
        eye + lower, beta[..., None] * (v - k * grown @ state), upper=False, unitriangular=True
    )
    out = (q * grown @ state + (q @ k.mT * decay) @ new) * q.shape[-1] ** -0.5
    left = (k * (g[:, -1:] - g).exp()[..., None]).mT @ new
    return out, state * g[:, -1].exp()[:, None, None] + left


def l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6, **_: Any) -> torch.Tensor:
    """``fla``'s norm."""
    return x * torch.rsqrt((x * x).sum(dim, keepdim=True) + eps)


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """In fp32, as the kernels count, or what is more exact."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _documents(tensor: torch.Tensor, ends: torch.Tensor | None) -> list[torch.Tensor]:
    """The documents of a tensor ``[1, T, …]``."""
    lengths = tensor.shape[1] if ends is None else ends.diff().tolist()
    return list(torch.split(tensor[0], lengths))


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """So many tokens of each at once."""
    return zip(*(torch.split(tensor, CHUNK, 1) for tensor in tensors), strict=True)


class RMSNormGated(torch.nn.Module):
    """``mamba_ssm``'s norm in groups of numbers, without a gate, as Megatron calls it."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None,
        norm_before_gate: bool = True, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.eps, self.group_size = eps, group_size or hidden_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.float().reshape(*x.shape[:-1], -1, self.group_size)
        scaled = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (scaled.flatten(-2) * self.weight).to(x.dtype)


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """``causal_conv1d``'s function: ``[1, C, T] -> [1, C, T]``."""
    out, _none = causal_conv1d(x.transpose(1, 2), weight, bias, activation)
    return out.transpose(1, 2)


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    _chunk_size: int,
    D: torch.Tensor,
    z: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """``mamba_ssm``'s scan of one document: ``x, z [1, n, H, P], dt [1, n, H], B, C [1, n, G, N] ->
    [1, n, H, P]``, and the last state ``[1, H, P, N]``.

    ``S ← S·exp(Δ·A) + Δ·x·Bᵀ`` and ``y = S·C + D·x`` a token, with ``Δ = softplus(dt + bias)``
    (Dao and Gu 2024, section 6), then ``y·silu(z)``.
    """
    heads, repeats = x.shape[2], x.shape[2] // B.shape[2]
    step = F.softplus(_exact(dt[0]) + dt_bias).t()
    rows = _exact(x[0]).transpose(0, 1)
    keys, queries = (_exact(t[0]).repeat_interleave(repeats, 1).transpose(0, 1) for t in (B, C))
    state = rows.new_zeros(heads, x.shape[3], B.shape[3])
    if initial_states is not None:
        state = initial_states[0]
    outs = []
    for value, size, key, query in _chunks(rows, step, keys, queries):
        g = (size * A[:, None]).cumsum(-1)
        decay = (g[:, :, None] - g[:, None]).tril().exp().tril()
        weighted = value * size[..., None]
        outs.append((query @ key.mT * decay) @ weighted + (query * g.exp()[..., None]) @ state.mT)
        left = (weighted * (g[:, -1:] - g).exp()[..., None]).mT @ key
        state = state * g[:, -1].exp()[:, None, None] + left
    y = torch.cat(outs, 1).transpose(0, 1)
    skip = D if D.dim() > 1 else D[:, None]
    y = ((y + skip * _exact(x[0])) * F.silu(_exact(z[0])))[None].to(x.dtype)
    return (y, state[None]) if return_final_states else y


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    seq_idx: torch.Tensor | None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    **_: Any,
) -> torch.Tensor:
    """``mamba_ssm``'s fused layer: ``[1, T, 2·H·P + 2·G·N + H] -> [1, T, H·P]``, a document each
    run of equal ``seq_idx [1, T]``.
    """
    heads, channels = len(dt_bias), len(weight)
    inner = zxbcdt.shape[-1] - channels - heads
    size = zxbcdt.shape[1]
    ends = [size]
    if seq_idx is not None:
        ends = [*(seq_idx[0].diff().nonzero()[:, 0] + 1).tolist(), size]
    outs = []
    for begin, end in itertools.pairwise([0, *ends]):
        z, convolved, dt = torch.split(zxbcdt[:, begin:end], [inner, channels, heads], -1)
        out, _none = causal_conv1d(convolved, weight, bias, activation)
        x, b, c = torch.split(out, [inner, *[(channels - inner) // 2] * 2], -1)
        x, z = (t.reshape(*t.shape[:-1], heads, -1) for t in (x, z))
        b, c = (t.reshape(*t.shape[:-1], ngroups, -1) for t in (b, c))
        y = mamba_chunk_scan_combined(x, dt, A, b, c, chunk_size, D, z, dt_bias)
        outs.append(y.flatten(2))
    return torch.cat(outs, 1)
