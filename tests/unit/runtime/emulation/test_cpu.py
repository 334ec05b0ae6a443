"""The CPU emulation: explicit, undone by one call, never on where there is a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_wlb.errors import ConfigError
from megatron_wlb.runtime.emulation import cpu
from megatron_wlb.runtime.trainer import distributed


def run(code: str) -> str:
    """What a fresh interpreter prints: the emulation is of a whole process."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_emulation_answers_cuda_and_is_undone() -> None:
    found = run("""
import torch
from megatron_wlb.runtime.emulation import cpu
before = {name: getattr(torch.cuda, name) for name in cpu._TORCH_CUDA}
cpu.install(); cpu.install()
x = torch.zeros(3, device="cuda")
assert cpu.installed() and x.device.type == "cpu" and x.type() == "torch.cuda.FloatTensor"
assert x.cuda() is x and x.to("cuda").device.type == "cpu" and torch.cuda.device_count() == 1
assert not torch.cuda.is_available()
assert torch.cuda.memory_stats()["reserved_bytes.all.current"] == 0  # --log-memory-to-tensorboard
from megatron.core.tensor_parallel import random
state = torch.cuda.get_rng_state()
first = torch.rand(2)
random._set_cuda_rng_state(state)
assert torch.equal(torch.rand(2), first)
cpu.uninstall()
assert not cpu.installed() and torch.zeros(3).type() == "torch.FloatTensor"
assert before == {name: getattr(torch.cuda, name) for name in before}
try:
    torch.zeros(3, device="cuda")
except (AssertionError, RuntimeError):
    print("undone")
""")
    assert found == "undone\n"


def test_emulation_after_megatron_is_refused() -> None:
    found = run("""
import megatron.core
from megatron_wlb.errors import CompatibilityError
from megatron_wlb.runtime.emulation import cpu
try:
    cpu.install()
except CompatibilityError as error:
    print(error, cpu.installed())
""")
    assert "after megatron.core was imported" in found
    assert found.endswith("False\n")


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert distributed.choose_device("auto") == "cuda"
    assert chosen == [3]
    assert not cpu.installed()


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--wlb-device is cuda, but torch sees no GPU"):
        distributed.choose_device("cuda")
    assert not cpu.installed()
