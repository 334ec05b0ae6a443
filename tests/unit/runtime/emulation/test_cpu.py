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
own = [vars(torch.Tensor).copy(), *(getattr(torch, name) for name in cpu._MAKERS.split())]
cpu.install(); cpu.install()
x = torch.zeros(3, device="cuda")
assert cpu.installed() and x.device.type == "cpu" and x.type() == "torch.cuda.FloatTensor"
class Mode(torch.overrides.TorchFunctionMode):  # calls what it is asked for by its name
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))
with Mode():
    assert x.type() == "torch.cuda.FloatTensor"
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
assert own == [vars(torch.Tensor), *(getattr(torch, name) for name in cpu._MAKERS.split())]
try:
    torch.zeros(3, device="cuda")
except (AssertionError, RuntimeError):
    print("undone")
""")
    assert found == "undone\n"


def test_every_way_to_make_a_tensor_is_answered() -> None:
    found = run("""
import threading, torch
from torch.utils._device import _device_constructors
from megatron_wlb.runtime.emulation import cpu
names = {f.__name__ for f in _device_constructors() if getattr(torch, f.__name__, None) is f}
print(names - set(cpu._MAKERS.split()))
cpu.install()
x = torch.ones(2, device="cuda:0", pin_memory=True)
made = [x, torch.nn.Linear(2, 2, device="cuda").weight, x.new_zeros(1, device=torch.device("cuda"))]
for name in ("empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randn_like"):
    made.append(getattr(torch, name)(x, *([3] if name == "full_like" else []), device="cuda"))
made += [torch.randint_like(x, 3, device="cuda"), torch.nn.Linear(2, 2).cuda().weight]
made += [torch.nn.Linear(2, 2).to("cuda").weight, x.to(device="cuda"), x.to(torch.device("cuda"))]
thread = threading.Thread(target=lambda: made.append(torch.arange(3, device="cuda")))
thread.start(); thread.join()
print({tensor.device.type for tensor in made})
with torch.device("meta"):
    print(torch.zeros(1).device, torch.zeros(1, device="cuda").device)
from torch.overrides import _get_current_function_mode_stack
print(_get_current_function_mode_stack())  # operations pay nothing for it
""")
    assert found == "set()\n{'cpu'}\nmeta cpu\n[]\n"


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
