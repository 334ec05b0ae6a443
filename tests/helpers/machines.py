"""Machines for figures by hand: assumed shares, and kernels that take no more than their work."""

from __future__ import annotations

from dataclasses import replace

from megatron_wlb.cost import load_hardware

H100 = replace(
    load_hardware("h100-sxm"),
    linear_share=0.606,  # 600 TF/s
    attention_share=0.404,  # 400 TF/s
    link_share=0.778,  # 350 GB/s in a node
    fp8_linear_share=0.45,
    tp_overlap=0.9,
    product_overlap=1.0,
    kernel_us=0.0,
    launch_us=0.0,
)
"""An H100 whose host launches at once: small models would last as long as their launches."""
