"""What a hardware file says of a measured device: its figures over those of another file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_wlb.cost.attention_latency import BACKWARD_FLOPS, AttentionProfile, forward_flops
from megatron_wlb.cost.hardware import FIGURES, hardware_names
from megatron_wlb.errors import ConfigError

if TYPE_CHECKING:
    from megatron_wlb.runtime.measuring.rates import Rates


def base_of(device: str, gpu: str) -> str:
    """The hardware file of a device of that name."""
    if device == "cpu":
        return "cpu"
    for name in hardware_names():
        if name.partition("-")[0].upper() in gpu.upper():
            return name
    raise ConfigError(
        f"no hardware file is known for {gpu}; give one with --base ({', '.join(hardware_names())})"
    )


def hardware_content(
    base: Mapping[str, Any],
    base_name: str,
    rates: Rates,
    profiles: Sequence[AttentionProfile],
    machine: str,
    device: str,
) -> dict[str, Any]:
    """What the hardware file says: measured figures and tables over those of ``base``.

    A GPU's peak and bandwidth stay the data sheet's, of which shares were reached; a CPU's are what
    its plainest operations reached.
    """
    figures = {name: dict(base[name]) for name in FIGURES if name in base}

    def measured(name: str, value: float, what: str) -> None:
        figures[name] = {"value": float(f"{value:.4g}"), "source": f"measured: {what}"}

    def share(name: str, reached: float, of: str, what: str) -> None:
        measured(name, min(1.0, reached / figures[of]["value"]), f"{what}, over {of}")

    if device == "cpu":
        measured("peak_tflops", rates.square_tflops, "product of two square matrices")
        measured("memory_gb_s", rates.copy_gb_s, "copying, bytes read and written")
    share(
        "linear_share", rates.linear_tflops, "peak_tflops",
        f"{rates.linear_tflops:.4g} TF/s of tokens times a layer's weights",
    )  # fmt: skip
    share(
        "memory_share", rates.elementwise_gb_s, "memory_gb_s",
        f"{rates.elementwise_gb_s:.4g} GB/s of an activation function",
    )  # fmt: skip
    if rates.kernel_us is not None and rates.launch_us is not None:
        measured("kernel_us", rates.kernel_us, "kernels without work, replayed from a CUDA graph")
        measured("launch_us", rates.launch_us, "the same launched one by one, forward and backward")
    if rates.host_gb_s is not None:
        measured("host_link_gb_s", rates.host_gb_s, "copies to pinned memory and back at once")
    if scans := rates.scan_tflops:
        told = ", ".join(f"{tflops:.4g} TF/s of a {name}" for name, tflops in scans.items())
        share("scan_share", min(scans.values()), "peak_tflops", f"recurrences: the least, {told}")
    long = profiles[0]
    tflops, length = long_document_tflops(long), long.lengths[-1]
    share(
        "attention_share", tflops, "peak_tflops",
        f"{tflops:.4g} TF/s of {long.kernel}, documents of {length} tokens, {long.num_heads} heads "
        f"of {long.head_dim}, forward and backward",
    )  # fmt: skip

    def heads(table: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(table[name] for name in ("dtype", "num_heads", "num_groups", "head_dim"))

    tables = [profile.as_dict() for profile in profiles]
    new = {heads(table) for table in tables}
    kept = [dict(table) for table in base.get("attention", []) if heads(table) not in new]
    return {
        "description": f"{machine}: measured by `wlb profile` where the source says so, the rest "
        f"as in {base_name}.",
        **figures,
        "attention": kept + tables,
    }


def long_document_tflops(profile: AttentionProfile) -> float:
    """10¹² FLOP/s of the longest document that was measured, both passes together."""
    length = profile.lengths[-1]
    pairs = length * (length + 1) / 2
    flops = (1 + BACKWARD_FLOPS) * forward_flops(profile.num_heads, profile.head_dim, pairs)
    return flops / (profile.whole_forward_us[-1] + profile.whole_backward_us[-1]) / 1e6
