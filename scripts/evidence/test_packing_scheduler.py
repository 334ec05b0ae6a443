"""Megatron-core's own tests of its packing scheduler, with ours in its place, on eight CPU ranks.

MEGATRON_PACKING_PATHS names checkouts of Megatron-LM after 0.19 with their tests: of ``main``, of
``dev``, or both with a colon between. They import triton, which is to be installed beside this
project's requirements. Their device is the CPU by our emulation, and NCCL is gloo; nothing else is
replaced.
BRIDGE_PATH names a checkout of Megatron-Bridge 0.7, whose step is then packed through ours, too.
"""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKOUTS = [one for one in os.environ.get("MEGATRON_PACKING_PATHS", "").split(":") if one]
BRIDGE = os.environ.get("BRIDGE_PATH")
pytestmark = [
    pytest.mark.skipif(not CHECKOUTS, reason="MEGATRON_PACKING_PATHS names no checkout"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Megatron-LM after 0.19 needs triton"),
    pytest.mark.parametrize("checkout", CHECKOUTS or [""], ids=lambda one: Path(one).name),
]
NUM_RANKS = 8

SETUP = """
import random, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
from megatron_wlb.adapters.packing_scheduler import install
from megatron_wlb.runtime.emulation import cpu
cpu.install()
start = dist.init_process_group
dist.init_process_group = lambda backend=None, **named: start(backend="gloo", **named)
torch.cuda.device_count = lambda: 8
from megatron.core.datasets import data_schedule
theirs = data_schedule.DpBalancedScheduler
install(data_schedule.scheduler_map)
named = {getattr(key, "value", key): one for key, one in data_schedule.scheduler_map.items()}
ours = named["dp_balanced"]
assert ours is not theirs and issubclass(ours, theirs)
calls = []
run = ours.get_groups_and_subsamples
def counted(self, samples):
    calls.append(len(samples))
    return run(self, samples)
ours.get_groups_and_subsamples = counted
"""

GROUPS = """
from inspect import signature
checked = 0
capped = "max_num_seqs" in signature(data_schedule.BasePackingScheduler).parameters
for dp, cp, group, pp, most in [(1, 1, None, 1, None), (4, 2, None, 4, None), (2, 1, 4, 4, None),
                                (2, 4, 2, 2, 12), (8, 1, None, 1, 9)]:
    drawn = random.Random(dp)
    samples = [(n, drawn.choice([16, 64, 512, 4096, 8192])) for n in range(200)]
    cap = 8192 // cp + 8192 % cp
    given = cap, cp, dp, group
    most, limit = (most, {"max_num_seqs": most}) if capped else (None, {})
    scheduler = ours(*given, **limit)
    scheduler.pp_size = pp
    groups = scheduler.get_groups_and_subsamples(samples)
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
    known = theirs(*given, **limit).get_groups_and_subsamples(samples)
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
code = pytest.main(
    ["--noconftest", "-q", "-p", "no:cacheprovider", "-k", "wrap_dataloader and dp_balanced",
     "--rootdir", sys.argv[1], sys.argv[2]], plugins=[Plugin()],
)
print(f"ours was called {len(calls)} times")
sys.exit(code)
"""

BRIDGE_STEP = """
import os
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace
file = os.environ["BRIDGE_PATH"] + "/src/megatron/bridge/training/global_batch_packing.py"
spec = spec_from_file_location("global_batch_packing", file)
bridge = module_from_spec(spec)
spec.loader.exec_module(bridge)
asks = {"dynamic_cp": False} if hasattr(bridge, "dynamic_context_parallel_enabled") else {}
assert bridge.probe_global_batch_packing_support("dp_balanced", **asks) is None
dist.init_process_group()
from megatron.core import parallel_state as state
state.initialize_model_parallel()
rank, ranks = dist.get_rank(), dist.get_world_size()
drawn = random.Random(rank)
lengths = [drawn.choice([16, 64, 512, 2048, 4096]) for _ in range(16)]
def sample(at, n):  # what Bridge says that the scheduler takes
    length = torch.tensor([n], dtype=torch.int32)
    tokens = torch.full((n,), 100 * rank + at)
    return {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(n),
            "position_ids": torch.arange(n), "original_seq_len": length, "padded_seq_len": length}
config = SimpleNamespace(
    sequence_packing_scheduler="dp_balanced", max_seqlen_per_dp_cp_rank=4096,
    virtual_pipeline_model_parallel_size=None, microbatch_group_size_per_vp_stage=1,
    pipeline_model_parallel_layout=None, mtp_num_layers=None,
)
groups = SimpleNamespace(
    dp=state.get_data_parallel_group(), tp=state.get_tensor_model_parallel_group(),
    dp_cp=state.get_data_parallel_group(with_context_parallel=True),
    pp=state.get_pipeline_model_parallel_group(), cp=state.get_context_parallel_group(),
)
assert bridge.global_batch_packing_enabled(config)
packed, number, total, _ = bridge.wrap_data_iterator_for_global_batch_packing(
    iter([[sample(*one)] for one in enumerate(lengths)]), config, 16, groups
)
mine = [next(packed) for _ in range(number)]
assert all(one["tokens"].numel() <= 4096 for one in mine)
found = [None] * ranks
dist.all_gather_object(found, [n for one in mine for n in one["tokens"].unique().tolist()])
sent = [100 * rank + at for rank in range(ranks) for at in range(16)]
assert sorted(n for one in found for n in one) == sent
print(f"ours was called with {calls}")
"""


def start(
    script: str, checkout: str, rank: int, port: int, folder: Path, ranks: int
) -> subprocess.Popen[str]:
    known = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join([checkout, str(Path(__file__).parents[2]), known])
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost",
        "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONDONTWRITEBYTECODE": 1,
    }  # fmt: skip
    return subprocess.Popen(
        [
            *(sys.executable, "-W", "ignore", "-c", SETUP + script, str(folder)),
            f"{checkout}/tests/unit_tests/test_sequence_packing.py",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        env=os.environ | {"PYTHONPATH": paths} | {name: str(n) for name, n in variables.items()},
    )  # fmt: skip


def said_by(script: str, checkout: str, folder: Path, ranks: int) -> list[str]:
    """What each rank says. All have to end well."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    processes = [start(script, checkout, rank, port, folder, ranks) for rank in range(ranks)]
    try:
        said = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, said[0][-4000:]
    return said


def test_groups_hold_all_that_megatron_asks_for(checkout: str, tmp_path: Path) -> None:
    [said] = said_by(GROUPS, checkout, tmp_path, 1)
    assert "5 layouts" in said, said


def test_megatron_s_own_tests_pass(checkout: str, tmp_path: Path) -> None:
    said = said_by(THEIR_TESTS, checkout, tmp_path, NUM_RANKS)
    assert all("5 passed" in one for one in said)
    assert "ours was called 5 times" in said[0]


@pytest.mark.skipif(BRIDGE is None, reason="BRIDGE_PATH names no checkout of Megatron-Bridge")
def test_megatron_bridge_packs_a_step_by_ours(checkout: str, tmp_path: Path) -> None:
    said = said_by(BRIDGE_STEP, checkout, tmp_path, 2)
    assert all("ours was called with [32]" in one for one in said), said
