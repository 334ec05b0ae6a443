"""Megatron-LM's training loop under the CPU emulation: what it needs beyond megatron-core.

The emulation of :mod:`megatron_wlb.runtime.emulation.cpu` comes first. Each name replaced here has
its reason beside it. Nothing about packing: an unmodified ``pretrain_gpt.py`` trains on CPUs with
this alone.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from multiprocessing import spawn
from typing import Any

import torch

from megatron_wlb.errors import refuse_all
from megatron_wlb.runtime import emulation
from megatron_wlb.runtime.compat.patching import PatchSet
from megatron_wlb.runtime.emulation import cpu

NEEDED: dict[str, Callable[[argparse.Namespace], bool]] = {
    "--distributed-backend gloo": lambda args: args.distributed_backend != "gloo",
    "--transformer-impl local": lambda args: args.transformer_impl != "local",
    "--no-gradient-accumulation-fusion": lambda args: args.gradient_accumulation_fusion,
    "--no-persist-layer-norm": lambda args: not args.no_persist_layer_norm,
    "--cross-entropy-fusion-impl native": lambda args: (
        args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl != "native"
    ),
    "--no-rope-fusion": lambda args: (
        args.apply_rope_fusion
        and (args.position_embedding_type == "rope" or args.use_rotary_position_embeddings)
    ),
}
"""The flags that a machine without GPUs needs, and when one is missing."""
ABSENT = ("--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion")
"""The flags of kernels that only GPUs have; without them the same numbers are computed."""


_patches = PatchSet()
_get_preparation_data = spawn.get_preparation_data


def install() -> None:
    """Turns the emulation on and prepares ``megatron.training`` for it; a second call does nothing.

    Raises :class:`CompatibilityError` where ``megatron.core`` is imported already, or a name is
    missing.
    """
    if emulation.installed() and _patches:
        return
    cpu.install()
    from megatron.training import initialize, training

    # "Megatron requires CUDA."
    _patches.replace(
        training,
        "initialize_megatron",
        functools.partial(initialize.initialize_megatron, allow_no_cuda=True),
    )
    # Megatron's own checks end in an assertion or a kernel that is not there.
    _patches.wrap("megatron.training.arguments", "validate_args", _validate_args)
    # Builds CUDA kernels, and an index builder that megatron-core's wheel has built already.
    _patches.replace(initialize, "_compile_dependencies", _do_nothing)
    # Compiles; and draws from the generator that, on the CPU, the model's weights come from too.
    _patches.replace(initialize, "_warmup_jit_function", _do_nothing)
    # Decides whether CUDA_DEVICE_MAX_CONNECTIONS matters. On this device it does not.
    _patches.replace("megatron.training.arguments", "get_device_arch_version", lambda: 10)
    # Asks a GPU whether it has kernels for --moe-grouped-gemm; `refusals` speaks of that flag.
    _patches.replace(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    # Options of NCCL's streams, for which --use-torch-fsdp2 asks.
    _patches.replace("megatron.core.parallel_state", "get_nccl_options", _do_nothing)
    # A worker that writes checkpoints would import the script again, outside the emulation.
    _patches.replace("multiprocessing.spawn", "get_preparation_data", _without_main)


def refusals(args: argparse.Namespace) -> Iterator[str]:
    """Makes one line that names all flags that are missing, if any is."""
    missing = [flag for flag, is_missing in NEEDED.items() if is_missing(args)]
    if missing:
        yield f"without a GPU Megatron-LM must be told so; add {' '.join(missing)}"
    given = [flag for flag in ABSENT if getattr(args, flag[2:].replace("-", "_"), False)]
    if given:
        yield f"without a GPU there are no kernels for {' '.join(given)}; leave that out"


def _validate_args(original: Any, args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
    refuse_all(refusals(args))
    return original(args, *rest, **kwargs)


def _do_nothing(*_args: Any, **_kwargs: Any) -> None: ...


def _without_main(name: str) -> dict[str, Any]:
    data = _get_preparation_data(name)
    for key in ("init_main_from_name", "init_main_from_path"):
        data.pop(key, None)
    return data
