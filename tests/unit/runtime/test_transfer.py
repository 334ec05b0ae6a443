"""How what the host makes gets to the device."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gloo import GlooPool

from megatron_wlb.errors import CheckpointError
from megatron_wlb.runtime.ranks.transfer import (
    LEAST_BYTES,
    PER_TOKEN_BYTES,
    HostCopy,
    PinnedBlock,
    from_first_rank,
    mapped,
    nccl_options,
    to_device,
)


def test_options_of_nccl_are_those_of_the_group_that_megatron_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a copy of its attributes, as a CPU build of torch has no NCCL."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(cga_cluster_size=4, max_ctas=32, min_ctas=1, net_name="")

    given = Options(is_high_priority_stream=True)
    given.config.max_ctas, given.config.net_name = 8, "IB"
    group: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=given))
    nccl = SimpleNamespace(Options=Options)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "nccl")
    made = nccl_options(group)
    assert made is not given and made.is_high_priority_stream
    assert vars(made.config) == vars(given.config)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    assert nccl_options(group) is None


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


def test_what_a_step_copies_is_pinned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where it was not enough, more in the next step."""
    pinned: list[int] = []
    empty = torch.empty

    def pin(size: int, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.extend([size] * pin_memory)
        return empty(size, **options)

    def pin_alone(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(0)
        return tensor

    monkeypatch.setattr(torch, "empty", pin)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_alone)
    block, num_tokens = PinnedBlock("cuda"), 1000
    expected = LEAST_BYTES + int(PER_TOKEN_BYTES) * num_tokens
    block.begin(num_tokens)
    given = [torch.arange(5), torch.rand(2, 3).t(), torch.tensor(7), torch.tensor([True])]
    held = [block.pinned(tensor) for tensor in given]
    assert all(map(torch.equal, held, given))
    assert [tensor.dtype for tensor in held] == [tensor.dtype for tensor in given]
    assert len({tensor.untyped_storage().data_ptr() for tensor in held}) == 1
    assert pinned == [expected]
    much = torch.zeros(expected, dtype=torch.uint8)
    assert block.pinned(much) is much
    assert pinned == [expected, 0]
    block.begin(num_tokens)
    assert len(pinned) == 3 and pinned[-1] > expected + LEAST_BYTES
    assert torch.equal(block.pinned(much), much) and len(pinned) == 3


def test_numbers_and_type_stay() -> None:
    array = np.array([3, 1, 2**40])
    assert to_device(array, "cpu").tolist() == array.tolist()
    assert to_device(torch.tensor([7], dtype=torch.int32), "cpu").dtype == torch.int32


@dataclasses.dataclass(frozen=True)
class Held:
    pair: tuple[torch.Tensor | None, torch.Tensor]
    lengths: tuple[int, ...]
    inner: Held | None = None
    name: str = "held"


def test_every_tensor_inside_is_changed_once() -> None:
    shared = torch.arange(3)
    held = Held((None, shared), (1, 2), Held((shared, torch.ones(2)), ()))
    changed: list[torch.Tensor] = []

    def double(tensor: torch.Tensor) -> torch.Tensor:
        changed.append(tensor)
        return tensor * 2

    found = mapped(held, double)
    assert len(changed) == 2
    assert found.inner is not None and found.inner.pair[0] is found.pair[1]
    assert found.pair[0] is None and found.pair[1].tolist() == [0, 2, 4]
    assert found.inner.pair[1].tolist() == [2, 2]
    assert found.lengths is held.lengths and shared.tolist() == [0, 1, 2]
    assert mapped(held, lambda tensor: tensor) is held
    assert mapped(None, double) is None


def test_a_copy_to_the_host_is_of_its_time() -> None:
    number = torch.tensor([2.5], dtype=torch.float64)
    copy = HostCopy(number)
    number += 1
    assert copy.item() == 2.5
