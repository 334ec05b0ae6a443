"""Megatron-core on the CPU: requests for ``cuda`` are answered by the CPU. No Megatron edits.

:func:`install` must run before ``megatron`` is imported, because Megatron decides at import which
functions to compile.

Functions of torch that make tensors, and a few of ``Tensor``, are replaced: ``device="cuda"``,
``Tensor.cuda()``, ``.to("cuda")`` and ``pin_memory`` become CPU requests, and tensor types are
named as the optimizer tests for them. Operations cost what they always do. A ``TorchFunctionMode``
would look at each of them, which is a third of the time of a micro-batch of few tokens.
``torch.cuda.is_available`` and ``get_device_properties`` stay honest: other libraries choose code
by them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.compat.patching import PatchSet
from megatron_wlb.runtime.emulation import installed, note
from megatron_wlb.runtime.emulation.adam import install_adam
from megatron_wlb.runtime.emulation.heap import keep_freed_memory
from megatron_wlb.runtime.emulation.weight_gradients import (
    install_weight_gradients,
    uninstall_weight_gradients,
)

_patches = PatchSet()


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose requests for CUDA and for pinned memory are answered by the CPU."""

    @functools.wraps(function)
    def answered(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return answered


_MAKERS = (
    "arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted "
    "empty_quantized empty_strided eye full full_like hamming_window hann_window kaiser_window "
    "linspace logspace ones ones_like rand rand_like randint randint_like randn randn_like "
    "randperm range scalar_tensor sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor "
    "sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor tensor tril_indices triu_indices zeros "
    "zeros_like"
)
"""Functions of torch that take a device."""

_to, _type = torch.Tensor.to, torch.Tensor.type
_answered_to = _on_cpu(_to)


@functools.wraps(_to)
def _to_cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = _answered_to(
        tensor, *("cpu" if _is_cuda(value) else value for value in args), **kwargs
    )
    return result


@functools.wraps(_type)
def _type_on_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    result = _type(tensor, *args, **kwargs)
    if not isinstance(result, str):
        return result
    # Under a mode of torch's, which calls this again by its name, it is named already.
    return f"torch.cuda.{result.removeprefix('torch.').removeprefix('cuda.')}"


_TENSOR: dict[str, Callable[..., Any]] = {
    "cuda": lambda tensor, *_args, **_kwargs: tensor,
    "pin_memory": lambda tensor, *_args, **_kwargs: tensor,
    "to": _to_cpu,
    "type": _type_on_cuda,
    **{
        name: _on_cpu(getattr(torch.Tensor, name))
        for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
    },
}
"""Methods of tensors. ``torch.Tensor`` inherits its own of these names from a class that cannot be
changed."""


class _Stream:
    """A stream on a device that runs everything in order: nothing to wait for."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, _other: Any) -> None: ...
    def wait_event(self, _event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record()
        return event


class _Event:
    """An event on such a stream: reached as soon as it is recorded."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, _stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, _stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return (end._seconds - self._seconds) * 1e3


class _MeshOfCpus:
    """The one constructor of meshes that Megatron calls, with ``"cuda"``."""

    @staticmethod
    def from_group(group: Any, _device_type: str) -> DeviceMesh:
        return DeviceMesh.from_group(group, "cpu")


def _answer(value: Any) -> Callable[..., Any]:
    """A function that ignores its arguments. A new one each time: dynamo, where it is loaded,
    insists that every name of ``torch.cuda`` is an object of its own.
    """
    return lambda *_args, **_kwargs: value


_STREAM = _Stream()

_TORCH_CUDA: dict[str, Any] = {
    # Where and how many: one device a process, which is the CPU.
    "current_device": _answer("cpu"),
    "set_device": _answer(None),
    "device_count": _answer(1),
    # Nothing runs asynchronously, nothing is cached.
    "synchronize": _answer(None),
    "empty_cache": _answer(None),
    "Stream": _Stream,
    "stream": _answer(contextlib.nullcontext()),
    "current_stream": _answer(_STREAM),
    "default_stream": _answer(_STREAM),
    "Event": _Event,
    # One generator serves both; Megatron's tracker saves and restores it by name.
    "manual_seed": lambda seed: torch.manual_seed(seed),
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    "memory_allocated": _answer(0),
    "max_memory_allocated": _answer(0),
    "reset_peak_memory_stats": _answer(None),
    "memory_stats": lambda device=None: defaultdict(int),
}

_INFERENCE_LINEAR = "is_inference_column_parallel_linear"


def install() -> None:
    """Turns the emulation on for this process and thread; a second call does nothing.

    Raises :class:`CompatibilityError` where ``megatron.core`` is imported already.
    """
    if installed():
        return
    if "megatron.core" in sys.modules:
        raise CompatibilityError(
            "the CPU emulation was asked for after megatron.core was imported; call "
            "megatron_wlb.runtime.emulation.cpu.install() first"
        )
    # Megatron compiles small functions at import; there is no gain in it here and minutes to lose.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    keep_freed_memory()
    for name, value in _TORCH_CUDA.items():
        _patches.replace(torch.cuda, name, value)
    _patches.replace(
        torch.cuda.random, "get_rng_state", lambda device="cuda": torch.get_rng_state()
    )
    _patches.replace(torch.cuda.nvtx, "range_push", _answer(None))
    _patches.replace(torch.cuda.nvtx, "range_pop", _answer(None))
    with torch.device("cpu"):
        torch.empty(0)  # torch takes note of its own functions, which this statement goes by
    for name in _MAKERS.split():
        _patches.replace(torch, name, _on_cpu(getattr(torch, name)))
    for name, method in _TENSOR.items():
        setattr(torch.Tensor, name, method)
    note(True)
    install_weight_gradients()
    with warnings.catch_warnings():
        # Megatron warns that Apex is missing, which is the point here.
        warnings.filterwarnings("ignore", message=".*Apex.*")
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer  # noqa: F401
    # One generator serves both devices, so Megatron's check that they do not mix always warns.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)

    _patches.replace(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
    )
    install_adam(_patches)
    # Imports megatron.core.
    from megatron_wlb.runtime.emulation.expert_layers import install_experts
    from megatron_wlb.runtime.emulation.hybrid_layers import install_hybrid
    from megatron_wlb.runtime.emulation.scan_kernels import install_scans

    install_experts(_patches)
    install_hybrid(_patches)
    install_scans(_patches)
    module = "megatron.core.distributed.torch_fully_sharded_data_parallel"
    _patches.replace(module, "DeviceMesh", _MeshOfCpus)
    from megatron.core.transformer import multi_token_prediction

    # From 0.20 on; without TransformerEngine it compares with classes that are none, and raises.
    if hasattr(multi_token_prediction, _INFERENCE_LINEAR):
        _patches.replace(multi_token_prediction, _INFERENCE_LINEAR, _answer(False))


def uninstall() -> None:
    """Restores everything that :func:`install` replaced. For tests."""
    if not installed():
        return
    note(False)
    for name in _TENSOR:
        delattr(torch.Tensor, name)
    _patches.restore()
    uninstall_weight_gradients()
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
