"""What became of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field

from _run_recipes.scaling import GPU, LAYOUT

EQUAL, UNEQUAL, FAILED, UNFIT = "equal", "unequal", "failed", "does not fit"
REFUSED, NO_TRAINING, UNKNOWN, FOREIGN = "refused", "no training", "no model", "not Megatron's"
RAN = (EQUAL, UNEQUAL)
ACCEPTED = (*RAN, FAILED, UNFIT)
STATUSES = (*RAN, FAILED, UNFIT, REFUSED, NO_TRAINING, UNKNOWN, FOREIGN)
"""What they mean stands in docs/results/recipe-runs.md."""


@dataclass
class Outcome:
    """What became of one recipe."""

    recipe: str
    status: str
    why: list[str] = field(default_factory=list)
    """What was said against it, or where it differs."""
    layout: str = ""
    num_processes: int = 0
    changes: list[dict[str, str]] = field(default_factory=list)
    """Each flag that the small run has otherwise: what it was, what it is, and of what kind the
    reason is."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Loss and gradient norm of each step, and those of one process."""
    command: list[str] = field(default_factory=list)
    tail: str = ""
    """The last lines of the log of a process that failed."""
    seconds: float = 0.0

    @property
    def reduced(self) -> bool:
        """Whether TP, PP or CP are smaller than the recipe's."""
        return any(change["kind"] == LAYOUT for change in self.changes)

    @property
    def without(self) -> list[str]:
        """Flags that were left out because there is no GPU."""
        return [c["flag"] for c in self.changes if c["kind"] == GPU and not c["after"]]

    @property
    def kinds(self) -> list[str]:
        """Why flags were changed, each once."""
        return list(dict.fromkeys(change["kind"] for change in self.changes))

    def __str__(self) -> str:
        said = f": {'; '.join(self.why)}" if self.why else ""
        return f"{self.status:12} {self.recipe} {self.layout}{said} ({self.seconds:.0f} s)"
