from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost.schedule.order import (
    Action,
    dataflow,
    interleaved,
    one_f_one_b,
    receive_order,
    run_ahead,
    schedule,
    sliced,
)
from megatron_wlb.errors import ConfigError, PlanError


def is_legal(pp_size, num_micro_batches, group_size):
    remainder = num_micro_batches % group_size
    fits = pp_size <= group_size <= num_micro_batches
    return fits and (remainder == 0 or remainder >= pp_size)


INTERLEAVED = [
    (pp_size, vpp_size, num_micro_batches, group_size)
    for pp_size in (2, 3, 4, 5)
    for vpp_size in (2, 3, 4)
    for num_micro_batches in range(2, 15)
    for group_size in range(pp_size, num_micro_batches + 1)
    if is_legal(pp_size, num_micro_batches, group_size)
]
ONE_CHUNK = [
    (pp_size, 1, num_micro_batches, None)
    for pp_size in (1, 2, 3, 4, 7)
    for num_micro_batches in (1, 2, 3, 4, 5, 8, 13)
]
CASES = ONE_CHUNK + INTERLEAVED


def order_from(text):
    def action(word):
        chunk, micro_batch = word[1:].split(".")
        return Action(word[0], int(chunk), int(micro_batch))

    return [[action(word) for word in line.split()] for line in text.strip().splitlines()]


def validate(order, chains=()):
    """Asserts that each rank runs each chunk's forward and backward of each micro-batch once, a
    backward after its forward, and waits for nobody for ever. In a chain, as :func:`sliced` has
    them, forwards run first to last, and backwards last to first.
    """
    num_chunks, num = (1 + max(getattr(a, of) for a in order[0]) for of in ("chunk", "micro_batch"))
    every = {Action(*of) for of in product("FB", range(num_chunks), range(num))}
    for actions in order:
        assert len(actions) == len(every) and set(actions) == every
        at = {action: place for place, action in enumerate(actions)}
        assert all(at[action] <= at[replace(action, kind="B")] for action in every)
        stop = 0
        for length in chains:
            members, stop = range(stop, stop + length), stop + length
            for chunk in range(num_chunks):
                due = [Action("F", chunk, m) for m in members]
                due += [Action("B", chunk, m) for m in members][::-1]
                assert all(at[before] < at[after] for before, after in pairwise(due))
    dataflow(order)


# ---- orders


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2, 2, 5, 2), "groups of 2 leave 1"),
        ((4, 2, 11, 4), "groups of 4 leave 3"),
        ((4, 2, 3, 4), "group_size 4 is not between pp_size 4 and num_micro_batches 3"),
        ((4, 2, 8, 3), "group_size 3 is not between"),
        ((1, 2, 8, 4), "over 1 pipeline ranks"),
        ((4, 0, 8, 4), "vpp_size is 0"),
        ((4, 1, 0, 4), "num_micro_batches is 0"),
    ],
)
def test_sizes_that_megatron_refuses_are_errors(sizes, message):
    pp_size, vpp_size, num_micro_batches, group_size = sizes
    with pytest.raises(ConfigError, match=message):
        schedule(pp_size, vpp_size, num_micro_batches, group_size)
    with pytest.raises(ConfigError, match=message):
        receive_order(pp_size, vpp_size, num_micro_batches, group_size, pp_rank=0)


# ---- validate and dataflow


def test_orders_are_valid():
    validate(order_from("F0.0 F0.1 F0.2 B0.0 B0.1 B0.2\nF0.0 F0.1 F0.2 B0.0 B0.1 B0.2"))
    for sizes in CASES:
        validate(schedule(*sizes))


def test_dataflow_puts_each_task_after_its_input():
    order = interleaved(3, 2, 7, 4)
    tasks = dataflow(order)
    assert [[t.action for t in tasks if t.rank == rank] for rank in range(3)] == order
    names = [(t.action.kind, t.action.chunk * 3 + t.rank, t.action.micro_batch) for t in tasks]
    for at, (kind, stage, micro_batch) in enumerate(names):
        if kind == "F":
            source = ("F", stage - 1, micro_batch)
        else:
            source = ("F", 5, micro_batch) if stage == 5 else ("B", stage + 1, micro_batch)
        if source[1] < 0:
            assert tasks[at].source == -1
        else:
            assert tasks[at].source == names.index(source) < at


@pytest.mark.parametrize(
    "text",
    [
        "F0.0 B0.0 F0.1 \n F0.0 B0.0 F0.1 B0.1",
        "F0.0 B0.0 \n F0.0 B0.0 F0.0",
        "F0.0 F1.0 B1.0 B0.0 \n F0.0 B0.0",
        "F0.0 B0.0 \n B0.0 F0.0",
    ],
)
def test_validate_sees_what_is_wrong(text):
    with pytest.raises(AssertionError):
        validate(order_from(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # Each rank alone is in order, but rank 0 waits for a backward that rank 1 runs only after
        # a forward that rank 0 has not sent.
        ("F0.0 B0.0 F0.1 B0.1 \n F0.0 F0.1 B0.0 B0.1", "rank 0 at B0.0, rank 1 at F0.1"),
        # Chunk 1 starts on rank 0 with what chunk 0 of rank 1 gives.
        ("F1.0 F0.0 B1.0 B0.0 \n F0.0 F1.0 B1.0 B0.0", "rank 0 at F1.0, rank 1 at F0.0"),
    ],
)
def test_dataflow_names_who_waits_for_ever(text, message):
    with pytest.raises(PlanError, match=f"deadlocks: {message}"):
        dataflow(order_from(text))


# ---- receive order


