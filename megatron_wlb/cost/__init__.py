"""How long a document takes: from the model's shape, or fitted to measured times."""

from megatron_wlb.cost.analytic import CostModel, DocumentCost, ModelShape, analytic_cost
from megatron_wlb.cost.profile import Fit, Sample, fit_document_cost

__all__ = [
    "CostModel",
    "DocumentCost",
    "Fit",
    "ModelShape",
    "Sample",
    "analytic_cost",
    "fit_document_cost",
]
