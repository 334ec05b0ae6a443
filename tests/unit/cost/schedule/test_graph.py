"""The arrays against the plainest solution: a step is as long as the longest path through it."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost.schedule.graph import Graph, graph_of
from megatron_wlb.cost.schedule.messages import slice_graph
from megatron_wlb.cost.schedule.order import Action, schedule
from megatron_wlb.errors import PlanError
from megatron_wlb.simulator.engine import timeline

ONE_CHUNK = [(1, 1, 3), (2, 1, 1), (2, 1, 4), (3, 1, 3), (4, 1, 2), (5, 1, 3)]
INTERLEAVED = [(2, 2, 2), (3, 2, 3), (2, 3, 4), (2, 2, 5, 3)]
GPIPE = [[Action(kind, 0, m) for kind in "FB" for m in range(4)]] * 3
CASES = [(sizes, "buffered") for sizes in (*ONE_CHUNK, *INTERLEAVED, "gpipe")]
CASES += [(sizes, "blocking") for sizes in (*ONE_CHUNK, "gpipe")]


def dependencies(order, sends):
    """Edges (before, after), stated anew; a message is a node of its own."""
    pp_size = len(order)
    num_stages = pp_size * (1 + max(a.chunk for a in order[0]))
    edges = []

    def name(rank, action):
        return (action.kind, action.chunk * pp_size + rank, action.micro_batch)

    def input_of(node):
        kind, stage, micro_batch = node
        if kind == "F":
            return (kind, stage - 1, micro_batch) if stage else None
        if stage == num_stages - 1:
            return ("F", stage, micro_batch)
        return (kind, stage + 1, micro_batch)

    def is_message(node):
        before = input_of(node)
        return before is not None and before[1] % pp_size != node[1] % pp_size

    names = [[name(rank, action) for action in actions] for rank, actions in enumerate(order)]
    consumer = {input_of(node): node for nodes in names for node in nodes}
    for nodes in names:
        for node in nodes:
            if is_message(node):
                edges += [(input_of(node), ("to", *node)), (("to", *node), node)]
            elif input_of(node) is not None:
                edges.append((input_of(node), node))
        for before, after in pairwise(nodes):
            edges.append((before, after))
            if sends == "buffered":
                continue
            sent = consumer.get(before)
            sent = ("to", *sent) if sent is not None and is_message(sent) else None
            received = ("to", *after) if is_message(after) else None
            if sent:
                edges.append((sent, after))
            if received:
                edges.append((before, received))
                if sent and before[0] == after[0]:  # one operation after the other
                    edges.append((sent, received))
    return edges


def longest_path(order, durations, p2p_us, sends):
    """Length of the longest of all paths, found from each node on by recursion."""
    after = {}
    for one, other in dependencies(order, sends):
        after.setdefault(one, []).append(other)

    def time_of(node):
        return p2p_us[node[-1]] if node[0] == "to" else durations[node]

    def longest_from(node, found):
        if node not in found:
            found[node] = time_of(node) + max(
                (longest_from(n, found) for n in after.get(node, ())), default=0
            )
        return found[node]

    found = {}
    return max(longest_from(node, found) for node in durations)


def times(durations, num_stages, num_micro_batches):
    table = np.zeros((2, num_stages, num_micro_batches))
    for (kind, stage, micro_batch), us in durations.items():
        table["FB".index(kind), stage, micro_batch] = us
    return table


@settings(max_examples=120)
@given(st.sampled_from(CASES), st.data())
def test_step_is_the_longest_path_and_the_critical_path_is_one(case, data):
    sizes, sends = case
    order = GPIPE if sizes == "gpipe" else schedule(*sizes)
    graph = Graph(order, sends)
    pp_size, num = graph.pp_size, graph.num_micro_batches
    # Whole µs, so that sums in any order are exact.
    us = st.integers(0, 100)
    durations = {
        (kind, stage, micro_batch): data.draw(us)
        for kind in "FB"
        for stage in range(graph.num_stages)
        for micro_batch in range(num)
    }
    p2p_us = np.array(data.draw(st.lists(st.integers(0, 30), min_size=num, max_size=num)), float)
    table = times(durations, graph.num_stages, num)
    expected = longest_path(order, durations, p2p_us, sends)
    assert graph.step_us(table, p2p_us) == expected
    replayed = graph.replay(table, p2p_us)
    stops = [(float(graph.of_rank(replayed.stop_us, r)[-1]), r) for r in range(pp_size)]
    stop_us, rank = max(stops)
    assert stop_us == expected
    path = graph.critical_path(replayed, table, p2p_us, (rank, order[rank][-1]))
    edges = set(dependencies(order, sends))
    length, before = 0.0, None
    for node, start_us, stop_us in path:
        stage = node.action.chunk * pp_size + node.rank
        name = (node.action.kind, stage, node.action.micro_batch)
        if node.is_transfer:
            name = ("to", *name)
        length += stop_us - start_us
        if before is not None and (before, name) not in edges:  # a buffered message on the way
            assert sends == "buffered" and (before, ("to", *name)) in edges
            length += p2p_us[node.action.micro_batch]
        before = name
    assert length == expected


@settings(max_examples=20)
@given(st.sampled_from([*ONE_CHUNK, *INTERLEAVED]), st.integers(0, 1000))
def test_alternatives_at_once_are_each_alone(sizes, seed):
    graph = graph_of(*sizes)
    random = np.random.default_rng(seed)
    num = graph.num_micro_batches
    table = random.lognormal(3, 1, (2, graph.num_stages, num, 5))
    p2p_us = random.random((num, 5)) * 9
    together = graph.step_us(table, p2p_us)
    alone = [graph.step_us(table[..., k], p2p_us[:, k]) for k in range(5)]
    assert together.tolist() == alone  # to the last bit
    replayed = graph.replay(table, p2p_us)
    assert replayed.stop_us.max(axis=0).tolist() == alone
    assert len(set(alone)) == 5


def test_thousand_replays_of_a_large_pipeline_take_a_fraction_of_a_minute():
    """PP=16, VPP=4, N=64, whole steps: `test_step` measures the rest. 20 runs, scaled."""
    graph = graph_of(16, 4, 64)
    table = np.random.default_rng(0).random((2, 64, 64))
    start = time.process_time()
    for _ in range(20):
        graph.replay(table, np.zeros(64))
    assert (time.process_time() - start) * 50 < 20  # measured: 2 s


def test_slices_wait_for_keys_and_send_without_waiting():
    """By hand: chains of 1, 2 and 1 on two ranks, forwards of 1 and backwards of 2 µs."""
    graph = slice_graph(2, (1, 2, 1))
    assert graph.sends == "buffered" and graph is slice_graph(2, (1, 2, 1))
    assert [list(map(str, own)) for own in graph.order] == [
        ["F0.0", "F0.1", "F0.2", "B0.0", "F0.3", "B0.2", "B0.1", "B0.3"],
        ["F0.0", "F0.1", "B0.0", "F0.2", "B0.2", "F0.3", "B0.1", "B0.3"],
    ]
    table = np.ones((2, 2, 4)) * np.array([1.0, 2.0])[:, None, None]
    line = timeline(graph, graph.replay(table, np.full(4, 0.5)))
    starts = [{str(i.action): i.start_us for i in rank} for rank in line.intervals]
    # Rank 1 has its first input at 1.5, ends F0.1 at 3.5 and B0.0 at 5.5: rank 0 has it at 6.
    assert (starts[1]["F0.0"], starts[1]["B0.0"], starts[0]["B0.0"]) == (1.5, 3.5, 6.0)
    # Both slices forward before the second goes back, and before the first.
    assert (starts[0]["F0.2"], starts[1]["F0.2"], starts[1]["B0.2"]) == (2.0, 5.5, 6.5)
    assert (starts[0]["F0.3"], starts[1]["F0.3"]) == (8.0, 9.5)
    assert (starts[0]["B0.2"], starts[1]["B0.1"], starts[0]["B0.1"]) == (9.0, 10.5, 13.0)
    assert line.step_us == 17.0


def test_order_without_an_input_is_refused_as_a_deadlock():
    forward, backward = Action("F", 0, 0), Action("B", 0, 0)
    for order in ([[forward, backward], [backward, forward]], [[backward], [forward, backward]]):
        with pytest.raises(PlanError, match="the order deadlocks: rank"):
            Graph(order)
