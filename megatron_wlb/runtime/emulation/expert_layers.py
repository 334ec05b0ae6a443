"""Layers of experts on the CPU: what Megatron takes from TransformerEngine, GPUs and NCCL there."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings

from megatron_wlb.runtime.compat.patching import PatchSet


def install_experts(patches: PatchSet) -> None:
    """Makes experts and their exchanges run on CPUs and gloo; ``patches`` restores it."""
    # Numbers of tokens to exchange, which torch takes as a list: only those of a GPU become one.
    dispatcher = "megatron.core.transformer.moe.token_dispatcher"
    patches.replace(dispatcher, "maybe_move_tensor_to_cpu", _on_host)
    # Experts divided by tensor parallelism gather unequal lengths, which gloo does not.
    patches.wrap(mappings, "_gather_along_first_dim", _gather)
    patches.wrap(mappings, "_reduce_scatter_along_first_dim", _reduce_scatter)


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
