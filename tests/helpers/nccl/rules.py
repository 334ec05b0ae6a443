"""NCCL's rules as a graph: do the programs of some ranks end, whatever the timing?

Each rule says that one event comes after another, and none leaves a choice: communicators are
queues, programs are fixed, and the first send from one rank to another meets the first receive. So
programs end in every timing, or hang in every timing, and hang exactly where the graph has a cycle.

Events are: a host comes to a step of its program, a call starts on the device, a call is done, and
the computing stream has what it waits for. Every message is taken to need both ends at once. NCCL
buffers some MiB, so a small message may end although the checker says that it hangs.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias


class Rules(NamedTuple):
    """What holds besides NCCL's order of calls."""

    eager: bool = False
    """The group is bound to a device (``device_id=``): its messages go by its one communicator.
    Else each pair of ranks in it has its own."""
    one_queue: bool = False
    """``CUDA_DEVICE_MAX_CONNECTIONS=1``: what a rank calls later starts later."""
    host_waits: bool = False
    """Each call waits until the computing stream has come to it, as ``.item()`` does."""
    algorithms: bool = False
    """The first collective of each kind and size connects its ranks, and blocks their hosts."""

    def __str__(self) -> str:
        names = (name for name, on in zip(self._fields[1:], self[1:], strict=True) if on)
        return "+".join(["eager" if self.eager else "lazy", *names])


RULES = (
    *(Rules(eager, one_queue) for eager in (False, True) for one_queue in (False, True)),
    *(Rules(eager, host_waits=True) for eager in (False, True)),
    *(Rules(eager, True, algorithms=True) for eager in (False, True)),
    *(Rules(eager, True, True, True) for eager in (False, True)),
)


OF_LIKE_SIZE = {"all_reduce", "reduce_scatter", "all_gather", "broadcast"}
"""Collectives to which all ranks give as many bytes."""


class Group(NamedTuple):
    name: str
    ranks: tuple[int, ...]


class Part(NamedTuple):
    """A message, or a rank's part in a collective."""

    kind: str
    """``send``, ``recv``, or the name of the collective."""
    to: tuple[int, ...] = ()
    """Whom it sends to; of an all-to-all those who get something."""
    source: tuple[int, ...] = ()
    """Whom it receives from."""
    num_bytes: int = 4


class Call(NamedTuple):
    """What a rank asks of a group: a message, several that are batched, or a collective."""

    group: Group
    parts: tuple[Part, ...]
    site: str = ""
    blocks: bool = False
    """The host waits for it."""
    between_hosts: bool = False
    """It is gloo's, also on GPUs."""
    is_batch: bool = False


class Wait(NamedTuple):
    """The computing stream waits for a call, by its place in the program; between hosts the host
    does.
    """

    call: int
    site: str = ""


class HostWait(NamedTuple):
    """The host waits: for its ``device``, or for all ranks of the world, which make a ``group``."""

    what: str
    site: str = ""


Program: TypeAlias = Sequence[Call | Wait | HostWait]
Programs: TypeAlias = Mapping[int, Program]
"""By rank."""
Key: TypeAlias = tuple[str, str, tuple[int, ...]]


def communicator(call: Call, rank: int, rules: Rules) -> Key:
    """What has the call: between hosts, a pair's communicator, or that of a group."""
    name, ranks = call.group
    if call.between_hosts:
        return "hosts", name, ranks
    (part, *_) = call.parts
    if part.kind in ("send", "recv") and not (call.is_batch or rules.eager):
        return "pair", name, tuple(sorted((rank, *part.to, *part.source)))
    return "group", name, ranks


def communicators(program: Program, rank: int, rules: Rules) -> set[Key]:
    """NCCL's communicators of a rank."""
    calls = (step for step in program if isinstance(step, Call) and not step.between_hosts)
    return {communicator(call, rank, rules) for call in calls}


def hang(programs: Programs, rules: Rules) -> str | None:
    """None where the programs end; else who waits for whom, in a circle, a line each."""
    graph = _Graph(rules)
    try:
        graph.add(programs)
    except _Unmatched as error:
        return str(error)
    return graph.cycle()


def hangs(programs: Programs) -> dict[str, str]:
    """What :func:`hang` says, by each of the rules under which programs hang."""
    found = {str(rules): hang(programs, rules) for rules in RULES}
    return {name: text for name, text in found.items() if text is not None}


class _Unmatched(Exception):
    """A call that no other rank answers."""


@dataclass(eq=False)
class _Op:
    rank: int
    call: Call
    key: Key
    step: int
    start: int = -1
    done: int = -1
    others: list[_Op] = field(default_factory=list)

    def __str__(self) -> str:
        parts = ", ".join(
            part.kind
            + (f" to {_ranks(part.to)}" if part.to else "")
            + (f" from {_ranks(part.source)}" if part.source else "")
            for part in self.call.parts
        )
        kind, name, ranks = self.key
        site = f" at {self.call.site}" if self.call.site else ""
        where = f"step {self.step} of rank {self.rank}"
        return f"{where}: {parts} ({kind} {name} of {_ranks(ranks)}){site}"


