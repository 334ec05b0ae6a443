"""Mamba-2 by document, whole or in slices: Megatron's layer ``M`` of a HybridModel.

The layer is Megatron's own, but for its one kernel, which looks up the micro-batch's documents
(:mod:`megatron_wlb.runtime.gpt.states`). It takes whole documents in one call. The kernels of
``mamba_ssm`` take no state beside packed documents and give back the last document's alone. So each
piece that begins with a state or leaves one is a call of its own, of the convolution and the scan
one by one.
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
from megatron_wlb.runtime.gpt.states import Level, ScansDocuments, look_up, present


class DocumentMambaMixer(ScansDocuments, MambaMixer):  # type: ignore[misc]
    """Megatron's mixer, which is told of documents."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if not config.use_mamba_mem_eff_path:
            raise CompatibilityError(
                "--disable-mamba-mem-eff-path runs Mamba's layers by functions that take no "
                "documents; leave it out"
            )
        super().__init__(config, *args, **kwargs)
        self.scan_taps = self.d_conv
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
    """``[1, T, 2·H·P + 2·groups·N + H] -> [1, T, H·P]``; states are the last ``W-1`` rows of the
    convolution's input, ``[W-1, C]``, and those of the scan, ``[H, P, N]`` in fp32.
    """
    scan = present()
    known = weight, bias, dt_bias, A
    if scan is None:
        made: torch.Tensor = original(rows, *known, **named)
        return made
    numbers, branches = scan.documents.numbers[None], scan.documents.branches
    named["seq_idx"] = numbers
    if branches is None:
        made = original(rows, *known, **named)
        return made
    channels, taps = weight.shape
    inner = rows.shape[-1] - channels - len(dt_bias)
    seen = scan.seen("convolution", rows[..., inner : inner + channels], taps - 1)
    halos = seen[branches.before[:, 1 - taps :]]

    def run(level: Level, initial: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        own = level.of(rows).contiguous()
        if initial is None and not level.is_read:
            named["seq_idx"] = level.of(numbers).contiguous()
            return original(own, *known, **named), None
        begun = [None] * len(level.numbers) if initial is None else torch.split(initial, 1)
        parts = torch.split(own, [*level.rows.lengths], dim=1)
        pieces = zip(parts, level.numbers, begun, strict=True)
        outs, finals = [], []
        for part, at, state in pieces:
            out, final = _piece(part, *known, halos[at], state, **named)
            outs.append(out)
            finals += [final] if level.is_read else []
        return torch.cat(outs, dim=1), torch.cat(finals) if finals else None

    out = scan.each("scan", rows, run)
    return scan.left("convolution", out, [*seen[branches.behind[:, 1 - taps :]]])


def _piece(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    halo: torch.Tensor,
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a piece alone, and its last state, ``[1, H, P, N]``.

    It begins with the last rows before the convolution, ``halo``, and the scan's ``initial`` state;
    None: zero.
    """
    (channels, taps), num_heads = weight.shape, len(dt_bias)
    head_dim = D.shape[1] if headdim is None else headdim
    inner = num_heads * head_dim
    gate, convolved, dt = torch.split(rows, [inner, channels, num_heads], dim=-1)
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
        initial_states=initial,
        dt_softplus=True,
        return_final_states=True,
        **dtype,
    )
    return y.flatten(2), final.float()
