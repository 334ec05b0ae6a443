"""No packing at all: every document runs in the step that it arrives in (SlimPack §4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megatron_wlb.packing.base import Limits, load_state, save_state
from megatron_wlb.plan import Document


class SlimPacker:
    """Gives back the documents of each step as they came, in one list.

    :class:`~megatron_wlb.planning.slicing.Slicer` deals them out to replicas and cuts the long
    ones into slices, so none has to wait. They may have any length.
    """

    name: ClassVar[str] = "slim"
    in_stream_order: ClassVar[bool] = False
    look_ahead = 0
    waiting: Sequence[Document] = ()

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        self.limits = self.limits.at(step)
        return [[*documents]]

    def flush(self, step: int) -> list[list[Document]]:
        return [[]]

    def state_dict(self) -> dict[str, Any]:
        return save_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_state(self, state)
