"""What all packings share: their interface, their limits, greedy placement, and their state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Any, ClassVar, Protocol, TypeAlias

from megatron_wlb.cost import CostModel
from megatron_wlb.errors import CheckpointError, ConfigError, PackingError
from megatron_wlb.plan import Document


@dataclass(frozen=True, slots=True)
class Limits:
    """What every packing keeps to; sizes in tokens.

    Raises :class:`ConfigError` if they contradict each other or let documents pile up for ever.
    """

    num_micro_batches: int
    """N: micro-batches a step, over all data-parallel ranks."""
    window: int
    """Tokens of a Megatron sample (``--seq-length``)."""
    max_tokens: int
    """S_max: the most tokens of a micro-batch."""
    step_tokens: int
    """Tokens that arrive in a step, in the mean."""
    max_step_tokens: int | None = None
    """The most tokens of a step, where age and balance leave the choice; None is N · S_max."""

    max_age: int = 12
    """Steps after which a delayed document runs whatever it costs, if S_max leaves room."""

    def __post_init__(self) -> None:
        for name in ("num_micro_batches", "window", "step_tokens", "max_age"):
            value, least = getattr(self, name), int(name != "max_age")
            if value < least:
                raise ConfigError(f"{name} is {value}; give at least {least}")
        if self.max_tokens < self.window:
            raise ConfigError(
                f"max_tokens (S_max) {self.max_tokens} is below the window of {self.window}; "
                "documents of a whole window must fit, so raise it or shorten the window"
            )
        capacity = self.num_micro_batches * self.max_tokens
        if capacity < self.step_tokens:
            raise ConfigError(
                f"{self.num_micro_batches} micro-batches of at most {self.max_tokens} tokens hold "
                f"{capacity}, but {self.step_tokens} arrive in a step; raise max_tokens (S_max) or "
                "num_micro_batches"
            )
        if self.max_step_tokens is not None and self.max_step_tokens < self.step_tokens:
            raise ConfigError(
                f"max_step_tokens {self.max_step_tokens} is below the {self.step_tokens} tokens "
                "that arrive in a step; raise it"
            )

    @property
    def token_cap(self) -> int:
        """The most tokens of a step."""
        capacity = self.num_micro_batches * self.max_tokens
        return min(capacity, self.max_step_tokens or capacity)

    def check(self, documents: Iterable[Document]) -> None:
        """Raises :class:`PackingError` for a document that no micro-batch could ever hold."""
        for document in documents:
            if document.length > self.max_tokens:
                raise PackingError(
                    f"document {document.index} of corpus {document.corpus} has {document.length} "
                    f"tokens, above max_tokens (S_max) {self.max_tokens}; raise it or split long "
                    "documents"
                )


class Packer(Protocol):
    """Decides, step after step, which documents run now and with which others.

    The same documents in the same order give the same micro-batches, on every rank and after
    every ``state_dict → JSON → load_state_dict``. No document is lost, run twice or cut (but
    ``original`` cuts). As long as a document is at hand, each step runs at least one.
    """

    name: ClassVar[str]
    in_stream_order: ClassVar[bool]
    """Whether the order of the micro-batches, and of the documents in them, is the stream's and
    must be kept; otherwise it means nothing."""

    @property
    def limits(self) -> Limits: ...

    @property
    def waiting(self) -> Sequence[Document]:
        """Documents that have arrived and not run yet."""
        ...

    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        """The N micro-batches of ``step``, in which ``documents`` arrive; some may be empty.

        Raises :class:`PackingError` for a document longer than S_max.
        """
        ...

    def flush(self, step: int) -> list[list[Document]]:
        """The N micro-batches of a step after the stream's end: nothing is held back for balance.

        To be called, with rising steps, until nothing waits.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that later steps depend on, JSON-able."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken.

        Raises, and changes nothing, :class:`CheckpointError` for a state of another packing or of
        another N, and :class:`PackingError` if a waiting document is above a lowered S_max.
        """
        ...


Weighted: TypeAlias = tuple[float, Document]
"""A document and its cost in µs."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Documents in N micro-batches, and those that found no room."""

    micro_batches: list[list[Document]]
    loads_us: list[float]
    left: list[Document]

    @property
    def imbalance(self) -> float:
        """``max · N / Σ``; infinite if no document was placed."""
        total_us = sum(self.loads_us)
        return max(self.loads_us) * len(self.loads_us) / total_us if total_us else float("inf")


