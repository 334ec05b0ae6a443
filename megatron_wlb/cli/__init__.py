"""The ``wlb`` command and its sub-commands."""
