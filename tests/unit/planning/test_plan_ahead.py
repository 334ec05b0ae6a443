from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

from megatron_wlb.cost import DocumentCost
from megatron_wlb.data.documents import DocumentStream
from megatron_wlb.errors import PackingError
from megatron_wlb.planning.packing import packer
from megatron_wlb.planning.plan_ahead import PlanAhead
from megatron_wlb.planning.planner import Planner

COST = DocumentCost(1.0, 0.01, 2.0, 0.03)
WINDOW, N = 64, 4


def make_planner(num_epochs: int = 2) -> Planner:
    lengths = [1 + (7 * n * n) % 61 for n in range(80)]
    stream = DocumentStream(
        [np.array(lengths)],
        window=WINDOW,
        step_tokens=N * WINDOW,
        seed=3,
        num_epochs=num_epochs,
    )
    packing = packer("hold", num_micro_batches=N, window=WINDOW, cost=COST)
    return Planner(stream, packing, COST, dp_size=2)


def digests_and_states(planner: Planner | PlanAhead) -> list[tuple[str, str]]:
    found = []
    while (plan := planner.next_plan()) is not None:
        found.append((plan.digest, json.dumps(planner.state_dict())))
    return found


def test_plan_ahead_gives_the_planners_plans_and_states() -> None:
    expected = digests_and_states(make_planner())
    assert len(expected) > 10
    for depth in (1, 2, 100):
        with PlanAhead(make_planner(), depth) as ahead:
            assert digests_and_states(ahead) == expected
            assert ahead.next_plan() is None  # again


def test_plan_ahead_state_resumes_at_the_last_plan_handed_out() -> None:
    expected = digests_and_states(make_planner())
    with PlanAhead(make_planner(), depth=4) as ahead:
        for _ in range(5):
            ahead.next_plan()
        state = json.loads(json.dumps(ahead.state_dict()))
    planner = make_planner()
    planner.load_state_dict(state)
    assert digests_and_states(planner) == expected[5:]


@pytest.mark.parametrize("num_taken", [0, 5])
def test_plan_ahead_gives_the_planner_back_where_its_plans_were_taken(num_taken: int) -> None:
    """Plans that were made and not handed out would be lost otherwise, with their documents."""
    expected = digests_and_states(make_planner())
    planner = make_planner()
    with PlanAhead(planner, depth=4) as ahead:
        for _ in range(num_taken):
            ahead.next_plan()
        time.sleep(0.05)
    assert digests_and_states(planner) == expected[num_taken:]
    ahead.close()  # does nothing any more
    assert planner.next_plan() is None


def test_plan_ahead_stays_within_its_depth() -> None:
    planner = make_planner()
    with PlanAhead(planner, depth=2) as ahead:
        ahead.next_plan()
        deadline = time.monotonic() + 10
        while planner.step < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        # One handed out, two in the queue, and one that waits to get in.
        assert planner.step == 4


def test_plan_ahead_raises_an_error_at_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = make_planner()
    stock = planner.next_plan

    def failing():  # type: ignore[no-untyped-def]
        if planner.step == 3:
            raise PackingError("no room")
        return stock()

    monkeypatch.setattr(planner, "next_plan", failing)
    with PlanAhead(planner, depth=8) as ahead:
        time.sleep(0.05)  # The thread has met the error; the steps before it are good.
        for step in range(3):
            plan = ahead.next_plan()
            assert plan is not None
            assert plan.step == step
        state = ahead.state_dict()
        for _ in range(2):
            with pytest.raises(PackingError, match="no room"):
                ahead.next_plan()
        assert ahead.state_dict() == state


@pytest.mark.parametrize("num_taken", [0, 3])
def test_plan_ahead_close_ends_its_thread(num_taken: int) -> None:
    before = threading.active_count()
    ahead = PlanAhead(make_planner(num_epochs=50), depth=1)
    for _ in range(num_taken):
        ahead.next_plan()
    assert threading.active_count() == before + 1
    ahead.close()
    ahead.close()
    assert threading.active_count() == before