class _Graph:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.names: list[Any] = []
        """Of events: parts of a text."""
        self.behind: list[list[tuple[int, str]]] = []
        """Of each event those that come after it, and why."""
        self.num_before: list[int] = []

    def event(self, *name: Any) -> int:
        self.names.append(name)
        self.behind.append([])
        self.num_before.append(0)
        return len(self.names) - 1

    def after(self, one: int, other: int, why: str) -> None:
        """``other`` comes after ``one``."""
        self.behind[one].append((other, why))
        self.num_before[other] += 1

    def add(self, programs: Programs) -> None:
        ops = {
            (rank, at): _Op(rank, step, communicator(step, rank, self.rules), at)
            for rank, program in programs.items()
            for at, step in enumerate(program)
            if isinstance(step, Call)
        }
        for op in ops.values():
            op.start, op.done = self.event("the start of", op), self.event("the end of", op)
            self.after(op.start, op.done, "it runs")
        _match(ops.values())
        for op in ops.values():
            for other in op.others:
                self.after(other.start, op.done, "its other end")
        users: dict[Any, dict[int, int]] = defaultdict(dict)  # what is connected: rank, step
        for op in ops.values():
            for what, _ in self._connects(op):
                users[what].setdefault(op.rank, op.step)
        hosts = {
            rank: [self.event("rank", rank, "coming to step", at) for at in range(len(program) + 1)]
            for rank, program in programs.items()
        }
        made_groups: list[int] = []
        for rank, program in programs.items():
            self._add_rank(rank, program, ops, users, hosts, made_groups)

    def _add_rank(
        self,
        rank: int,
        program: Program,
        ops: Mapping[tuple[int, int], _Op],
        users: Mapping[Any, Mapping[int, int]],
        hosts: Mapping[int, Sequence[int]],
        made_groups: list[int],
    ) -> None:
        before_of: dict[Key, _Op] = {}
        last: _Op | None = None
        stream: int | None = None
        num_groups = 0
        launched: list[_Op] = []
        for at, step in enumerate(program):
            here = hosts[rank][at]
            if isinstance(step, HostWait):
                if step.what == "group":
                    if num_groups == len(made_groups):
                        made_groups.append(self.event("all ranks making group", num_groups))
                    gate = made_groups[num_groups]
                    num_groups += 1
                    self.after(here, gate, "all make it")
                    here = self.event("rank", rank, "having made a group at", step.site)
                    self.after(gate, here, "all make it")
                else:
                    waits = here
                    here = self.event("rank", rank, "having waited for its device at", step.site)
                    self.after(waits, here, "its program")
                    for op in launched:
                        self.after(op.done, here, "the host waits for its device")
            elif isinstance(step, Wait):
                op = ops[rank, step.call]
                waits = here
                name = "the host of rank" if op.call.between_hosts else "the stream of rank"
                there = self.event(name, rank, "having waited at", step.site)
                self.after(waits, there, "its program")
                self.after(op.done, there, "it waits for it")
                if op.call.between_hosts:
                    here = there
                else:
                    if stream is not None:
                        self.after(stream, there, "the stream's order")
                    if last is not None and self.rules.one_queue:
                        self.after(last.start, there, "behind it in the one queue")
                    stream = there
            else:
                op = ops[rank, at]
                here = self._connected(op, here, users, hosts)
                self.after(here, op.start, "it is called then")
                if not op.call.between_hosts:
                    if op.key in before_of:
                        self.after(
                            before_of[op.key].done, op.start, "behind it on its communicator"
                        )
                    if stream is not None:
                        self.after(stream, op.start, "the stream that it was called from")
                        if self.rules.host_waits:
                            self.after(stream, here, "the host waits for its stream")
                    if last is not None and self.rules.one_queue:
                        self.after(last.start, op.start, "behind it in the one queue")
                    before_of[op.key] = last = op
                    launched.append(op)
                if op.call.blocks:
                    there = self.event("rank", rank, "having waited for", op)
                    self.after(here, there, "its program")
                    self.after(op.done, there, "the host waits for it")
                    here = there
            self.after(here, hosts[rank][at + 1], "its program")

    def _connected(
        self,
        op: _Op,
        here: int,
        users: Mapping[Any, Mapping[int, int]],
        hosts: Mapping[int, Sequence[int]],
    ) -> int:
        """The host, when all ranks have come that the call connects with."""
        there = None
        for what, members in self._connects(op):
            if users[what][op.rank] != op.step:
                continue  # not the first use
            for member in members:
                if member == op.rank:
                    continue
                if member not in users[what]:
                    raise _Unmatched(f"{op} connects with rank {member}, which never does")
                if there is None:
                    there = self.event("rank", op.rank, "being connected for", op)
                    self.after(here, there, "its program")
                self.after(hosts[member][users[what][member]], there, "connects at its first use")
        return here if there is None else there

    def _connects(self, op: _Op) -> Iterator[tuple[Any, tuple[int, ...]]]:
        """What a call connects at its first use, and all ranks that do so together."""
        kind, _, ranks = op.key
        if kind == "hosts":
            return
        if kind == "pair" or not self.rules.eager:
            yield ("communicator", op.key), ranks
        for part in op.call.parts:
            ways = [(op.rank, peer) for peer in part.to if peer != op.rank]
            ways += [(peer, op.rank) for peer in part.source if peer != op.rank]
            for way in ways:
                yield ("way", op.key, way), way
            if not ways and part.kind != "all_to_all":
                yield ("rings", op.key), ranks
                if self.rules.algorithms:
                    size = part.num_bytes.bit_length() if part.kind in OF_LIKE_SIZE else 0
                    yield ("algorithm", op.key, part.kind, size), ranks

    def cycle(self) -> str | None:
        left = [*self.num_before]
        ready = [event for event, num in enumerate(left) if not num]
        num_come = 0
        while ready:
            num_come += 1
            for other, _ in self.behind[ready.pop()]:
                left[other] -= 1
                if not left[other]:
                    ready.append(other)
        if num_come == len(left):
            return None
        return self._told({event for event, num in enumerate(left) if num})

    def _told(self, stuck: set[int]) -> str:
        """A short circle among events that never come."""
        before: dict[int, int] = {}
        for event in stuck:
            for other, _ in self.behind[event]:
                if other in stuck:
                    before.setdefault(other, event)
        at, seen = min(stuck), dict[int, None]()
        while at not in seen:  # backwards one comes round
            seen[at] = None
            at = before[at]
        origins = [*seen][[*seen].index(at) :]
        rounds = filter(None, (self._round(origin, stuck) for origin in origins[:12]))
        best = min(rounds, key=len)
        lines = [f"{len(stuck)} events never come, as these wait for each other:"]
        for (one, _), (other, why) in zip([best[-1], *best[:-1]], best, strict=True):
            lines.append(f"  {self._name(other)} waits for {self._name(one)} [{why}]")
        return "\n".join(lines)

    def _round(self, origin: int, stuck: set[int]) -> list[tuple[int, str]]:
        """The shortest way from an event to itself: events, and why each comes after the last."""
        came: dict[int, tuple[int, str]] = {}
        queue = deque([origin])
        while queue:
            at = queue.popleft()
            for to, why in self.behind[at]:
                if to == origin:
                    way = [(to, why)]
                    while at != origin:
                        before, reason = came[at]
                        way.append((at, reason))
                        at = before
                    return way[::-1]
                if to in stuck and to not in came:
                    came[to] = at, why
                    queue.append(to)
        return []

    def _name(self, event: int) -> str:
        return " ".join(map(str, self.names[event]))


