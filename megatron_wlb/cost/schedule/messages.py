"""When a pass's output leaves its rank: early enough, and so that ranks never wait in a circle.

NCCL has rules that gloo has not. A communicator has one stream a rank, so its messages start in the
order of their calls, each when the one before is done. A message is done when both ranks have
started it. With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` all streams of a rank share one queue, so what is
called later starts later. A rank whose next message waits for the one before then has its receives
behind that, and its peer may be in the same state: with several chunks a rank, both wait for ever.

Each rule says that one event comes after another. So ranks hang in every timing, or in none, and in
none if all events can be written in one row that keeps the rules. Here that row is a *timeline*: a
replay of the order in which forwards take 1, backwards 2 and messages no time. A receive is called
ahead of the pass before the one that needs it. A send is called when its pass is done and the
receive of the message before has been called, by the timeline. At each moment of it

0. outputs of passes that end are sent,
1. passes that come after the next ones get their receives,
2. passes start, and have what they wait for,
3. what waited for a receive of 1 is sent.

Each rank calls in this row's order, and each communicator has the messages of one rank to one
other. Then a message starts only behind those that the row has before it, whatever passes really
take. What ranks of one stage do together inside passes, such as context parallelism, comes in one
order too, and the first reductions of gradients in that of virtual stages on all replicas; where
they would not, they come behind all passes.

Most outputs leave at once: all where ranks have one chunk. Real times differ from the timeline, and
a send that waits in it may leave later than it could: :class:`.Graph` counts that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from megatron_wlb.cost.schedule.graph import Floats, Graph, Ints, Replay
from megatron_wlb.cost.schedule.order import Action, sliced

AHEAD = 1
"""Passes between a receive and the one that needs it."""
_MOMENTS = 4
"""How many moments a time of the timeline has, see above."""


class Messages(NamedTuple):
    """The messages of an order, in the order of the passes that need them, rank by rank.

    Passes are numbered rank by rank.
    """

    source: Ints
    """The pass whose output it is."""
    behind: Ints
    """The pass of the same rank behind which it is sent."""
    moment: Ints
    """When that is, by the timeline: messages behind one pass are sent in this order."""


def timeline(graph: Graph) -> Replay:
    """A replay in which each forward takes 1, each backward 2."""
    times = np.ones((2, graph.num_stages, graph.num_micro_batches))
    times[1] = 2
    return graph.replay(times, np.zeros(graph.num_micro_batches))


def messages(graph: Graph, ahead: int = AHEAD) -> Messages:
    """When the messages of an order are sent, whose receives come ``ahead`` of their passes."""
    source, needed = graph.inputs()
    if not len(source):
        return Messages(source, source, source)
    replay = timeline(graph)
    starts, stops = (
        np.concatenate([graph.of_rank(of, rank) for rank in range(graph.pp_size)]).astype(np.int64)
        for of in (replay.start_us, replay.stop_us)
    )
    counts = np.array([len(actions) for actions in graph.order])
    rank = np.repeat(np.arange(graph.pp_size), counts)
    first = np.repeat(counts.cumsum() - counts, counts)
    called = starts[np.maximum(needed - ahead, first[needed])]
    # A rank sends forwards to one other and backwards to one other, which needs them in order.
    kinds = np.concatenate([[action.kind == "B" for action in own] for own in graph.order])
    channel = 2 * rank[source] + kinds[source]
    by_channel = np.lexsort((source, channel))
    moment = np.empty_like(source)
    last = int(stops.max()) + 1
    ends = _MOMENTS * stops[source[by_channel]]
    before = np.empty_like(ends)
    before[1:] = _MOMENTS * called[by_channel[:-1]] + 3
    before[np.flatnonzero(np.diff(channel[by_channel], prepend=-1))] = -1  # the first one waits not
    offset = _MOMENTS * last * channel[by_channel]
    moment[by_channel] = np.maximum.accumulate(np.maximum(ends, before) + offset) - offset
    offset = _MOMENTS * last * rank
    reached = np.searchsorted(_MOMENTS * starts + offset, moment + offset[source]) - 1
    return Messages(source, np.maximum(reached, source), moment)


def departures(order: Sequence[Sequence[Action]], rank: int, ahead: int = AHEAD) -> list[list[int]]:
    """The passes of a rank whose outputs are sent behind each of its passes, in order."""
    sent = messages(Graph(order), ahead)
    begin = sum(map(len, order[:rank]))
    own = (sent.source >= begin) & (sent.source < begin + len(order[rank]))
    by_moment = np.argsort(sent.moment[own], kind="stable")
    result: list[list[int]] = [[] for _ in order[rank]]
    for source, behind in (np.stack(sent[:2])[:, own][:, by_moment].T - begin).tolist():
        result[behind].append(source)
    return result


@lru_cache(maxsize=64)
def slice_graph(pp_size: int, chains: tuple[int, ...], vpp_size: int = 1) -> Graph:
    """The graph of :func:`.order.sliced`, whose ranks send as they compute.

    It takes 1 ms for PP=4 and 64 micro-batches, 9 ms for PP=16 and 256; with several chunks twice
    as long.
    """
    graph = Graph(sliced(pp_size, chains, vpp_size))
    # With one chunk all outputs leave at once.
    return graph if vpp_size == 1 else graph.placed(messages(graph).behind)


def meet_in_order(
    pp_size: int,
    vpp_size: int,
    chains: Sequence[Sequence[int]],
    blocks: Sequence[Sequence[tuple[int, ...]]],
) -> bool:
    """Whether replicas come to what several of them run together in one order.

    ``blocks`` are the replicas that run each micro-batch of a replica together, of which those
    come first, larger blocks before smaller ones; none runs it alone. Two replicas must run what
    they share in one order in the timelines of both: else each could wait for the other. With one
    chunk they do. With several the order hangs on the numbers of all their micro-batches.
    """
    if vpp_size == 1:
        return True
    for rank, own in enumerate(blocks):
        for other in own[0] if own else ():
            pairs = zip(own, blocks[other], strict=False)
            num = sum(1 for _ in takewhile(lambda both: both[0] and both[0] == both[1], pairs))
            one, two = (
                _starts(pp_size, tuple(chains[at]), vpp_size)[..., :num].ravel()
                for at in (rank, other)
            )
            if (np.diff(two[np.lexsort((two, one))]) < 0).any():
                return False
    return True


@lru_cache(maxsize=64)
def _starts(pp_size: int, chains: tuple[int, ...], vpp_size: int) -> Floats:
    """When each pass starts by the timeline, ``[2, S, N]``: forwards, backwards."""
    graph = Graph(sliced(pp_size, chains, vpp_size))
    return graph.by_action(timeline(graph).start_us)
