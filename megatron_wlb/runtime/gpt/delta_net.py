"""Gated delta nets by document, whole or in slices: Megatron's layer ``G`` of a HybridModel.

The layer is Megatron's own. Two functions of its forward pass look up the micro-batch's documents
(:mod:`megatron_wlb.runtime.gpt.states`): its convolution and its recurrence, which are those of the
package ``fla``. Both take all documents in one call, but for the recurrence of slices and of
documents that share rows, which runs level by level. Megatron's exchange between context-parallel
ranks gives a rank all tokens and its share of the heads; only the order of the tokens is the
plan's.

Legend: ``T`` tokens over all context-parallel ranks, ``H`` value heads of this rank, ``K`` and
``V`` dimensions of a key and a value, ``C`` channels of the convolution, ``W`` its taps.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.gpt.states import Level, ScannedRows, ScansDocuments, look_up, present

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
        self.scan_taps = self.conv_kernel_dim
        rule = vars(self)["gated_delta_rule"]
        self.gated_delta_rule = lambda *args, **kwargs: _rule(rule, *args, **kwargs)
        look_up(_LAYER, "causal_conv1d", _convolution, _EXCHANGE)


def _convolution(original: Any, x: torch.Tensor, weight: torch.Tensor, **named: Any) -> Any:
    """``[1, T, C] -> [1, T, C]``; a state is the last ``W`` rows of input, ``[W, C]``."""
    scan = present()
    if scan is None:
        return original(x=x, weight=weight, **named)
    taps, branches = weight.shape[1], scan.documents.branches
    initial, states, rows = None, [], scan.documents.rows
    if branches is not None:
        seen, rows = scan.seen("convolution", x, taps), branches.rows
        initial = seen[branches.before[:, -taps:]].mT.contiguous()
        states = [*seen[branches.behind[:, -taps:]]]
    named |= {"initial_state": initial, "output_final_state": False, **_ends(rows)}
    out, _ = original(x=x, weight=weight, **named)
    return scan.left("convolution", out, states), None


def _rule(original: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> Any:
    """``[1, T, H, K] ×2, [1, T, H, V] -> [1, T, H, V]``; a state is ``[H, K, V]`` in fp32.

    Documents that neither begin with a state nor leave one are a call of their own: beside others
    each would have one, which the kernel keeps.
    """
    scan = present()
    assert scan is not None, "the layer's forward says so"
    if scan.documents.branches is None:
        none = {"initial_state": None, "output_final_state": False}
        return original(q, k, v, **named | none | _ends(scan.documents.rows))[0], None
    gates, betas = named["g"], named["beta"]

    def run(level: Level, initial: torch.Tensor | None) -> Any:
        named.update(_ends(level.rows), g=level.of(gates), beta=level.of(betas))
        named.update(initial_state=initial, output_final_state=level.is_read)
        return original(*map(level.of, (q, k, v)), **named)

    return scan.each("recurrence", q, run), None


def _ends(rows: ScannedRows) -> dict[str, torch.Tensor]:
    return {"cu_seqlens": rows.ends, "cu_seqlens_cpu": rows.ends_on_host}
