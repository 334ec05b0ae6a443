"""How deep a step of the launcher is: who reads a traceback reads these frames."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest
from helpers.texts import write_texts
from megatron_lm_runs import BOTH, PP2, SLICES, launch
from rank_runs import finish

import megatron_wlb
from megatron_wlb.runtime.gpt.attention.kernels import torch_cpu

pytestmark = pytest.mark.launcher

MOST_FRAMES = 15
"""Of this package, from the launcher's ``main`` to where the kernel is called."""
NOTES = "frames"


def _note_frames() -> None:
    """Writes the stack of rank 0's first call of the kernel; runs in the rank."""
    views = torch_cpu._queries
    deepest: list[str] = []

    def noting(*args, **kwargs):
        here, kernels = Path(megatron_wlb.__file__).parent, Path(torch_cpu.__file__).parent
        stack = [(Path(frame.filename), frame.name) for frame in traceback.extract_stack()]
        own = [(path, name) for path, name in stack if here in path.parents]
        names = [f"{path.name}: {name}" for path, name in own if path.parent != kernels]
        # The kernel is checked before the run, too.
        if os.environ["RANK"] == "0" and "executor.py: run_actions" in names:
            deepest[:] = max(deepest, names, key=len)
            Path(NOTES).write_text("\n".join(deepest))
        return views(*args, **kwargs)

    torch_cpu._queries = noting


def test_step_in_slices_passes_few_frames(tmp_path: Path) -> None:
    corpus = write_texts(tmp_path / "a", 60, 3.8, most=700)
    flags = BOTH | PP2 | SLICES | {"train_iters": 1, "data_path": corpus}
    finish(launch(tmp_path, 2, flags, fault=_note_frames))
    frames = (tmp_path / NOTES).read_text().splitlines()
    assert 8 < len(frames) <= MOST_FRAMES, frames
    assert sum(frame.endswith(": forward_step") for frame in frames) == 1
