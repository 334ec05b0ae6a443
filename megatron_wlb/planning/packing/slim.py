"""No packing at all: every document runs in the step that it arrives in (SlimPack §4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_wlb.plan import Document
from megatron_wlb.planning.packing.base import Limits, Packer, load_state, save_state

if TYPE_CHECKING:
    from megatron_wlb.cost import CostModel
    from megatron_wlb.planning.packing.settings import PackingSettings


class SlimPacker(Packer):
    """Gives back the documents of each step as they came, in one list.

    :class:`~megatron_wlb.planning.slicing.cut.Slicer` deals them out to replicas and cuts the long
    ones into slices, so none has to wait. They may have any length.
    """

    name: ClassVar[str] = "slim"
    reads = frozenset(
        {"max_tokens", "units", "slice_multiple", "dp_merge", "recompute", "slice_cache"}
    )
    number = "units"
    slices = True
    cannot: ClassVar[Mapping[str, str]] = {
        "--defer-embedding-wgrad-compute": "it pairs forward and backward passes in one order, "
        "slices run backward last to first"
    }
    unshaped = "{} packing chooses sizes and order itself; leave --wlb-shape (+shape) out"
    unnumbered = (
        "{} packing chooses the number of micro-batches itself (--wlb-units); leave "
        "--wlb-micro-batches out"
    )
    waiting: Sequence[Document] = ()

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    @classmethod
    def make(cls, settings: PackingSettings, limits: Limits, cost: CostModel) -> SlimPacker:
        return cls(limits)

    @classmethod
    def said(cls, settings: PackingSettings) -> Iterable[str]:
        return () if settings.units is None else (f"{settings.units} units",)

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        self.limits = self.limits.at(step)
        return [[*documents]]

    def flush(self, step: int) -> list[list[Document]]:
        return [[]]

    def state_dict(self) -> dict[str, Any]:
        return save_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_state(self, state)
