"""Weight gradients added where they belong, on the CPU: Megatron's gradient accumulation fusion.

With ``gradient_accumulation_fusion`` Megatron's linear layers add each micro-batch's gradient to
the gradient buffer themselves, in the matrix product. Otherwise the product is written, read and
added: two more passes over all parameters a micro-batch. The kernel is a module of Apex's for
GPUs; here torch's own product stands in for it.
"""

from __future__ import annotations

import sys
import types

import torch

MODULE = "fused_weight_gradient_mlp_cuda"
"""By which Megatron imports it."""


def accumulate(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Adds ``grad_outputᵀ · inputs`` to ``main_grad``: ``[T, I], [T, O] -> [O, I]``.

    Of bf16 the product is rounded and then added in fp32, as without the fusion: torch has no
    product of bf16 into fp32 on the CPU, and copies in fp32 would take more memory than both.
    """
    if inputs.dtype == main_grad.dtype:
        main_grad.addmm_(grad_output.t(), inputs)
    else:
        main_grad += grad_output.t() @ inputs


def install_weight_gradients() -> None:
    """Gives Megatron the module, in place of Apex's; to be called before it is imported."""
    module = types.ModuleType(MODULE)
    module.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
    module.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
    sys.modules[MODULE] = module


def uninstall_weight_gradients() -> None:
    """Lets Apex's module be found again, by what is imported from now on."""
    sys.modules.pop(MODULE, None)
