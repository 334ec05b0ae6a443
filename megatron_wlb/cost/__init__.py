"""What documents cost in time and memory: from the model's shape, or from measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_wlb.cost.analytic import AnalyticModel
from megatron_wlb.cost.document import Cost, CostModel, DocumentCost
from megatron_wlb.cost.execution import Execution
from megatron_wlb.cost.hardware import Hardware, load_hardware
from megatron_wlb.cost.memory import MemoryModel
from megatron_wlb.cost.shape import ModelShape, Parallelism, Recompute
from megatron_wlb.cost.table import ProfiledCost, check_model, read_cost_file
from megatron_wlb.errors import ConfigError
from megatron_wlb.reading import shown

__all__ = [
    "AnalyticModel",
    "Cost",
    "CostModel",
    "DocumentCost",
    "Execution",
    "Hardware",
    "MemoryModel",
    "ModelShape",
    "Parallelism",
    "ProfiledCost",
    "Recompute",
    "check_model",
    "cost_from_dict",
    "load_hardware",
    "read_cost_file",
]


def cost_from_dict(values: Mapping[str, Any]) -> Cost:
    """Reads the cost that :meth:`Cost.as_dict` wrote: tables or coefficients.

    Raises :class:`ConfigError` if it is neither.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"cost is {shown(values)}; give coefficients or tables by name")
    if "attention" in values or "linear" in values:
        return ProfiledCost.from_dict(values)
    return DocumentCost.from_dict(values)
