"""Megatron-core's own tests of its packing scheduler, with ours in its place, on eight CPU ranks.

MEGATRON_DEV_PATH names a checkout of Megatron-LM's branch ``dev`` with its tests. It imports
triton, which is to be installed beside this project's requirements. Its device is the CPU by our
emulation, NCCL is gloo, and Python 3.11 lends it ``typing.override``; nothing else is replaced.
"""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

MEGATRON = os.environ.get("MEGATRON_DEV_PATH")
pytestmark = [
    pytest.mark.skipif(MEGATRON is None, reason="MEGATRON_DEV_PATH names no checkout of dev"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Megatron-LM's dev needs triton"),
]
NUM_RANKS = 8

SETUP = """
import random, sys, typing
import torch, torch.distributed as dist, typing_extensions
if not hasattr(typing, "override"):
    typing.override = typing_extensions.override
torch.set_num_threads(1)
from megatron_wlb.packing_scheduler import planned
from megatron_wlb.runtime.emulation import cpu
cpu.install()
start = dist.init_process_group
dist.init_process_group = lambda backend=None, **named: start(backend="gloo", **named)
torch.cuda.device_count = lambda: 8
from megatron.core.datasets.data_schedule import scheduler_map
theirs = scheduler_map["dp_balanced"]
scheduler_map["dp_balanced"] = planned(theirs)
"""

GROUPS = """
checked = 0
for dp, cp, group, pp, most in [(1, 1, None, 1, None), (4, 2, None, 4, None), (2, 1, 4, 4, None),
                                (2, 4, 2, 2, 12), (8, 1, None, 1, 9)]:
    drawn = random.Random(dp)
    samples = [(n, drawn.choice([16, 64, 512, 4096, 8192])) for n in range(200)]
    cap = 8192 // cp + 8192 % cp
    given = cap, cp, dp, group
    ours = scheduler_map["dp_balanced"](*given, max_num_seqs=most)
    ours.pp_size = pp
    groups = ours.get_groups_and_subsamples(samples)
    assert issubclass(type(ours), theirs)
    assert len(groups) % (group or 1) == 0
    for turn in groups:
        assert len(turn) == dp * cp  # [micro-batches][DP x CP]
        for rank, one in enumerate(turn):
            assert one and one == turn[rank // cp * cp]
            assert sum(samples[n][1] for n in one) <= cap * cp
            assert most is None or len(one) <= most
    assert sorted(n for turn in groups for one in turn[::cp] for n in one) == list(range(200))
    def slowest(groups):
        load = lambda one: sum(24576 * samples[n][1] + samples[n][1] ** 2 for n in one)
        return sum(max(map(load, turn)) for turn in groups)
    known = theirs(*given, max_num_seqs=most).get_groups_and_subsamples(samples)
    assert slowest(groups) < 1.01 * slowest(known), (slowest(groups), slowest(known))
    checked += 1
print(f"{checked} layouts")
"""

THEIR_TESTS = """
import pytest
class Answered:  # torch, whose torch.device("cuda", 0) is the CPU
    __getattr__ = lambda self, name: getattr(torch, name)
    device = staticmethod(lambda *given: torch.device("cpu"))
class Plugin:
    def pytest_collection_modifyitems(self, items):
        for item in items:
            item.module.torch = Answered()
calls = []
run = scheduler_map["dp_balanced"].get_groups_and_subsamples
def counted(self, samples):
    calls.append(len(samples))
    return run(self, samples)
scheduler_map["dp_balanced"].get_groups_and_subsamples = counted
code = pytest.main(
    ["--noconftest", "-q", "-p", "no:cacheprovider", "-k", "wrap_dataloader and dp_balanced",
     "--rootdir", sys.argv[1], sys.argv[2]], plugins=[Plugin()],
)
print(f"ours was called {len(calls)} times")
sys.exit(code)
"""


def start(script: str, rank: int, port: int, folder: Path) -> subprocess.Popen[str]:
    known = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join([str(MEGATRON), str(Path(__file__).parents[2]), known])
    ranks = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "MASTER_ADDR": "localhost",
        "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONDONTWRITEBYTECODE": 1,
    }  # fmt: skip
    return subprocess.Popen(
        [
            *(sys.executable, "-W", "ignore", "-c", SETUP + script, str(folder)),
            f"{MEGATRON}/tests/unit_tests/test_sequence_packing.py",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        env=os.environ | {"PYTHONPATH": paths} | {name: str(n) for name, n in ranks.items()},
    )  # fmt: skip


def test_groups_hold_all_that_megatron_asks_for(tmp_path: Path) -> None:
    said, _ = (process := start(GROUPS, 0, 0, tmp_path)).communicate(timeout=300)
    assert process.returncode == 0 and "5 layouts" in said, said


def test_megatron_s_own_tests_pass(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    processes = [start(THEIR_TESTS, rank, port, tmp_path) for rank in range(NUM_RANKS)]
    try:
        said = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * NUM_RANKS, said[0][-4000:]
    assert all("5 passed" in one for one in said)
    assert "ours was called 5 times" in said[0]
