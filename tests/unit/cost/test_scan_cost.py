"""What scans over a document's tokens cost, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.machines import H100

from megatron_wlb.cost import AnalyticModel, ModelShape
from megatron_wlb.cost.analytic import ForwardTimes
from megatron_wlb.cost.execution import Execution
from megatron_wlb.cost.layers import Layer
from megatron_wlb.cost.parts import GatedDelta, Mamba
from megatron_wlb.cost.parts.scan import Scan

SHAPE = ModelShape(4096, 11008, 1, 32, 32, 128, 32000, gated=True)
MAMBA = Mamba(128, 64, 128, 8)  # of Nemotron 3 Super
DELTA = GatedDelta(16, 32, 128, 128, 4)  # of Qwen3.5


def forward(part: Scan, scan_share: float) -> ForwardTimes:
    machine = replace(H100, scan_share=scan_share)
    return AnalyticModel(SHAPE, Execution(), machine).layer(Layer((part,)))


@pytest.mark.parametrize(
    ("part", "products", "moved"),
    [
        # 3.5 for each number of the state; 10,240 convolved, 8,192 gated and normed, and
        # 128 × 64 × 128 of fp32 behind 128 tokens, written and read.
        (MAMBA, 3_670_016, 4 * 10_240 + 6 * 8_192 + 32_768),
        # 4 for each; 8,192 convolved, 4,096 normed, and 32 × 128 × 128 of fp32 behind 64 tokens.
        (DELTA, 2_097_152, 6 * 8_192 + 6 * 4_096 + 32_768),
    ],
)
def test_scans_reach_their_share_of_the_peak_and_move_states(
    part: Scan, products: int, moved: int
) -> None:
    assert part.state_products == products
    assert part.elementwise_numbers == moved
    slow, fast = (forward(part, share) for share in (0.1, 0.2))
    peak_flops_us = H100.peak_tflops * 1e6
    saved_us = slow.matrix_us - fast.matrix_us
    assert saved_us == pytest.approx(2 * products * (1 / 0.1 - 1 / 0.2) / peak_flops_us)
    assert slow.elementwise_us == fast.elementwise_us
