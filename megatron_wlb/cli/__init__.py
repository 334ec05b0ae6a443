"""The ``wlb`` command and its sub-commands."""

from megatron_wlb import interrupts  # noqa: F401 - before all that takes time
