"""The packings by name: what each does, and the class that does it, in a file of its own."""

from __future__ import annotations

from collections import ChainMap
from typing import NamedTuple


class Place(NamedTuple):
    """Where a packing is."""

    about: str
    """What ``--help`` says of it."""
    kind: str
    """``MODULE:CLASS``, a :class:`~megatron_wlb.planning.packing.base.Packer`."""


PACKINGS = {
    "original": Place(
        "Megatron's fixed windows", "megatron_wlb.planning.packing.original:OriginalPacker"
    ),
    "fixed-greedy": Place(
        "fixed windows, repacked over --wlb-fixed-batches",
        "megatron_wlb.planning.packing.fixed:FixedGreedyPacker",
    ),
    "fixed-solver": Place(
        "the same by a solver", "megatron_wlb.planning.packing.solver:FixedSolverPacker"
    ),
    "wlb": Place(
        "Algorithm 1 of WLB-LLM, with delay queues", "megatron_wlb.planning.packing.wlb:WLBPacker"
    ),
    "hold": Place(
        "holds back the fewest heaviest documents", "megatron_wlb.planning.packing.hold:HoldPacker"
    ),
    "slim": Place(
        "cuts long documents into slices (SlimPack), and holds none back",
        "megatron_wlb.planning.packing.slim:SlimPacker",
    ),
}

CHOSEN = "auto"
"""The packing that is chosen at the start of a run, before anything else is done with it."""
ASKED = ChainMap(
    {CHOSEN: Place("the fastest of original, hold and slim, by simulation at the start", "")},
    PACKINGS,
)
"""What ``--wlb-packing`` may be."""
