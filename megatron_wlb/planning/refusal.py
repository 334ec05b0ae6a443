"""A refusal: one setting, when it cannot run, why, and what to do. Tables of them are data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from megatron_wlb.errors import WLBError


class Known(Protocol):
    """What is known of a run, by which its settings are refused."""

    def value(self, name: str) -> Any:
        """What a setting or flag says."""

    def begins(self, name: str) -> str:
        """How the line of a refused one begins."""


Facts_ = TypeVar("Facts_", bound=Known, contravariant=True)


@dataclass(frozen=True)
class Refusal(Generic[Facts_]):
    """One row of a table.

    Texts name facts as ``{f.tp}``; ``{found}`` is what ``when`` gives. Without a setting the reason
    is a whole sentence.
    """

    name: str
    when: Callable[[Facts_, Any], Any]
    """Asked of a run's facts and the setting's value; anything false lets it run."""
    reason: str
    remedy: str = "leave it out"

    def line(self, facts: Facts_) -> str:
        """The line that a user reads; empty where the run goes on."""
        found = self.when(facts, facts.value(self.name) if self.name else None)
        if not found:
            return ""
        text = "; ".join(filter(None, (self.reason, self.remedy))).format(f=facts, found=found)
        return f"{facts.begins(self.name)} {text}" if self.name else text


def given(_: Any, value: Any) -> bool:
    """Refuses a flag wherever it is given."""
    return value is not None and value is not False and value != 0 and value != []


def other_than(*allowed: Any) -> Callable[[Any, Any], bool]:
    """Refuses all values but these, and none at all."""
    return lambda _, value: value not in (None, *allowed)


def below(least: float) -> Callable[[Any, Any], bool]:
    """Refuses numbers that are too small."""
    return lambda _, value: value is not None and value < least


def failing(do: Callable[[Facts_], object], begins: str = "") -> Refusal[Facts_]:
    """What must go without an error; the error says all."""

    def fails(facts: Facts_, _: Any) -> str:
        try:
            do(facts)
        except WLBError as error:
            return f"{begins}{error}"
        return ""

    return Refusal("", fails, "{found}", "")


def lines(rows: Iterable[Refusal[Facts_]], facts: Facts_) -> Iterator[str]:
    """What of a table cannot run, each as the line that a user reads."""
    return filter(None, (row.line(facts) for row in rows))
