"""Devices of processes, and determinism that has to be asked for."""

from __future__ import annotations

from typing import Any

import pytest


def test_deterministic_mode_asks_for_a_fixed_algorithm_of_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from megatron_wlb.errors import ConfigError
    from megatron_wlb.runtime.trainer import distributed

    found: list[Any] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", found.append)
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with pytest.raises(ConfigError, match="NCCL_ALGO=None; set that in the environment to one of"):
        distributed._be_deterministic("nccl")
    distributed._be_deterministic("gloo")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    distributed._be_deterministic("nccl")
    assert found == [True, True]


def test_a_process_too_many_for_the_gpus_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from megatron_wlb.errors import ConfigError
    from megatron_wlb.runtime.trainer import distributed

    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert distributed.choose_device("auto") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"process 2 of this machine.* there are 2, .* or use"):
        distributed.choose_device("auto")
    assert chosen == [0, 1]
