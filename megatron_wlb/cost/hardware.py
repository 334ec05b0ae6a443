"""What a machine can do: a file of peak rates, achieved shares of them, and link bandwidths.

The files are ``configs/hardware/*.yaml``. Each figure is ``{value, source}``: the source says which
data sheet it is from, what was measured and on what, or why a share is assumed. A file that
``wlb profile`` wrote has ``attention`` too: the measured tables of attention kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_wlb.cost.attention_latency import AttentionProfile
from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import (
    MOST_DEVICES,
    check_names,
    listed,
    named_file,
    read_mapping,
    read_text,
    real_number,
    shipped,
    shown,
    whole_number,
)

LEAST, MOST = 1e-9, 1e9
"""Limits of a figure. Machines are far from both; beyond them times and rates overflow."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one device and its links.

    Raises :class:`ConfigError` for a figure outside [:data:`LEAST`, :data:`MOST`], or a share above
    1; overlaps, latencies and overheads may be 0.
    """

    peak_tflops: float
    """10¹² FLOP/s of dense matrix products in the precision of training."""
    memory_gb_s: float
    """10⁹ B/s between the device and its memory."""
    memory_gib: float
    """2³⁰ bytes of device memory."""
    node_link_gb_s: float
    """10⁹ B/s that one device receives from the others of its node while it sends as much."""
    network_gb_s: float
    """10⁹ B/s that one device receives from other nodes."""
    devices_per_node: int
    linear_share: float
    """Share of the peak that matrix products of training reach."""
    attention_share: float
    """Share of the peak that causal attention of long documents reaches."""
    memory_share: float
    """Share of the memory bandwidth that element-wise operations reach."""
    link_share: float
    """Share of the links' bandwidth that collectives reach."""
    tp_overlap: float
    """Which share of the tensor-parallel collectives beside matrix products is hidden. In backward
    these gather inputs and reduce their gradients; forward has none."""
    cp_overlap: float
    """Which share of the context-parallel exchanges of K and V beside attention is hidden. All head
    groups but one have such an exchange."""
    scan_share: float = 0.15
    """Share of the peak that recurrences of layers with a state reach, chunk by chunk; if not given
    0.15, which is assumed. ``wlb profile`` measures it."""
    product_overlap: float = 1.0
    """Share that matrix products' arithmetic hides of the time of the bytes that they read and
    write, and that are cast for them; 1 if not given."""
    kernel_us: float = 0.0
    """Time of a kernel besides its work: its first and last wave, and the gap before it; 0 if not
    given."""
    launch_us: float = 0.0
    """Time that the host takes to launch a kernel, with Python's and autograd's part: the passes of
    a step last as long as their launches at least. 0 if not given."""
    num_processors: int = 1
    """Multiprocessors, each of which works on one block of a kernel; 1 if not given, which are
    always busy."""
    latency_us: float = 10.0
    """Time that a message between devices takes besides its bytes; 10 if not given."""
    context_mib: float = 0.0
    """2²⁰ bytes that a process takes on the device before any tensor; 0 if not given."""
    communicator_mib: float = 0.0
    """2²⁰ bytes of buffers of one communicator between devices; 0 if not given."""
    fp8_peak_tflops: float | None = None
    """10¹² FLOP/s of dense matrix products in FP8, on a machine that has them."""
    fp8_linear_share: float | None = None
    """Share of that peak that matrix products of training reach, casts to FP8 included."""
    host_link_gb_s: float | None = None
    """10⁹ B/s between the device and its host's memory, each way while as much goes the other; None
    if not known."""
    attention: tuple[AttentionProfile, ...] = ()
    """Measured attention kernels, where there are any."""

    def __post_init__(self) -> None:
        for name in FIGURES:
            what, value = f"hardware: {name}", getattr(self, name)
            if value is None and name.startswith(("fp8_", "host_")):
                continue
            if name in ("devices_per_node", "num_processors"):
                whole_number(what, value, 1, MOST_DEVICES)
            else:
                least = 0 if name.endswith(("_overlap", "_us", "_mib")) else LEAST
                most = 1 if name.endswith(("_share", "_overlap")) else MOST
                real_number(what, value, least, most)

    def reached_tflops(self, share: str, peak: str = "peak_tflops") -> float:
        """10¹² FLOP/s: a share of the peak of a precision, both figures by name.

        Raises :class:`ConfigError` for a figure that this machine does not have.
        """
        reached = 1.0
        for name in (peak, share):
            value: float | None = getattr(self, name, None)
            if value is None:
                raise ConfigError(
                    f"hardware: there is no figure {name}; give a machine that has one, such as "
                    "h100-sxm, or add it to the file"
                )
            reached *= value
        return reached

    @property
    def linear_tflops(self) -> float:
        """10¹² FLOP/s that matrix products reach in the precision of training."""
        return self.reached_tflops("linear_share")

    @property
    def attention_tflops(self) -> float:
        """10¹² FLOP/s that attention reaches in the precision of training."""
        return self.reached_tflops("attention_share")

    def memory_us(self, num_bytes: float) -> float:
        """Time that element-wise operations need to read and write so many bytes."""
        return num_bytes / (self.memory_gb_s * self.memory_share * 1e3)

    def transfer_us(self, num_bytes: float, num_devices: int, num_ranks: int = 1) -> float:
        """Time to receive so many bytes from a group that spans ``num_devices`` neighbours.

        ``num_ranks`` of them, evenly spread, are the group. Beyond a node its ranks there use all
        their network adapters, as NCCL's rings do: each enters the node by another.
        """
        gb_s = self.node_link_gb_s
        if num_devices > self.devices_per_node:
            in_node = max(1, self.devices_per_node * num_ranks // num_devices)
            gb_s = min(gb_s, self.network_gb_s * in_node)
        return num_bytes / (gb_s * self.link_share * 1e3)

    def all_to_all_us(
        self, num_bytes: float, num_ranks: int, stride: int = 1, copies: float = 0.0
    ) -> float:
        """Time in which each of ``num_ranks``, ``stride`` devices apart, sends so many bytes in
        equal parts to all, itself included.

        What stays in a node and what leaves it are on their way at once, each device with the
        network adapter of its own. If the bytes are so many ``copies`` for random ranks, a node
        gets one over the network and each rank there one from it, as DeepEP and HybridEP do.
        """
        in_node = min(num_ranks, max(1, self.devices_per_node // stride))
        num_nodes = num_ranks / in_node
        inside = num_bytes * (in_node - 1) / num_ranks
        outside = num_bytes * (num_nodes - 1) / num_nodes
        if copies:
            one = num_bytes / copies
            inside = one * reached(num_ranks, copies) * (in_node - 1) / in_node
            outside = one * reached(num_nodes, copies) * (num_nodes - 1) / num_nodes
        longest_us = max(inside / self.node_link_gb_s, outside / self.network_gb_s)
        return longest_us / (self.link_share * 1e3)


def reached(num: float, copies: float) -> float:
    """How many of ``num`` get a copy, in the mean, if each copy goes to a random one."""
    share: float = 1 - (1 - 1 / num) ** copies
    return num * share


FIGURES = tuple(f.name for f in fields(Hardware) if f.name != "attention")
"""The entries of a hardware file that are one number each."""


def hardware_names() -> list[str]:
    """The machines whose files come with the project."""
    return sorted(shipped("hardware"))


def load_hardware(name_or_path: str) -> Hardware:
    """Loads the machine called so (``h100-sxm``), or that of a YAML file.

    Raises:
        ConfigError: an unknown name (all are listed), an unreadable file, or one with an
            unknown, missing or impossible figure, or a figure without its source.
    """
    try:
        text = read_text(named_file("hardware", name_or_path, hardware_names))
    except ConfigError:
        text = ""  # said below
    return _loaded(name_or_path, text)


@lru_cache(maxsize=16)
def _loaded(name_or_path: str, _: str) -> Hardware:
    """The machine in a file of that text, which many ask for: it takes 40 ms."""
    path, content = read_hardware(name_or_path)
    figures = {n: f for n, f in content.items() if n not in ("description", "attention")}
    needed = [f.name for f in fields(Hardware) if f.default is MISSING]
    try:
        check_names("", "figure", figures, FIGURES, needed)
        for name, figure in figures.items():
            if not isinstance(figure, Mapping) or set(figure) != {"value", "source"}:
                raise ConfigError(f"{name} is {shown(figure)}; give {{value, source}}")
        tables = listed("attention (`wlb profile` writes it)", content.get("attention", []))
        return Hardware(
            **{name: figure["value"] for name, figure in figures.items()},
            attention=tuple(map(AttentionProfile.from_dict, tables)),
        )
    except ConfigError as error:
        raise ConfigError(f"hardware {path}: {str(error).removeprefix('hardware: ')}") from None


def read_hardware(name_or_path: str) -> tuple[Path, Mapping[str, Any]]:
    """The file that :func:`load_hardware` reads, and what it says, unchecked."""
    path = named_file("hardware", name_or_path, hardware_names)
    remedy = f"give {' or '.join(hardware_names())}, or a file such as `wlb profile` writes"
    return path, read_mapping(path, "hardware", remedy)
