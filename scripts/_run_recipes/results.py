"""What all recipes came to: the file of results, and the counts that a line and the pages give."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from _run_recipes.outcome import (
    ACCEPTED,
    EQUAL,
    FAILED,
    FOREIGN,
    NO_TRAINING,
    RAN,
    UNEQUAL,
    UNFIT,
    UNKNOWN,
    Outcome,
)
from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text
from megatron_wlb.reading import MAX_RECORD_BYTES, parse_mapping, read_text, record, typed


@dataclass(frozen=True)
class Counts:
    """How far the recipes came, from all to those that equal one process."""

    recipes: int
    training: int
    accepted: int
    fitting: int
    ran: int
    equal: int

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Counts:
        by = Counter(one.status for one in outcomes)
        accepted, ran = (sum(by[one] for one in some) for some in (ACCEPTED, RAN))
        training = by.total() - by[NO_TRAINING] - by[FOREIGN] - by[UNKNOWN]
        return cls(by.total(), training, accepted, accepted - by[UNFIT], ran, by[EQUAL])

    def __str__(self) -> str:
        word = "equals" if self.equal == 1 else "equal"
        return (
            f"{self.training} of {self.recipes} recipes train; {self.accepted} are accepted, "
            f"{self.fitting} fit, {self.ran} ran, {self.equal} {word} one process"
        )


@dataclass
class Results:
    """Outcomes by name, of one kind of recipes and one version of Megatron."""

    kind: str
    version: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Results:
        """What a start wrote.

        Raises :class:`ConfigError` for any other file.
        """
        try:
            content = parse_mapping(read_text(path, MAX_RECORD_BYTES), is_json=True)
            recipes = typed("recipes", content.pop("recipes", None), dict)
            outcomes = {name: record(f"{name}: ", Outcome, one) for name, one in recipes.items()}
            return record("", cls, content | {"outcomes": outcomes})
        except ConfigError as error:
            raise ConfigError(
                f"{path} has no results of recipes ({error}); give a file that --out names"
            ) from None

    def resume(self, path: Path) -> None:
        """Takes over what an earlier start found, but for failures, which run again.

        Raises :class:`ConfigError` for a file of another kind or version.
        """
        if not path.exists():
            return
        left = Results.read(path)
        if (left.kind, left.version) != (self.kind, self.version):
            raise ConfigError(
                f"{path} has results of {left.kind} {left.version}, these recipes are {self.kind} "
                f"{self.version}; give another --out"
            )
        again = (FAILED, UNEQUAL)
        self.outcomes = {n: one for n, one in left.outcomes.items() if one.status not in again}

    def write(self, path: Path) -> None:
        """All of it or nothing, see :func:`write_text`."""
        recipes = {name: asdict(self.outcomes[name]) for name in sorted(self.outcomes)}
        content = {"kind": self.kind, "version": self.version, "recipes": recipes}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(content, indent=1) + "\n")

    @property
    def packing(self) -> str:
        """That of the runs; empty where none was accepted."""
        commands = (one.command for one in self.outcomes.values())
        return next((c[c.index("--wlb-packing") + 1] for c in commands if c), "")

    @property
    def counts(self) -> Counts:
        return Counts.of(self.outcomes.values())
