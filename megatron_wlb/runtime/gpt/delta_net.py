"""Gated delta nets by document, whole or in slices: Megatron's layer ``G`` of a HybridModel.

The layer is Megatron's own. Two functions of its forward pass look up the micro-batch's documents
(:mod:`megatron_wlb.runtime.gpt.states`): its convolution and its recurrence, which are those of the
package ``fla``. Both take all documents in one call, but for a recurrence that takes or leaves a
state, and that of documents that share rows, which runs level by level. Megatron's exchange between
context-parallel ranks gives a rank all tokens and its share of the heads; only the order of the
tokens is the plan's.

Legend: ``T`` tokens over all context-parallel ranks, ``H`` value heads of this rank, ``K`` and
``V`` dimensions of a key and a value, ``C`` channels of the convolution, ``W`` its taps.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.gpt.states import (
    Branches,
    ScannedRows,
    ScansDocuments,
    look_up,
    present,
)

# One module up to 0.18.
_LAYER = getattr(gated_delta_net, "gdn", gated_delta_net)
_EXCHANGE = getattr(gated_delta_net, "common", gated_delta_net)


class DocumentGatedDeltaNet(ScansDocuments, GatedDeltaNet):  # type: ignore[misc]
    """Megatron's layer, which is told of documents."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.deterministic_mode:
            raise CompatibilityError(
                "--deterministic-mode runs gated delta nets by torch, which takes no documents; "
                "leave it out"
            )
        kwargs.pop("cp_comm_type", None)  # which layers are given, and 0.18 does not take
        super().__init__(config, *args, **kwargs)
        rule = vars(self)["gated_delta_rule"]
        self.gated_delta_rule = lambda *args, **kwargs: _rule(rule, *args, **kwargs)
        look_up(_LAYER, "causal_conv1d", _convolution, _EXCHANGE)


def _convolution(original: Any, x: torch.Tensor, weight: torch.Tensor, **named: Any) -> Any:
    """``[1, T, C] -> [1, T, C]``; a state is the last ``W`` rows of input, ``[C, W]``."""
    scan = present()
    if scan is None:
        return original(x=x, weight=weight, **named)
    channels, taps = weight.shape
    branches = scan.documents.branches
    if branches is not None:
        above = branches.rows_before(x, taps).mT.contiguous()
        named |= {"initial_state": above, "output_final_state": False, **_ends(branches.rows)}
        return original(x=x, weight=weight, **named)[0], None
    initial = scan.initial("convolution", x, (channels, taps), x.dtype)
    named |= {"initial_state": initial, "output_final_state": False, **_ends(scan.documents.rows)}
    out, _ = original(x=x, weight=weight, **named)

    def final() -> torch.Tensor:
        rows = x[0, : scan.documents.num_own][-taps:].t()
        before = rows.new_zeros(channels, taps) if initial is None else initial[0]
        return torch.cat([before, rows], dim=1)[:, -taps:]

    return scan.left("convolution", out, final), None


def _rule(original: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> Any:
    """``[1, T, H, K] ×2, [1, T, H, V] -> [1, T, H, V]``; a state is ``[H, K, V]`` in fp32.

    A slice that takes or leaves a state is a call of its own: beside others each document would
    have one, which the kernel keeps.
    """
    scan = present()
    assert scan is not None, "the layer's forward says so"
    if scan.documents.branches is not None:
        return _by_levels(original, scan.documents.branches, (q, k, v), named), None

    def run(first: int, stop: int | None, **of_documents: Any) -> Any:
        rows = slice(first, stop)
        named.update(of_documents, g=gates[:, rows], beta=betas[:, rows])
        return original(q[:, rows], k[:, rows], v[:, rows], **named)

    gates, betas = named["g"], named["beta"]
    num_own, parts = 0, []
    if scan.takes or scan.leaves:
        num_own = scan.documents.num_own
        taken = scan.taken("recurrence", q)
        initial = None if taken is None else taken[None]
        out, states = run(
            0, num_own, initial_state=initial, output_final_state=scan.leaves, cu_seqlens=None
        )
        parts.append(scan.left("recurrence", out, lambda: states[0]))
    if num_own < q.shape[1]:
        others = scan.documents.others if num_own else scan.documents.rows
        none = {"initial_state": None, "output_final_state": False}
        parts.append(run(num_own, None, **none, **_ends(others))[0])
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0], None


def _by_levels(
    original: Any, branches: Branches, of_rows: tuple[torch.Tensor, ...], named: dict[str, Any]
) -> torch.Tensor:
    """The same of documents that share rows: each piece begins with the state of its parent."""
    gates, betas = named["g"], named["beta"]
    states: torch.Tensor | None = None
    parts = []
    for level in branches.levels:
        q, k, v, g, beta = (t.index_select(1, level.index) for t in (*of_rows, gates, betas))
        named.update(
            _ends(level.rows),
            g=g,
            beta=beta,
            initial_state=None if states is None else states.index_select(0, level.parents),
            output_final_state=level is not branches.levels[-1],
        )
        part, states = original(q, k, v, **named)
        parts.append(part)
    return torch.cat(parts, dim=1).index_select(1, branches.back)


def _ends(rows: ScannedRows) -> dict[str, torch.Tensor]:
    return {"cu_seqlens": rows.ends, "cu_seqlens_cpu": rows.ends_on_host}
