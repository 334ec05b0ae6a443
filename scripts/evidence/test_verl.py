"""verl's own tests of its balancing, with ours in its place: VERL_PATH names a checkout of 0.9.

verl imports more than this project does: ray, tensordict, and what these import (``pip install ray
tensordict`` into an environment with torch, or with ``--target`` into a folder on PYTHONPATH).
Nothing of it is replaced but the two functions, and where there is no GPU its device and NCCL.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

VERL = os.environ.get("VERL_PATH")
MISSING = [name for name in ("ray", "tensordict") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(VERL is None, reason="VERL_PATH names no checkout of verl"),
    pytest.mark.skipif(bool(MISSING), reason="verl's requirements ray and tensordict are missing"),
]

PLUGIN = """
import os
from types import SimpleNamespace
import pytest
import torch
import torch.multiprocessing as mp
import verl.utils.seqlen_balancing as theirs
from verl.utils import device
import megatron_wlb.adapters.verl as ours

called = set()
names = "get_seqlen_balanced_partitions", "rearrange_micro_batches"

def counted(name):
    def function(*given, **named):
        called.add(os.environ.get("PYTEST_CURRENT_TEST", "a worker").split(" ")[0])
        return getattr(ours, name)(*given, **named)
    return function

def put(module):
    for name in names:
        setattr(theirs, name, counted(name))
        if hasattr(module, name):
            setattr(module, name, getattr(theirs, name))
    if not torch.cuda.is_available():  # for which verl knows no platform
        module.get_nccl_backend = lambda: "gloo"
        module.get_torch_device = lambda: torch.cpu
        module.get_device_name = device.get_device_name = lambda: "cpu"

def work(rank, name, file, *args):  # in a process of its own
    from importlib.util import module_from_spec, spec_from_file_location
    spec = spec_from_file_location("their_tests", file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    put(module)
    getattr(module, name)(rank, *args)
    assert called, "a worker called none of ours"

@pytest.fixture(autouse=True)
def planned_by_us(request, monkeypatch):
    put(request.module)
    def spawn(fn, args, **named):
        called.add(os.environ["PYTEST_CURRENT_TEST"].split(" ")[0])
        mp.spawn(work, (fn.__name__, request.module.__file__, *args), **named)
    monkeypatch.setattr(request.module, "mp", SimpleNamespace(spawn=spawn))

def pytest_sessionfinish():
    print(f"ours was called in {len(called)} tests")
"""

GROUPS = """
from inspect import signature
import torch
from tensordict import TensorDict
import verl.utils.seqlen_balancing as theirs
import megatron_wlb.adapters.verl as ours

for name in "get_seqlen_balanced_partitions", "rearrange_micro_batches":
    one, other = (signature(getattr(module, name)).parameters for module in (theirs, ours))
    assert [(n, p.default) for n, p in one.items()] == [
        (n, p.default) for n, p in other.items() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
lengths = torch.tensor([70, 10, 40, 45, 5, 90, 30, 31, 64, 20, 11, 12])
mask = (torch.arange(100) < lengths[:, None]).long()
batch = TensorDict({"input_ids": mask * lengths[:, None], "attention_mask": mask}, [12])
for module in theirs, ours:
    found, parts = module.rearrange_micro_batches(batch, 200, force_group_size=2)
    assert sorted(n for part in parts for n in part) == list(range(12))
    for part, one in zip(parts, found, strict=True):
        assert part[::2] == [n - 1 for n in part[1::2]] and not any(n % 2 for n in part[::2])
        assert torch.equal(one["input_ids"], batch["input_ids"][part])
        assert module is theirs or one["attention_mask"].sum() <= 200
print("both kept groups")
"""


def run(folder: Path, *command: str) -> str:
    known = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join([str(folder), str(VERL), str(Path(__file__).parents[2]), known])
    found = subprocess.run(
        [sys.executable, *command],
        capture_output=True, text=True, check=False, timeout=900, cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_verl_s_parameters_and_groups_are_kept(tmp_path: Path) -> None:
    assert "both kept groups" in run(tmp_path, "-c", GROUPS)


def test_verl_s_own_tests_pass(tmp_path: Path) -> None:
    (tmp_path / "planned_by_us.py").write_text(PLUGIN)
    tests = f"{VERL}/tests/utils/test_seqlen_balancing.py"
    plugins = "-p", "planned_by_us", "-p", "no:cacheprovider"
    found = run(tmp_path, "-m", "pytest", *plugins, "--rootdir", str(tmp_path), tests)
    # The seventh is of DataProto.split, which calls neither.
    assert "7 passed" in found and "ours was called in 6 tests" in found
