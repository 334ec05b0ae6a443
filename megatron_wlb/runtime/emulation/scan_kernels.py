"""The kernels of layers with a state, in torch: what Megatron takes of ``fla`` on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net

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
    for module in (gated_delta_net, *map(gated_delta_net.__dict__.get, ("common", "gdn"))):
        for name, value in kernels.items():
            if hasattr(module, name):
                patches.replace(module, name, value)


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
        query, key, value, gate, weight = (t.float().transpose(0, 1) for t in part)
        state = key.new_zeros(*q.shape[2:], v.shape[3])
        if initial_state is not None:
            state = initial_state[number]
        rows = []
        for chunk in zip(*(t.split(CHUNK, 1) for t in (query, key, value, gate, weight)),
                         strict=True):  # fmt: skip
            out, state = _chunk(*chunk, state)
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


def _documents(tensor: torch.Tensor, ends: torch.Tensor | None) -> list[torch.Tensor]:
    """The documents of a tensor ``[1, T, …]``."""
    return list(tensor[0].split(tensor.shape[1] if ends is None else ends.diff().tolist()))
