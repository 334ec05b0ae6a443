"""The recorder of waits sees each way to take a value out of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.waits import recorded

LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "if": lambda t: "yes" if t.sum() > 0 else "no",
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "asarray": lambda t: np.asarray(t),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "equal": lambda t: torch.equal(t, t),
    "range": lambda t: list(range(t.sum().long())),  # type: ignore[call-overload]
    "format": lambda t: f"{t.sum():.3f}",
    "synchronize": lambda _: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", LOOKS)
def test_recorder_sees_a_look(name: str) -> None:
    tensor = torch.arange(3.0)
    with recorded() as places:
        LOOKS[name](tensor)
    assert places


def test_recorder_passes_over_what_waits_for_nothing() -> None:
    tensor, out = torch.arange(3.0), np.zeros(3)
    with recorded() as places:
        copy = tensor.to("cpu", non_blocking=True, copy=True)
        torch.from_numpy(out).add_(1)
        _ = (tensor @ tensor).sqrt().clamp(max=1.0), tensor[:2], copy.shape, len(copy)
    assert not places
    with recorded("a_step") as places:
        tensor.sum().item()
    assert not places
