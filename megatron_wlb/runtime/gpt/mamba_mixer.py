"""Mamba-2 by document, whole or in slices: Megatron's layer ``M`` of a HybridModel.

The layer is Megatron's own, but for its one kernel, which looks up the micro-batch's documents
(:mod:`megatron_wlb.runtime.gpt.states`). It takes whole documents in one call. The kernels of
``mamba_ssm`` take no state beside packed documents and give back the last document's alone. So a
slice that takes or leaves a state is a call of its own, of the convolution and the scan one by one;
and so is each piece of documents that share rows.
Context parallelism is as in :mod:`megatron_wlb.runtime.gpt.delta_net`.

Legend: ``T`` tokens over all context-parallel ranks, ``n`` those of the slice, ``H`` heads of ``P``
numbers on this rank, ``N`` numbers of a state a channel, ``C`` channels of the convolution, ``W``
its taps.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.ssm.mamba_mixer import MambaMixer

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.gpt.states import Branches, ScansDocuments, look_up, present


class DocumentMambaMixer(ScansDocuments, MambaMixer):  # type: ignore[misc]
    """Megatron's mixer, which is told of documents."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if not config.use_mamba_mem_eff_path:
            raise CompatibilityError(
                "--disable-mamba-mem-eff-path runs Mamba's layers by functions that take no "
                "documents; leave it out"
            )
        super().__init__(config, *args, **kwargs)
        look_up(mamba_mixer, "mamba_split_conv1d_scan_combined", _mixed, mamba_context_parallel)


def _mixed(
    original: Any,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    **named: Any,
) -> torch.Tensor:
    """``[1, T, 2·H·P + 2·groups·N + H] -> [1, T, H·P]``."""
    scan = present()
    known = weight, bias, dt_bias, A
    if scan is None:
        made: torch.Tensor = original(rows, *known, **named)
        return made
    branches = scan.documents.branches
    if branches is not None:
        return _by_pieces(branches, rows, *known, **named)
    numbers, num_own = scan.documents.numbers[None], 0
    parts = []
    if scan.takes or scan.leaves:
        num_own = scan.documents.num_own
        own, anchor = rows[:, :num_own], rows
        taken = scan.taken("convolution", anchor), scan.taken("scan", anchor)
        made, whole, final = _part(own, *known, *taken, **named)
        taps = weight.shape[1]
        made = scan.left("convolution", made, lambda: whole[0, -(taps - 1) :])
        parts.append(scan.left("scan", made, lambda: final[0].float()))
    if num_own < rows.shape[1]:
        others = rows[:, num_own:].contiguous()
        named["seq_idx"] = numbers[:, num_own:].contiguous()
        parts.append(original(others, *known, **named))
    return torch.cat(parts, dim=1)


def _by_pieces(
    branches: Branches, rows: torch.Tensor, weight: torch.Tensor, *known: torch.Tensor, **named: Any
) -> torch.Tensor:
    """The same of documents that share rows: each piece begins with the state of its parent."""
    channels, taps = weight.shape
    num_heads = len(known[1])
    inner = rows.shape[-1] - channels - num_heads
    halos = branches.rows_before(rows[..., inner : inner + channels], taps - 1)
    states: list[torch.Tensor] = []
    parts = []
    for (start, stop, parent), halo in zip(branches.pieces, halos, strict=True):
        taken = (None, None) if parent is None else (halo, states[parent])
        part, _, final = _part(rows[:, start:stop], weight, *known, *taken, **named)
        parts.append(part)
        states.append(final[0])
    return torch.cat(parts, dim=1)


def _part(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    before: torch.Tensor | None,
    initial: torch.Tensor | None,
    *,
    D: torch.Tensor,
    chunk_size: int,
    headdim: int | None,
    ngroups: int,
    activation: str,
    seq_idx: Any = None,
    norm_before_gate: bool = False,
    **dtype: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of a part of a document alone; and the rows of its convolution, and its last state.

    It begins with the last rows ``before`` the convolution, ``[W-1, C]``, and the scan's state,
    ``[H, P, N]``; None: both are zero.
    """
    (channels, taps), num_heads = weight.shape, len(dt_bias)
    head_dim = D.shape[1] if headdim is None else headdim
    inner = num_heads * head_dim
    gate, convolved, dt = torch.split(rows, [inner, channels, num_heads], dim=-1)
    halo = rows.new_zeros(taps - 1, channels) if before is None else before
    whole = torch.cat([halo[None], convolved], dim=1)
    out = mamba_mixer.causal_conv1d_fn(
        whole.transpose(1, 2), weight, bias, activation=activation
    ).transpose(1, 2)[:, taps - 1 :]
    x, b, c = torch.split(out, [inner, *[(channels - inner) // 2] * 2], dim=-1)
    states = b.shape[-1] // ngroups
    y, final = mamba_mixer.mamba_chunk_scan_combined(
        x.reshape(*x.shape[:-1], num_heads, head_dim),
        dt,
        A,
        b.reshape(*b.shape[:-1], ngroups, states),
        c.reshape(*c.shape[:-1], ngroups, states),
        chunk_size,
        D=D,
        z=gate.reshape(*gate.shape[:-1], num_heads, head_dim),
        dt_bias=dt_bias,
        initial_states=None if initial is None else initial[None],
        dt_softplus=True,
        return_final_states=True,
        **dtype,
    )
    return y.flatten(2), whole, final
