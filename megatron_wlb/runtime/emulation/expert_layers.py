"""Layers of experts on the CPU: what Megatron takes from TransformerEngine, GPUs and NCCL there."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_wlb.runtime.compat.patching import PatchSet


def install_experts(patches: PatchSet) -> None:
    """Makes experts and their exchanges run on CPUs and gloo; ``patches`` restores it."""
    # Numbers of tokens to exchange, which torch takes as a list: only those of a GPU become one.
    dispatcher = "megatron.core.transformer.moe.token_dispatcher"
    patches.replace(dispatcher, "maybe_move_tensor_to_cpu", _on_host)
    # Experts divided by tensor parallelism gather unequal lengths, which gloo does not.
    patches.wrap(mappings, "_gather_along_first_dim", _gather)
    patches.wrap(mappings, "_reduce_scatter_along_first_dim", _reduce_scatter)
    # Products around latents of experts (--moe-latent-size).
    patches.replace(moe_layer, "HAVE_TE", True)
    patches.replace(moe_layer, "TELinear", _SameOnAllRanks)


class _SameOnAllRanks(torch.nn.Linear):
    """TransformerEngine's product of weights that tensor parallelism does not divide."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        **_: Any,
    ) -> None:
        super().__init__(input_size, output_size, bias, dtype=config.params_dtype)
        if config.perform_initialization:
            init_method(self.weight)
            if bias:
                torch.nn.init.zeros_(self.bias)
        for weight in self.parameters():
            # Each rank has a gradient of its own tokens.
            weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(tokens), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, None, sharded_offsets,
            tp_group=get_tensor_model_parallel_group(), dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather(
    original: Any, tensor: torch.Tensor, group: Any, sizes: Any = None, *rest: Any, **named: Any
) -> Any:
    sizes = named.pop("output_split_sizes", sizes)
    if sizes is None or group.size() == 1:
        return original(tensor, group, None, *rest, **named)
    whole = tensor.new_zeros((sum(sizes), *tensor.shape[1:]))
    start = sum(sizes[: group.rank()])
    whole[start : start + len(tensor)] = tensor
    dist.all_reduce(whole, group=group)
    return whole


def _reduce_scatter(
    original: Any, tensor: torch.Tensor, group: Any, sizes: Any = None, *rest: Any, **named: Any
) -> Any:
    sizes = named.pop("input_split_sizes", sizes)
    if sizes is None or group.size() == 1:
        return original(tensor, group, None, *rest, **named)
    whole = tensor.clone()
    dist.all_reduce(whole, group=group)
    start = sum(sizes[: group.rank()])
    return whole[start : start + sizes[group.rank()]].clone()
