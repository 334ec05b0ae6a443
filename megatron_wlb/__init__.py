"""Workload-balanced 4D-parallel training of large language models, as a plugin for Megatron-LM.

Data flows one way: documents -> plan -> run. Start reading at :mod:`megatron_wlb.planning.planner`.
The names in ``__all__`` are public (:mod:`megatron_wlb.api`); all others are private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_wlb.api import (
        evaluate_packing,
        model_cost,
        plan_batch,
        plan_steps,
        simulate_step,
    )
    from megatron_wlb.cost import DocumentCost, Parallelism
    from megatron_wlb.data.lengths import sample_lengths
    from megatron_wlb.data.targets import write_targets
    from megatron_wlb.errors import WLBError
    from megatron_wlb.plan import Document, MicroBatchPlan, Span, StepPlan
    from megatron_wlb.planning.packing.metrics import PackingMetrics
    from megatron_wlb.runtime.trainer.sample_trainer import SampleTrainer
    from megatron_wlb.simulator.step_timeline import StepTimeline

__version__ = "0.2.0"

__all__ = [
    "Document", "DocumentCost", "MicroBatchPlan", "PackingMetrics", "Parallelism",
    "SampleTrainer", "Span", "StepPlan", "StepTimeline", "WLBError", "__version__",
    "evaluate_packing", "model_cost", "plan_batch", "plan_steps", "sample_lengths",
    "simulate_step", "write_targets",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loads the public name when it is used first, so that importing the package stays light."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_wlb.extensions import named

    # One of them imports torch and Megatron.
    module = "runtime.trainer.sample_trainer" if name == "SampleTrainer" else "api"
    return named(f"megatron_wlb.{module}:{name}")
