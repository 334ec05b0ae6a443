"""What some packings cannot run with, and why."""

from __future__ import annotations

OBSTACLES = {
    "virtual stages": "slices of documents run in one chunk a rank, and leave few bubbles so",
    "experts of replicas": (
        "data-parallel ranks have other numbers of slices, and exchange tokens with each other's "
        "experts in each"
    ),
    "delayed scaling": (
        "delayed scaling is agreed on by data-parallel ranks after each pass, and ranks that run "
        "other numbers of slices would wait for each other forever"
    ),
    "sharded weights": (
        "each pass gathers weights over data-parallel ranks, which have other numbers of slices"
    ),
    "deferred gradients": (
        "it pairs forward and backward passes in one order, slices run backward last to first"
    ),
}
"""Reasons, by what a run has. :attr:`.base.Packer.cannot` names some."""