def sent_units(order, kind, sender, vpp_size):
    """What a rank sends, in order, named by the (chunk, micro-batch) that consumes it."""
    pp_size = len(order)
    last_stage = pp_size * vpp_size - 1
    units = []
    for action in order[sender]:
        stage = action.chunk * pp_size + sender
        if action.kind == kind and stage != (last_stage if kind == "F" else 0):
            consumer = stage + (1 if kind == "F" else -1)
            units.append((consumer // pp_size, action.micro_batch))
    return units


def test_receive_order_is_the_neighbours_send_order():
    for sizes in CASES:
        pp_size, vpp_size, num_micro_batches, _ = sizes
        order = schedule(*sizes)
        num_messages = 0
        for rank in range(pp_size):
            received = receive_order(*sizes, rank)
            sent = sent_units(order, "F", (rank - 1) % pp_size, vpp_size)
            assert received.forward == sent, (sizes, rank)
            sent = sent_units(order, "B", (rank + 1) % pp_size, vpp_size)
            assert received.backward == sent, (sizes, rank)
            num_messages += len(received.forward) + len(received.backward)
        assert num_messages == 2 * (pp_size * vpp_size - 1) * num_micro_batches, sizes


CHAINS = [[1], [5], [1] * 9, [3, 1, 2, 1, 1, 1, 1], [4, 4, 4], [1, 1, 7, 1, 2]]


@pytest.mark.parametrize("chains", CHAINS)
@pytest.mark.parametrize("pp_size", [1, 2, 4])
def test_sliced_orders_are_valid_on_every_pipeline(pp_size, chains):
    validate(sliced(pp_size, chains), chains)


@settings(max_examples=150)
@given(
    st.integers(2, 8),
    st.integers(2, 4),
    st.lists(st.sampled_from([1, 1, 1, 2, 3, 9, 20]), min_size=1, max_size=16),
)
def test_sliced_orders_of_several_chunks_are_valid(pp_size, vpp_size, chains):
    order = sliced(pp_size, chains, vpp_size)
    validate(order, chains)
    # Messages between two ranks come in the order in which they are waited for.
    for kind, step in (("F", 1), ("B", -1)):
        runs = [[(a.chunk * pp_size + rank, a.micro_batch) for a in actions if a.kind == kind]
                for rank, actions in enumerate(order)]  # fmt: skip
        for rank, own in enumerate(runs):
            following = runs[(rank + step) % pp_size]
            sent = [(stage + step, m) for stage, m in own]
            assert [one for one in sent if one in set(following)] == [
                one for one in following if one in set(sent)
            ]


def test_sliced_order_of_several_chunks_is_interleaved_where_nothing_is_sliced():
    """But for groups, which are larger here, and the forwards that ranks are ahead."""
    order = sliced(4, [1] * 10, 2)
    (first, *_), (megatrons, *_) = order, interleaved(4, 2, 10, group_size=5)
    assert [a for a in first if a.kind == "F"] == [a for a in megatrons if a.kind == "F"]
    assert [a for a in first if a.kind == "B"] == [a for a in megatrons if a.kind == "B"]


def test_sliced_order_runs_few_passes_of_a_kind_at_once():
    chains = [1] * 20 + [12] + [1] * 20
    for actions in sliced(4, chains):
        kinds = "".join(action.kind for action in actions)
        before_the_first_backward = kinds.index("B")
        assert "FFF" not in kinds[before_the_first_backward:]
        assert "BBB" not in kinds[: kinds.rindex("F")]


@pytest.mark.parametrize("rank_lead", [1, 3])
def test_run_ahead_order_has_the_forwards_that_each_backward_needs(rank_lead):
    needed = [2, 2, 7, 7, 7, 7, 8, 9]
    needed += [max(needed)] * 2 + [12, 12]
    order = run_ahead(3, range(12), needed, rank_lead)
    validate(order)
    for rank, actions in enumerate(order):
        kinds = "".join(action.kind for action in actions)
        done = [kinds[:at].count("F") for at, kind in enumerate(kinds) if kind == "B"]
        lead = rank_lead * (2 - rank)
        assert all(have >= min(12, least + lead) for have, least in zip(done, needed, strict=True))
        assert done[0] < 12 or rank_lead == 3  # and not all at first


def test_validate_refuses_a_chain_whose_backwards_run_first_to_last():
    validate(one_f_one_b(2, 4))
    with pytest.raises(AssertionError):
        validate(one_f_one_b(2, 4), [2, 1, 1])


@pytest.mark.parametrize("chains", [[], [2, 0], [1, -1, 2]])
def test_sliced_refuses_empty_chains(chains):
    with pytest.raises(ConfigError):
        sliced(2, chains)


def test_lead_of_a_chain_grows_by_an_eighth_and_shrinks_by_a_quarter_of_a_forward() -> None:
    chains = [1] * 20 + [12] + [1] * 20
    (actions,) = sliced(1, chains)
    kinds = [action.kind for action in actions]
    forwards = [kinds[:at].count("F") for at, kind in enumerate(kinds) if kind == "B"]
    # The chain's 12 forwards precede its first backward, the 21st: 32 by then, 9/8 more each.
    assert forwards[:21] == [-(-(32 * 8 - 9 * (20 - at)) // 8) for at in range(21)]
    assert forwards[20:] == [min(52, -(-(32 * 8 + 6 * at) // 8)) for at in range(32)]


def test_receive_order_refuses_a_rank_outside_the_pipeline():
    with pytest.raises(ConfigError, match="pp_rank 4 is not below pp_size 4"):
        receive_order(4, 1, 8, None, 4)