def due_and_rest(
    documents: Iterable[Document], step: int, limits: Limits, cost: CostModel
) -> tuple[list[Weighted], list[Weighted]]:
    """Documents that have waited ``max_age`` steps, oldest first; the others, heaviest first.

    Placed in this order, a due document finds no room only where older ones have taken it: age
    goes before cost. Ties go by place in the stream.
    """
    due: list[Weighted] = []
    rest: list[Weighted] = []
    for document in documents:
        weighted = (cost.document_us(document.length), document)
        (due if step - document.step >= limits.max_age else rest).append(weighted)
    due.sort(key=lambda weighted: weighted[1].key)
    rest.sort(key=lambda weighted: (-weighted[0], weighted[1].key))
    return due, rest


def place(documents: Iterable[Weighted], limits: Limits) -> Placement:
    """Each document in turn goes to the least loaded micro-batch that has room for it.

    Ties go to the lowest index. In descending order of cost this is the LPT rule, which is close
    to the optimum where documents are many. ``O(log N)`` a document then, because micro-batches
    without room are parked by the room they have: each is looked at again only when it can serve.
    """
    num_micro_batches = limits.num_micro_batches
    micro_batches: list[list[Document]] = [[] for _ in range(num_micro_batches)]
    room = [limits.max_tokens] * num_micro_batches
    open_ = [(0.0, index) for index in range(num_micro_batches)]  # heap by load
    parked: list[tuple[int, float, int]] = []  # heap by most room
    left = []
    for cost_us, document in documents:
        length = document.length
        while parked and -parked[0][0] >= length:
            _, load_us, index = heappop(parked)
            heappush(open_, (load_us, index))
        while open_ and room[open_[0][1]] < length:
            load_us, index = heappop(open_)
            heappush(parked, (-room[index], load_us, index))
        if not open_:
            left.append(document)
            continue
        load_us, index = open_[0]
        heapreplace(open_, (load_us + cost_us, index))
        room[index] -= length
        micro_batches[index].append(document)
    loads_us = [0.0] * num_micro_batches
    for load_us, index in open_:
        loads_us[index] = load_us
    for _, load_us, index in parked:
        loads_us[index] = load_us
    return Placement(micro_batches, loads_us, left)


def save_state(packer: Packer, **waiting: Iterable[Document]) -> dict[str, Any]:
    """JSON-able: whose state it is, and lists of waiting documents by name."""
    lists = {name: [d.as_list() for d in documents] for name, documents in waiting.items()}
    return {"packing": packer.name, "num_micro_batches": packer.limits.num_micro_batches, **lists}


def load_state(packer: Packer, state: Mapping[str, Any], *names: str) -> list[list[Document]]:
    """The named lists of a state that :func:`save_state` wrote for such a packer.

    Raises :class:`CheckpointError` where ``packer`` cannot continue from it.
    """
    try:
        saved = state["packing"], state["num_micro_batches"]
        ours = packer.name, packer.limits.num_micro_batches
        if saved != ours:
            raise CheckpointError(
                f"the checkpoint was packed by {saved[0]} into {saved[1]} micro-batches, but this "
                f"run is to pack by {ours[0]} into {ours[1]}; resume with the same settings"
            )
        lists = [[Document.from_list(values) for values in state[name]] for name in names]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"not the state of a packing ({error!r}); use an intact checkpoint"
        ) from None
    return lists
