"""Freed memory stays with the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COUNT = """
import resource, torch
from megatron_wlb.runtime.emulation.heap import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):  # until the heap has its size
    blocks = [torch.ones(7 * 2**20) for _ in range(3)]  # 28 MiB each
    del blocks
before = faults()
for _ in range(10):
    blocks = [torch.ones(7 * 2**20) for _ in range(3)]
    del blocks
print(faults() - before)
"""


def test_memory_that_was_freed_needs_no_new_pages() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("the C library of Linux is told")
    faults = {}
    # What glibc does by itself hangs on where its heap happens to lie; so tell it to give back.
    eager = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    for keep in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", COUNT.format(keep=keep)],
            capture_output=True, text=True, check=True, timeout=120, env=eager,
        )  # fmt: skip
        faults[keep] = int(done.stdout)
    assert faults[True] < 500 < 5_000 < faults[False]
