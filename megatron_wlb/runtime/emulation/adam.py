"""Adam in the form that Megatron's distributed optimizer can save and load, on the CPU.

That optimizer restores checkpoints only of a fused Adam of Apex's form: one ``step`` a parameter
group, and only ``exp_avg`` and ``exp_avg_sq`` a parameter. Neither Apex nor TransformerEngine
exists for the CPU, so torch's own functional Adam is given that form here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam

from megatron_wlb.runtime.compat.patching import PatchSet


class GroupStepAdam(torch.optim.Optimizer):
    """torch's Adam/AdamW arithmetic with the step counted per parameter group."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert not capturable
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            group["step"] = group.get("step", 0) + 1
            states = [self.state[p] for p in params]
            for p, state in zip(params, states, strict=True):
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
            beta1, beta2 = group["betas"]
            adam(
                params,
                [p.grad for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                # adam() advances the step itself.
                [torch.tensor(group["step"] - 1.0) for _ in params],
                foreach=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                decoupled_weight_decay=self.adam_w_mode,
            )


def install_adam(patches: PatchSet) -> None:
    """Makes Megatron's optimizers build :class:`GroupStepAdam` and treat it as Apex's."""
    patches.replace("megatron.core.optimizer", "Adam", GroupStepAdam)
    patches.replace("megatron.core.optimizer", "USING_PYTORCH_OPTIMIZER", False)
    module = "megatron.core.optimizer.distrib_optimizer"
    patches.replace(module, "Adam", GroupStepAdam)
    patches.replace(module, "HAVE_APEX_OR_TE", True)
    patches.replace(module, "USING_APEX_OPTIMIZER", True)
