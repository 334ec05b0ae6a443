"""The checker of NCCL's rules finds each planted hang, and passes each program that ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from helpers.nccl.rules import RULES, Call, Group, HostWait, Part, Programs, Rules, Wait, hang

EVERY = {str(rules) for rules in RULES}


class Writer:
    """Writes the program of one of ``num`` ranks."""

    def __init__(self, rank: int, num: int) -> None:
        self.rank, self.num = rank, num
        self.program: list[Call | Wait | HostWait] = []

    def call(self, group: str, *parts: Part, is_batch: bool = False) -> int:
        ranks = tuple(range(self.num))
        self.program.append(Call(Group(group, ranks), parts, is_batch=is_batch))
        return len(self.program) - 1

    def send(self, peer: int, group: str = "a") -> int:
        return self.call(group, Part("send", to=(peer % self.num,)))

    def recv(self, peer: int, group: str = "a") -> int:
        return self.call(group, Part("recv", source=(peer % self.num,)))

    def reduce(self, group: str = "a", num_bytes: int = 4) -> int:
        return self.call(group, Part("all_reduce", num_bytes=num_bytes))

    def wait(self, *calls: int) -> None:
        self.program += map(Wait, calls)


def written(num: int, write: Callable[[Writer], None]) -> Programs:
    writers = [Writer(rank, num) for rank in range(num)]
    for writer in writers:
        write(writer)
    return {writer.rank: writer.program for writer in writers}


def both_send_first(w: Writer) -> None:
    w.send(w.rank + 1)
    w.wait(w.recv(w.rank + 1))


def both_in_a_batch(w: Writer) -> None:
    other = 1 - w.rank
    both = w.call("a", Part("send", to=(other,)), Part("recv", source=(other,)), is_batch=True)
    w.wait(both)


def one_sends_first(w: Writer) -> None:
    ways: Sequence[Callable[[int], int]] = (w.send, w.recv)
    w.wait(*(way(1 - w.rank) for way in (ways if w.rank else ways[::-1])))


def receives_first_in_a_ring(w: Writer) -> None:
    """Each pair has its own communicator, but hosts connect by turns that never come."""
    received = w.recv(w.rank - 1)
    w.send(w.rank + 1)
    w.wait(received)


def each_way_has_a_group(w: Writer) -> None:
    received = w.recv(w.rank + 1, "ab"[w.rank])
    w.send(w.rank + 1, "ba"[w.rank])
    w.wait(received)


def connect(w: Writer, *ways: tuple[int, int, str]) -> None:
    """Uses each way (sender, receiver, group) once, one after another."""
    for sender, receiver, group in ways:
        if w.rank == sender:
            w.wait(w.send(receiver, group))
        elif w.rank == receiver:
            w.wait(w.recv(sender, group))


def receives_first_in_a_connected_ring(w: Writer) -> None:
    connect(w, (0, 1, "a"), (1, 2, "a"), (2, 0, "a"))
    receives_first_in_a_ring(w)


def each_way_has_a_connected_group(w: Writer) -> None:
    connect(w, (0, 1, "b"), (1, 0, "a"))
    each_way_has_a_group(w)


def two_sends_before_a_receive(w: Writer) -> None:
    """The second stands in the one queue until the other rank receives the first."""
    connect(w, (0, 1, "a"), (1, 0, "b"))
    for _ in range(2):
        w.send(1 - w.rank, "ab"[w.rank])
    for _ in range(2):
        w.wait(w.recv(1 - w.rank, "ba"[w.rank]))


def collectives_in_two_orders(w: Writer) -> None:
    for group in ("ab", "ba")[w.rank]:
        w.wait(w.reduce(group))


def collectives_in_two_orders_unwaited(w: Writer) -> None:
    """They run in two streams, where hosts connected them before."""
    for group in "ab":
        w.wait(w.reduce(group))
    w.wait(*[w.reduce(group) for group in ("ab", "ba")[w.rank]])


def collective_before_the_message_it_waits_for(w: Writer) -> None:
    if w.rank == 0:
        w.wait(w.reduce("world"))
        w.send(1)
    else:
        w.wait(w.recv(0))
        w.wait(w.reduce("world"))


def device_waited_for_with_a_receive_posted(w: Writer) -> None:
    if w.rank == 0:
        received = w.recv(1)
        w.program.append(HostWait("device"))
        w.send(1, "b")
        w.wait(received)
    else:
        w.wait(w.recv(0, "b"))
        w.send(0)


def next_receive_before_a_send(w: Writer) -> None:
    """The middle rank receives the next one, which its sender has only when this one came back."""
    if w.rank == 0:
        for _ in range(2):
            w.send(1)
            w.wait(w.recv(1, "b"))
    elif w.rank == 1:
        received = w.recv(0)
        for number in range(2):
            following = w.recv(0) if number == 0 else None
            w.wait(received)
            w.send(2)
            w.wait(w.recv(2, "b"))
            w.send(0, "b")
            received = following
    else:
        for _ in range(2):
            w.wait(w.recv(1))
            w.send(1, "b")


def sizes_in_two_orders(w: Writer) -> None:
    """Groups are connected, but for the algorithm of large ones."""
    for group in "ab":
        w.wait(w.reduce(group))
    w.wait(*[w.reduce(group, 1 << 20) for group in ("ab", "ba")[w.rank]])


def nothing_comes(w: Writer) -> None:
    if w.rank == 0:
        w.wait(w.recv(1))


QUEUES = {str(rules) for rules in RULES if rules.one_queue}
EAGERS = {str(rules) for rules in RULES if rules.eager}
ALGORITHMS = {str(rules) for rules in RULES if rules.algorithms}


@pytest.mark.parametrize(
    ("write", "num", "hangs"),
    [
        (both_send_first, 2, EVERY),
        (both_in_a_batch, 2, set()),
        (one_sends_first, 2, set()),
        (receives_first_in_a_ring, 3, EVERY),
        (receives_first_in_a_connected_ring, 3, EAGERS),
        (each_way_has_a_group, 2, EVERY),
        (each_way_has_a_connected_group, 2, set()),
        (two_sends_before_a_receive, 2, QUEUES),
        (collectives_in_two_orders, 2, EVERY),
        (collectives_in_two_orders_unwaited, 2, set()),
        (collective_before_the_message_it_waits_for, 2, EVERY),
        (device_waited_for_with_a_receive_posted, 2, EVERY),
        (next_receive_before_a_send, 3, EAGERS),
        (sizes_in_two_orders, 2, ALGORITHMS),
        (nothing_comes, 2, EVERY),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_program_hangs_where_it_must(
    write: Callable[[Writer], None], num: int, hangs: set[str]
) -> None:
    programs = written(num, write)
    assert {str(rules) for rules in RULES if hang(programs, rules)} == hangs


def test_circle_is_told_in_words() -> None:
    said = hang(written(2, two_sends_before_a_receive), Rules(one_queue=True))
    assert said is not None
    assert (
        "the start of step 6 of rank 0: recv from 1 (pair b of [0, 1]) waits for "
        "the start of step 5 of rank 0: send to 1 (pair a of [0, 1]) "
        "[behind it in the one queue]" in said
    ), said
