"""What is installed, what of it can be used, and what is wrong: the findings of ``wlb doctor``.

Nothing of Megatron is imported: its source is read. torch is, to see the devices and the kernels.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_wlb import __version__
from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.compat import hooks
from megatron_wlb.runtime.compat.source import MegatronSource

Level = Literal["ok", "note", "wrong"]

PACKAGES = {
    # Distribution -> what it is for here.
    "torch": "needed",
    "megatron-core": "needed, or a checkout on PYTHONPATH",
    "numpy": "needed",
    "transformer-engine": "Megatron-LM's default layers on GPUs; an attention kernel",
    "flash-attn": "attention kernel",
    "flash-attn-3": "attention kernel, Hopper",
    "apex": "fused kernels that Megatron-LM takes where TransformerEngine is not",
    "triton": "needed by megatron-core",
    "ortools": "--wlb-packing fixed-solver",
}
_MODULES = {"flash-attn-3": "flash_attn_interface", "apex": "apex", "triton": "triton"}
"""Modules that may be there without a distribution of that name."""


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and where it is wrong what to do."""

    area: Literal["machine", "package", "kernel", "hooks"]
    subject: str
    level: Level
    found: str
    remedy: str = ""


def examine(megatron: str | Path | None = None) -> list[Finding]:
    """All findings, of the installed megatron-core or of the tree at ``megatron``.

    Raises :class:`CompatibilityError` where ``megatron`` is no source of Megatron.
    """
    given = None if megatron is None else MegatronSource.at(megatron)
    return [*_machine(), *_packages(), *_kernels(), *_megatron(given)]


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "megatron-wlb", "ok", __version__)
    found = f"{platform.python_version()} on {platform.platform(terse=True)}"
    yield Finding("machine", "Python", "ok", found)
    torch = _torch()
    if torch is None:
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if not torch.cuda.is_available():
        found = f"none that torch ({build}) sees; --wlb-device cpu runs the CPU emulation"
        yield Finding("machine", "GPUs", "note", found)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
            f"{properties.major}.{properties.minor} (torch: {build})"
        )
        yield Finding("machine", f"GPU {index}", "ok", found)


def _packages() -> Iterator[Finding]:
    for name, purpose in PACKAGES.items():
        version = _version(name)
        if version is not None:
            yield Finding("package", name, "ok", version)
        elif name == "megatron-core" and importlib.util.find_spec("megatron") is not None:
            yield Finding("package", name, "note", "not installed, but on sys.path as source")
        elif purpose.startswith("needed"):
            remedy = f"pip install -c constraints.txt {name}"
            yield Finding("package", name, "wrong", "not installed", remedy)
        else:
            yield Finding("package", name, "note", f"not installed ({purpose})")


def _kernels() -> Iterator[Finding]:
    """Which attention kernels can run here, tried on a small problem where there is a GPU."""
    torch = _torch()
    if torch is None:
        return
    from megatron_wlb.runtime.gpt.attention.kernels.kernel import Demand
    from megatron_wlb.runtime.gpt.attention.kernels.selection import CANDIDATES

    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    demand = Demand(torch.device(device), dtype, num_heads=8, num_groups=8, head_dim=128)
    what = f"{device}, {str(dtype).removeprefix('torch.')}, heads of 128"
    usable = []
    for name, candidate in CANDIDATES.items():
        made = candidate.make(demand)
        if not isinstance(made, str):
            usable.append(name)
            yield Finding("kernel", name, "ok", f"can run ({what})")
        else:
            yield Finding("kernel", name, "note", f"cannot run: {made}")
    if gpu and usable == ["sdpa"]:
        remedy = "install flash-attn (pip install 'megatron-wlb[gpu]')"
        found = "there is no packed kernel for this GPU: one call a document is slow"
        yield Finding("kernel", "packed attention", "wrong", found, remedy)


def _megatron(given: MegatronSource | None) -> Iterator[Finding]:
    try:
        source = given or MegatronSource.installed()
    except CompatibilityError as error:
        found, _, remedy = str(error).partition("; ")
        yield Finding("hooks", "megatron.core", "wrong", found, remedy)
        return
    version, where = source.version, f"{source.version} in {source.core_root}"
    known = hooks.known(version)
    if known is None:
        remedy = f"install one of {', '.join(hooks.VERSIONS)}, or --wlb-allow-untested-megatron"
        yield Finding("hooks", "megatron.core", "wrong", f"{where}: not a known version", remedy)
    elif not known.tested:
        found = f"{where}: names and signatures are checked, tests run with another version"
        yield Finding("hooks", "megatron.core", "note", found)
    else:
        yield Finding("hooks", "megatron.core", "ok", where)
    checked = hooks.problems(source)
    for target, problem in checked.items():
        if problem:
            remedy = f"use the released megatron-core {version}, unchanged"
            yield Finding("hooks", target, "wrong", problem, remedy)
    fitting = sum(problem is None for problem in checked.values())
    training = "with" if source.has_training else "without"
    found = (
        f"{fitting} of {len(checked)} names are there as expected ({training} megatron.training)"
    )
    yield Finding("hooks", "hooked names", "ok" if fitting == len(checked) else "wrong", found)


def _version(name: str) -> str | None:
    """The version of a distribution, or of a module that came without one."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    module = _MODULES.get(name)
    if module is not None and importlib.util.find_spec(module) is not None:
        return "of unknown version"
    return None


def _torch() -> Any:
    """The module, or None where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch
