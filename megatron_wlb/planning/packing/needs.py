"""What some packings cannot run with, and why."""

from __future__ import annotations

OBSTACLES = {
    "deferred gradients": (
        "it pairs forward and backward passes in one order, slices run backward last to first"
    ),
}
"""Reasons, by what a run has. :attr:`.base.Packer.cannot` names some."""
