"""What all packings share: their interface, their limits, and the form of their state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_wlb.data.ramp import Ramp
from megatron_wlb.errors import CheckpointError, ConfigError, PackingError
from megatron_wlb.plan import Document
from megatron_wlb.reading import (
    MOST_MICRO_BATCHES,
    MOST_TOKENS,
    reading_state,
    shown,
    typed,
    whole_number,
)

if TYPE_CHECKING:
    from megatron_wlb.cost import CostModel
    from megatron_wlb.planning.packing.settings import PackingSettings

MOST_STEP_TOKENS = 1 << 48
"""The most tokens of a step."""
MOST_STEPS = 1_000_000
"""The most steps of a trial without training."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What every packing keeps to; sizes in tokens.

    Raises :class:`ConfigError` if they contradict each other or let documents pile up for ever.
    """

    num_micro_batches: int
    """N: micro-batches a step, over all data-parallel ranks; with a ``ramp`` those of one step."""
    window: int
    """Tokens of a Megatron sample (``--seq-length``)."""
    max_tokens: int
    """S_max: the most tokens of a micro-batch."""
    step_tokens: int
    """Tokens that arrive in a step, in the mean."""
    max_step_tokens: int | None = None
    """The most tokens of a step, at the end of a ``ramp``; None is N · S_max."""

    max_age: int = 12
    """Steps after which a delayed document runs whatever it costs, if S_max leaves room."""

    micro_batch_size: int = 1
    """Windows of tokens that a micro-batch stands for (``--micro-batch-size``)."""

    ramp: Ramp | None = None
    """How N grows in the first steps; None where all have the same."""

    def __post_init__(self) -> None:
        whole_number("window", self.window, 1, MOST_TOKENS)
        whole_number("step_tokens", self.step_tokens, 1, MOST_STEP_TOKENS)
        whole_number("max_tokens (S_max)", self.max_tokens, 0, MOST_TOKENS)
        whole_number("num_micro_batches", self.num_micro_batches, 1, MOST_MICRO_BATCHES)
        whole_number("max_age", self.max_age, 0)
        whole_number("micro_batch_size", self.micro_batch_size, 1, MOST_MICRO_BATCHES)
        if self.max_tokens < self.window:
            raise ConfigError(
                f"max_tokens (S_max) {self.max_tokens} is below the window of {self.window}; "
                "documents of a whole window must fit, so raise it (--wlb-max-tokens) or shorten "
                "the window"
            )
        capacity = self.num_micro_batches * self.max_tokens
        if capacity < self.step_tokens:
            raise ConfigError(
                f"{self.num_micro_batches} micro-batches of at most {self.max_tokens} tokens hold "
                f"{capacity}, but {self.step_tokens} arrive in a step; raise max_tokens (S_max, "
                "--wlb-max-tokens) or num_micro_batches"
            )
        if self.max_step_tokens is not None and self.max_step_tokens < self.step_tokens:
            raise ConfigError(
                f"max_step_tokens {self.max_step_tokens} is below the {self.step_tokens} tokens "
                "that arrive in a step; raise it (--wlb-max-step-tokens)"
            )

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens that a micro-batch stands for: its windows, full."""
        return self.micro_batch_size * self.window

    @property
    def numbers(self) -> tuple[int, ...]:
        """Each N that a step of the run may have; the last one is there to stay."""
        if self.ramp is None:
            return (self.num_micro_batches,)
        return tuple(size // self.micro_batch_size for size in self.ramp.sizes)

    def at(self, step: int) -> Limits:
        """The limits of ``step``, which has fewer micro-batches while a ``ramp`` lasts."""
        if self.ramp is None:
            return self
        windows = self.ramp.windows(step)
        number = windows // self.micro_batch_size
        if number == self.num_micro_batches:
            return self
        return replace(self, num_micro_batches=number, step_tokens=windows * self.window)

    def num_alike(self, step: int, most: int) -> int:
        """Counts the steps from ``step`` on, up to ``most``, that have as many micro-batches."""
        ramp = self.ramp
        if ramp is None:
            return most
        steps = range(step, step + most)
        return sum(1 for _ in takewhile(lambda s: ramp.windows(s) == ramp.windows(step), steps))

    @property
    def token_cap(self) -> int:
        """The most tokens of a step."""
        capacity = self.num_micro_batches * self.max_tokens
        return min(capacity, self.step_cap or capacity)

    @property
    def step_cap(self) -> int | None:
        """``max_step_tokens``, where age leaves the choice; in a ``ramp`` it grows as N does."""
        if self.max_step_tokens is None or self.ramp is None:
            return self.max_step_tokens
        return -(-self.max_step_tokens * self.step_tokens // (self.ramp.sizes[-1] * self.window))

    def check(self, documents: Sequence[Document]) -> None:
        """Raises :class:`PackingError` for a document that no micro-batch could ever hold."""
        for document in documents:
            if document.length > self.max_tokens:
                raise PackingError(
                    f"document {document.number} of corpus {document.corpus} has {document.length} "
                    f"tokens, above max_tokens (S_max) {self.max_tokens}; raise it "
                    "(--wlb-max-tokens) or split long documents"
                )


BALANCED = frozenset({"max_tokens", "shaped", "max_age", "max_step_tokens", "micro_batches"})
"""Settings of packings whose micro-batches have any length."""


class Packer(ABC):
    """Decides, step after step, which documents run now and with which others.

    The same documents in the same order give the same micro-batches, on every rank and after
    every ``state_dict → JSON → load_state_dict``. No document is lost or run twice; ``wlb`` and
    ``hold`` cut none. As long as a document is at hand, each step runs at least one.
    """

    name: ClassVar[str]
    in_stream_order: ClassVar[bool] = False
    """Whether the order of the micro-batches, and of the documents in them, is the stream's and
    must be kept; otherwise it means nothing."""
    reads: ClassVar[frozenset[str]] = BALANCED
    """The fields of :class:`.settings.PackingSettings` that it reads."""
    reads_if_numbered: ClassVar[frozenset[str]] = frozenset()
    """The fields that it reads besides where the number of micro-batches is chosen."""
    number: ClassVar[str] = ""
    """The field that ``NAME:K`` sets, if any."""
    least: ClassVar[int] = 1
    """The least K."""
    most_of_a_step: ClassVar[float | None] = None
    """The most tokens of a step, in mean steps, where ``max_step_tokens`` is not given; None is no
    bound but N · S_max."""
    tried: ClassVar[tuple[str, ...]] = ("",)
    """What ``wlb pack`` tries behind its name where no packing is named."""
    windows: ClassVar[bool] = False
    """Whether it takes documents of any length and cuts them at the windows of the stream, as
    Megatron does. Cut before, at windows of their own, long documents would be cut twice, and their
    work understated."""
    slices: ClassVar[bool] = False
    """Whether documents of any length run whole, in slices that
    :class:`~megatron_wlb.planning.slicing.cut.Slicer` cuts. Replicas then run unlike numbers of
    micro-batches."""
    cannot: ClassVar[Mapping[str, str]] = {}
    """Flags of Megatron-LM that it cannot run with, and why."""
    unshaped: ClassVar[str] = "{} packing has no shaped steps; leave --wlb-shape (+shape) out"
    unnumbered: ClassVar[str] = (
        "{} packing has as many micro-batches as the batch size says; leave --wlb-micro-batches "
        "auto (+auto) out"
    )
    """Why not, and what instead, where it does not read ``shaped`` or ``micro_batches``."""

    look_ahead: int = 0
    """How many steps after the present one have their documents given already. They may run
    before they arrive; what could not be given by then, at the end of the data, is no loss."""

    limits: Limits

    @classmethod
    @abstractmethod
    def make(cls, settings: PackingSettings, limits: Limits, cost: CostModel) -> Packer:
        """Makes one that holds no document."""

    @classmethod
    def read(cls, number: int, window: int) -> dict[str, Any]:
        """The settings that ``NAME:K`` gives. Raises :class:`ConfigError` for too large a K."""
        return {cls.number: number}

    @classmethod
    def said(cls, settings: PackingSettings) -> Iterable[str]:
        """What of its settings is not the default, in a few words each."""
        return ()

    @property
    @abstractmethod
    def waiting(self) -> Sequence[Document]:
        """Documents that were given to :meth:`pack` and have not run yet; with ``look_ahead``, some
        of them arrive in later steps.
        """

    @abstractmethod
    def pack(self, documents: Sequence[Document], step: int) -> list[list[Document]]:
        """The N micro-batches of ``step``; some may be empty.

        ``documents`` are those, in stream order, that arrive in ``step`` or, read ahead, up to
        ``look_ahead`` steps later, and were not given before.

        Raises, and changes nothing, :class:`PackingError` for a document longer than S_max.
        """

    @abstractmethod
    def flush(self, step: int) -> list[list[Document]]:
        """The N micro-batches of a step after the stream's end: nothing is held back for balance.

        To be called, with rising steps, until nothing waits.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on, JSON-able."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken.

        Raises, and changes nothing, :class:`CheckpointError` for a state of another packing or of
        another N, and :class:`PackingError` if a waiting document is above a lowered S_max.
        """


def save_state(packer: Packer, **waiting: Iterable[Document]) -> dict[str, Any]:
    """Writes whose state it is and copies of the named lists of waiting documents, JSON-able."""
    lists = {name: [*documents] for name, documents in waiting.items()}
    return {"packing": packer.name, "num_micro_batches": packer.limits.numbers[-1], **lists}


def load_state(packer: Packer, state: Mapping[str, Any], *names: str) -> list[list[Document]]:
    """Reads the named lists of a state that :func:`save_state` wrote for such a packer.

    Raises :class:`CheckpointError` where ``packer`` cannot continue from it.
    """
    with reading_state("a packing"):
        name = typed("packing", state["packing"], str)
        saved = shown(name)[1:-1], typed("N", state["num_micro_batches"], int)
        ours = packer.name, packer.limits.numbers[-1]
        if saved != ours:
            raise CheckpointError(
                f"the checkpoint was packed by {saved[0]} into {saved[1]} micro-batches, but this "
                f"run is to pack by {ours[0]} into {ours[1]}; resume with the same --wlb-packing, "
                "--global-batch-size and --micro-batch-size"
            )
        return [[Document.from_list(values) for values in state[name]] for name in names]
