from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from helpers.gloo import GlooPool, RankError, RankTimeoutError
from helpers.layouts import Differences, Layout

HANG_S = 60.0  # far over any limit here: a case that ends sooner did not wait for it


class CaseError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.args = (code,)


class UnpicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


# Cases, run on every rank.


def process_id() -> int:
    return os.getpid()


def num_listeners() -> int:
    """The threads of gloo that this process has."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)


def weighted_rank(weight: int, offset: int) -> tuple[int, int]:
    return dist.get_rank() * weight + offset, dist.get_world_size()


def start_a_process() -> int:
    return subprocess.Popen(["sleep", str(HANG_S)]).pid


def raise_on_rank(failing_rank: int) -> None:
    if dist.get_rank() == failing_rank:
        raise CaseError(17)
    dist.barrier()  # never met


def raise_after(seconds_of_rank: list[float]) -> None:
    dist.barrier()
    time.sleep(seconds_of_rank[dist.get_rank()])
    raise ValueError(f"rank {dist.get_rank()} failed")


def raise_unpicklable() -> None:
    raise UnpicklableError(3, 5)


def return_unpicklable() -> Callable[[], None]:
    return lambda: None


def sleep_on_rank(slow_rank: int) -> None:
    if dist.get_rank() == slow_rank:
        time.sleep(HANG_S)
    dist.barrier()


def exit_on_rank(dying_rank: int) -> None:
    if dist.get_rank() == dying_rank:
        os._exit(3)
    dist.barrier()


def environment() -> dict[str, Any]:
    import sys

    from megatron_wlb.runtime.emulation import cpu

    return {
        "threads": torch.get_num_threads(),
        "emulated": cpu.installed(),
        "megatron": "megatron.core.models.gpt" in sys.modules,
    }


def collectives() -> dict[str, list[float]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor([rank + 1.0, 10.0 * rank])

    reduced = mine.clone()
    dist.all_reduce(reduced)

    gathered = torch.empty(2 * size)
    dist.all_gather_into_tensor(gathered, mine)

    scattered = torch.empty(1)
    dist.reduce_scatter_tensor(scattered, torch.arange(size, dtype=torch.float32) + rank)

    received = torch.empty(rank or size)  # ragged: rank r sends r + 1 numbers
    requests = [
        dist.isend(torch.full((rank + 1,), float(rank)), (rank + 1) % size),
        dist.irecv(received, (rank - 1) % size),
    ]
    for request in requests:
        request.wait()
    return {
        "all_reduce": reduced.tolist(),
        "all_gather": gathered.tolist(),
        "reduce_scatter": scattered.tolist(),
        "p2p": received.tolist(),
    }


def gradient_of_square(values: list[float]) -> list[float]:
    x = torch.tensor(values, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


def sum_from_child(values: list[int]) -> int:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send(sum(values) + dist.get_rank()))
    child.start()
    total: int = ours.recv()
    child.join()
    return total


def leave_model_parallel_behind(tp_size: int) -> int:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp_size)
    return parallel_state.get_tensor_model_parallel_rank()


def send_what_nobody_receives() -> None:
    dist.isend(torch.full((4,), 7.0), 1 - dist.get_rank())


def exchange(value: float) -> float:
    received = torch.empty(4)
    sent = dist.isend(torch.full((4,), value + dist.get_rank()), 1 - dist.get_rank())
    dist.recv(received, 1 - dist.get_rank())
    sent.wait()
    return received[0].item()


@pytest.fixture
def pool() -> Iterator[GlooPool]:
    with GlooPool(max_processes=5) as own:
        yield own


def alive(process_ids: list[int]) -> list[int]:
    return [process_id for process_id in process_ids if psutil.pid_exists(process_id)]


def test_run_returns_results_in_rank_order(gloo: GlooPool) -> None:
    assert gloo.run(3, weighted_rank, 10, 4) == [(4, 3), (14, 3), (24, 3)]


def test_run_keeps_its_processes_for_the_next_case(gloo: GlooPool) -> None:
    first = gloo.run(2, process_id)
    assert len(set(first)) == 2
    assert gloo.run(2, process_id) == first


def test_run_gives_ranks_one_thread_and_an_emulated_megatron(gloo: GlooPool) -> None:
    assert gloo.run(2, environment) == [{"threads": 1, "emulated": True, "megatron": True}] * 2


def environment_of(name: str) -> tuple[str | None, bool]:
    return os.environ.get(name), environment()["emulated"]


def test_ranks_with_an_environment_of_their_own_start_with_it() -> None:
    with GlooPool(1, environment={"WLB_OF_RANKS": "own"}) as own:
        assert own.run(1, environment_of, "WLB_OF_RANKS") == [("own", True)]
    assert "WLB_OF_RANKS" not in os.environ


@pytest.mark.gloo_only
def test_collectives_work_in_forked_ranks(gloo: GlooPool) -> None:
    results = gloo.run(4, collectives)
    for rank, result in enumerate(results):
        assert result["all_reduce"] == [10.0, 60.0]
        assert result["all_gather"] == [1.0, 0.0, 2.0, 10.0, 3.0, 20.0, 4.0, 30.0]
        assert result["reduce_scatter"] == [4.0 * rank + 6.0]
        assert result["p2p"] == [float((rank - 1) % 4)] * (rank or 4)


def test_autograd_works_in_forked_ranks(gloo: GlooPool) -> None:
    assert gloo.run(2, gradient_of_square, [1.5, -4.0]) == [[3.0, -8.0]] * 2


def test_ranks_may_start_processes_as_checkpoint_savers_do(gloo: GlooPool) -> None:
    assert gloo.run(2, sum_from_child, [4, 9]) == [13, 14]


def test_results_carry_arrays_and_tensors_by_value(gloo: GlooPool) -> None:
    (array,) = gloo.run(1, np.full, (2, 3), 2.5)
    (tensor,) = gloo.run(1, torch.full, (3,), 7)
    assert array.tolist() == [[2.5] * 3] * 2
    assert tensor.tolist() == [7] * 3
    assert not tensor.is_shared()


def test_case_finds_no_model_parallel_groups_of_the_case_before(gloo: GlooPool) -> None:
    assert gloo.run(4, leave_model_parallel_behind, 2) == [0, 1, 0, 1]
    # Megatron refuses to initialise groups twice.
    assert gloo.run(4, leave_model_parallel_behind, 4) == [0, 1, 2, 3]


def test_groups_of_a_model_end_with_their_case(gloo: GlooPool, wrong: Differences) -> None:
    """Each has a thread that looks for messages all the time."""
    one = gloo.run(2, num_listeners)
    assert one[0] > 0
    extra = "--use-distributed-optimizer --overlap-grad-reduce"
    assert wrong(Layout("gpt2", 5, dp=2, extra=extra)) == []
    assert max(gloo.run(2, num_listeners)) <= max(one)  # names come a moment after threads


@pytest.mark.gloo_only
def test_case_receives_nothing_of_the_case_before(gloo: GlooPool) -> None:
    gloo.run(2, send_what_nobody_receives)
    assert gloo.run(2, exchange, 20.0) == [21.0, 20.0]


def test_error_comes_back_with_type_rank_and_traceback(pool: GlooPool) -> None:
    started = time.monotonic()
    with pytest.raises(CaseError) as caught:
        pool.run(3, raise_on_rank, 1)
    assert time.monotonic() - started < HANG_S / 2  # the other ranks were not waited for
    assert caught.value.args == (17,)
    (note,) = caught.value.__notes__
    assert note.startswith("on rank 1 of 3:")
    assert "in raise_on_rank" in note


def test_first_error_is_raised_and_others_are_noted(pool: GlooPool) -> None:
    with pytest.raises(ValueError, match="rank 1 failed") as caught:
        pool.run(2, raise_after, [0.4, 0.0])
    assert "then rank 0 failed: ValueError('rank 0 failed')" in caught.value.__notes__


@pytest.mark.parametrize("case", [raise_unpicklable, return_unpicklable])
def test_what_cannot_be_pickled_is_told_as_an_error(
    pool: GlooPool, case: Callable[[], object]
) -> None:
    with pytest.raises(Exception, match=r"3 and 5|pickle") as caught:
        pool.run(1, case)
    assert any(note.startswith("on rank 0 of 1:") for note in caught.value.__notes__)


def test_hang_raises_with_the_stack_of_each_waiting_rank(pool: GlooPool) -> None:
    pool.run(2, process_id)
    started = time.monotonic()
    with pytest.raises(RankTimeoutError, match=r"rank 0, 1 of 2 .* within 2 s") as caught:
        pool.run(2, sleep_on_rank, 1, timeout_s=2.0)
    assert time.monotonic() - started < HANG_S / 2
    for rank, note in enumerate(caught.value.__notes__):
        assert note.startswith(f"rank {rank} hangs at")
        assert "in sleep_on_rank" in note


def test_death_names_the_rank_and_its_exit_code(pool: GlooPool) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 died: exit 3"):
        pool.run(2, exit_on_rank, 1)


def test_death_between_cases_is_noticed(pool: GlooPool) -> None:
    victim = pool.run(2, process_id)[1]
    psutil.Process(victim).kill()
    with pytest.raises(RankError, match="rank 1 of 2 died: exit -9"):
        pool.run(2, process_id)


@pytest.mark.parametrize("case", [raise_on_rank, exit_on_rank, sleep_on_rank])
def test_world_starts_anew_after_a_failure(pool: GlooPool, case: Callable[[int], None]) -> None:
    before = pool.run(2, process_id)
    with pytest.raises(Exception, match=r"17|died|did not finish"):
        pool.run(2, case, 0, timeout_s=0.5)
    assert alive(before) == []
    after = pool.run(2, process_id)
    assert not set(before) & set(after)


def test_least_recently_used_world_makes_room(pool: GlooPool) -> None:
    two, one = pool.run(2, process_id), pool.run(1, process_id)
    pool.run(2, process_id)
    three = pool.run(3, process_id)  # 2 + 1 + 3 > 5
    assert alive(one) == []
    assert alive(two + three) == two + three


def test_world_larger_than_the_pool_is_refused(pool: GlooPool) -> None:
    with pytest.raises(RankError, match="6 ranks does not fit a pool of 5"):
        pool.run(6, process_id)


def test_close_leaves_no_process(pool: GlooPool) -> None:
    processes = pool.run(2, process_id) + pool.run(3, process_id)
    assert alive(processes) == processes
    pool.close()
    assert alive(processes) == []


def test_close_ends_what_ranks_have_started(pool: GlooPool) -> None:
    processes = [psutil.Process(process_id) for process_id in pool.run(2, start_a_process)]
    assert all(process.is_running() for process in processes)
    pool.close()
    ended, _ = psutil.wait_procs(processes, timeout=HANG_S / 2)
    assert len(ended) == 2
