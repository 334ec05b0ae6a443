"""Freed memory stays with the process, as a GPU's caching allocator has it.

glibc gives large blocks back to the kernel at once, and each new one comes page by page. That is a
fifth of the backward pass of attention over chunks of a long document, and takes longer or shorter
as the kernel likes: enough to choose a sharding wrongly by.
"""

from __future__ import annotations

import ctypes
import platform

# From glibc's malloc.h, with values: blocks of up to 32 MiB (the most that it allows) come from the
# heap, which is never trimmed and grows by 64 MiB.
_OPTIONS = {
    -3: 32 * 2**20,  # M_MMAP_THRESHOLD
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD
    -2: 64 * 2**20,  # M_TOP_PAD
}


def keep_freed_memory() -> bool:
    """Keeps the process's freed memory from now on; returns whether it does (glibc only)."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(option, value) for option, value in _OPTIONS.items()])
