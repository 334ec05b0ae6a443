"""Determinism that has to be asked for."""

from __future__ import annotations

from typing import Any

import pytest


def test_deterministic_mode_asks_for_a_fixed_algorithm_of_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from megatron_wlb.errors import ConfigError
    from megatron_wlb.runtime import distributed

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
