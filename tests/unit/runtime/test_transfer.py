"""How what the host makes gets to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.gloo import GlooPool

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.transfer import from_first_rank, to_device


def made_or_said(fails: bool) -> str:
    """What each rank gets of a thing that only the first one may make, on every rank."""

    def make() -> str:
        if fails:
            raise CheckpointError("no room")
        return f"made on rank {torch.distributed.get_rank()}"

    try:
        return from_first_rank(make)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"


def test_first_rank_brings_what_it_makes_and_its_error_to_all(gloo: GlooPool) -> None:
    assert gloo.run(2, made_or_said, False) == ["made on rank 0"] * 2
    assert gloo.run(2, made_or_said, True) == ["CheckpointError: no room"] * 2


def test_copies_to_a_gpu_start_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded, as there need not be a GPU; tests/gpu makes such copies."""
    calls: list[object] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("pin")
        return tensor

    def to(tensor: torch.Tensor, device: object, *, non_blocking: bool) -> torch.Tensor:
        calls.append((str(device), non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    to_device(np.arange(3), torch.device("cuda", 1))
    assert calls == ["pin", ("cuda:1", True)]
    to_device(torch.arange(3), "cuda")
    assert calls[2:] == ["pin", ("cuda", True)]
    to_device(np.arange(3), "cpu")
    assert calls[4:] == [("cpu", True)]


def test_numbers_and_type_stay() -> None:
    array = np.array([3, 1, 2**40])
    assert to_device(array, "cpu").tolist() == array.tolist()
    assert to_device(torch.tensor([7], dtype=torch.int32), "cpu").dtype == torch.int32
