"""What only some runs need: found here by name, and loaded when a setting asks for it.

Nothing that every run needs is here.
"""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import Any

EXTENSIONS = {
    # --wlb-strategies, wlb plan --strategies: a megatron_wlb.planning.extension.Extension
    "strategies": "megatron_wlb.strategies.entry:Strategies",
    # --wlb-packing auto
    "settled": "megatron_wlb.simulator.choose:settled",
    # --wlb-shape on, --wlb-micro-batches auto: a megatron_wlb.planning.planner.Shaping
    "shape": "megatron_wlb.planning.balance.shaping:Shaper",
    "micro-batches": "megatron_wlb.planning.balance.numbers:NumberChooser.of",
    # --mock-data, --sft, --fim-data
    "mock data": "megatron_wlb.data.mock:MockCorpus",
    "sft": "megatron_wlb.runtime.megatron_lm.sft:with_conversations",
    "fim": "megatron_wlb.runtime.megatron_lm.fim:with_middles",
    # layers of G and M: Megatron's mixers told of documents, and what they are told
    "GatedDeltaNet": "megatron_wlb.runtime.gpt.delta_net:DocumentGatedDeltaNet",
    "MambaMixer": "megatron_wlb.runtime.gpt.mamba_mixer:DocumentMambaMixer",
    "states": "megatron_wlb.runtime.gpt.states:ScannedDocuments",
    "states off": "megatron_wlb.runtime.gpt.states:uninstall",
    # samples that begin alike
    "shared rows": "megatron_wlb.runtime.gpt.attention.shared_rows:SharedRows",
    # --wlb-cost measured
    "measured": "megatron_wlb.runtime.measuring.measure:measured_cost",
    # --wlb-device cpu
    "cpu": "megatron_wlb.runtime.megatron_lm.cpu_loop:install",
    "cpu refusals": "megatron_wlb.runtime.megatron_lm.cpu_loop:refusals",
}
"""``MODULE:NAME`` of each."""


def load(name: str) -> Any:
    """What the table names."""
    return named(EXTENSIONS[name])


def named(place: str) -> Any:
    """What ``MODULE:NAME`` is."""
    module, _, name = place.partition(":")
    return attrgetter(name)(import_module(module))
