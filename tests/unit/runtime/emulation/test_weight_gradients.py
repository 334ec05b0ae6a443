"""The product that adds a weight's gradient to the gradient buffer."""

from __future__ import annotations

import sys

import pytest
import torch

from megatron_wlb.runtime.emulation import weight_gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_is_added_to_what_is_there(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    inputs, grad_output = (
        torch.randn(7, size, generator=random).to(dtype).requires_grad_() for size in (5, 3)
    )
    buffer = torch.randn(40, generator=random)
    main_grad, before = buffer[10:25].view(3, 5), buffer.clone()
    expected = main_grad + (grad_output.t() @ inputs).float()
    with torch.no_grad():
        weight_gradients.accumulate(inputs, grad_output, main_grad)
    # Equal but for the order of sums in fp32.
    torch.testing.assert_close(main_grad, expected.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(buffer[:10], before[:10]) and torch.equal(buffer[25:], before[25:])


def test_module_is_there_while_it_is_installed() -> None:
    weight_gradients.install_weight_gradients()
    module = sys.modules[weight_gradients.MODULE]
    assert module.wgrad_gemm_accum_fp32 is weight_gradients.accumulate
    weight_gradients.uninstall_weight_gradients()
    assert weight_gradients.MODULE not in sys.modules
