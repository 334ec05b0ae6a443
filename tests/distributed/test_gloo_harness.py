from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers.gloo import GlooPool, RankTimeoutError
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


def start_a_process() -> int:
    return subprocess.Popen(["sleep", str(HANG_S)]).pid


def raise_on_rank(failing_rank: int) -> None:
    if dist.get_rank() == failing_rank:
        raise CaseError(17)
    dist.barrier()  # never met


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


def environment_of(name: str) -> tuple[str | None, bool]:
    from megatron_wlb.runtime.emulation import cpu

    return os.environ.get(name), cpu.installed()


def test_ranks_with_an_environment_of_their_own_start_with_it() -> None:
    with GlooPool(1, environment={"WLB_OF_RANKS": "own"}) as own:
        assert own.run(1, environment_of, "WLB_OF_RANKS") == [("own", True)]
    assert "WLB_OF_RANKS" not in os.environ


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


@pytest.mark.parametrize("case", [raise_on_rank, exit_on_rank, sleep_on_rank])
def test_world_starts_anew_after_a_failure(pool: GlooPool, case: Callable[[int], None]) -> None:
    before = pool.run(2, process_id)
    with pytest.raises(Exception, match=r"17|died|did not finish"):
        pool.run(2, case, 0, timeout_s=0.5)
    assert alive(before) == []
    after = pool.run(2, process_id)
    assert not set(before) & set(after)


def test_close_ends_what_ranks_have_started(pool: GlooPool) -> None:
    processes = [psutil.Process(process_id) for process_id in pool.run(2, start_a_process)]
    assert all(process.is_running() for process in processes)
    pool.close()
    ended, _ = psutil.wait_procs(processes, timeout=HANG_S / 2)
    assert len(ended) == 2