def _match(ops: Any) -> None:
    """Fills in the other ends. Raises where a call has none."""
    ends: dict[Any, list[list[tuple[_Op, int]]]] = defaultdict(lambda: [[], []])
    collectives: dict[Key, dict[int, list[_Op]]] = defaultdict(dict)
    for op in ops:
        for part in op.call.parts:
            if part.kind == "send":
                ends[op.key, op.rank, part.to[0]][0].append((op, part.num_bytes))
            elif part.kind == "recv":
                ends[op.key, part.source[0], op.rank][1].append((op, part.num_bytes))
            else:
                collectives[op.key].setdefault(op.rank, []).append(op)
    for (_, sender, receiver), (sends, receives) in ends.items():
        if len(sends) != len(receives):
            first = max(sends, receives, key=len)[min(len(sends), len(receives))]
            raise _Unmatched(
                f"{len(sends)} messages are sent from {sender} to {receiver}, {len(receives)} "
                f"received; the first of one end is {first[0]}"
            )
        for (one, sent), (other, received) in zip(sends, receives, strict=True):
            if sent != received:
                raise _Unmatched(f"{other} gets {sent} bytes, not {received}, of {one}")
            one.others.append(other)
            other.others.append(one)
    for key, by_rank in collectives.items():
        counts = Counter({rank: len(by_rank.get(rank, ())) for rank in key[2]})
        if len(set(counts.values())) > 1:
            raise _Unmatched(f"ranks of {key} have unlike numbers of collectives: {dict(counts)}")
        for row in zip(*by_rank.values(), strict=True):
            (part, *_) = row[0].call.parts
            unlike = {op.call.parts[0].kind for op in row} != {part.kind}
            if part.kind in OF_LIKE_SIZE:
                unlike |= {op.call.parts[0].num_bytes for op in row} != {part.num_bytes}
            if unlike:
                raise _Unmatched("collectives differ: " + "; ".join(map(str, row)))
            for op in row:
                op.others.extend(other for other in row if other is not op)


def _ranks(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else str(list(ranks))
