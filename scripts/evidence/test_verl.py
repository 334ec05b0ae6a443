"""verl's own tests of its balancing, with ours in its place: VERL_PATH names a checkout.

verl imports more than this project does: ray, tensordict, and what these import (``pip install ray
tensordict`` into an environment with torch, or with ``--target`` into a folder on PYTHONPATH).
Nothing of it is replaced but the two functions, and NCCL by gloo where there is no GPU.
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
import megatron_wlb.verl as ours

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
    if not torch.cuda.is_available():
        module.get_nccl_backend = lambda: "gloo"

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


def test_verl_s_own_tests_pass(tmp_path: Path) -> None:
    (tmp_path / "planned_by_us.py").write_text(PLUGIN)
    known = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join([str(tmp_path), str(VERL), str(Path(__file__).parents[2]), known])
    found = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "planned_by_us", "-p", "no:cacheprovider"),
            *("--rootdir", str(tmp_path), f"{VERL}/tests/utils/test_seqlen_balancing.py"),
        ],
        capture_output=True, text=True, check=False, timeout=900, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    # The seventh is of DataProto.split, which calls neither.
    assert "7 passed" in found.stdout and "ours was called in 6 tests" in found.stdout
