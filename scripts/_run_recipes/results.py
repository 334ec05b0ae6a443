"""What all recipes came to: the file of results, the lines and the tables made of it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _run_recipes.recipes import ACCEPTED, FAILED, FOREIGN, NO_TRAINING, RAN, UNFIT, EQUAL, Outcome
from megatron_wlb.errors import ConfigError
from megatron_wlb.files import write_text


class Results:
    """Outcomes by name, of one kind of recipes and one version of Megatron."""

    def __init__(self, kind: str, version: str) -> None:
        self.kind, self.version = kind, version
        self.outcomes: dict[str, dict[str, Any]] = {}

    def read(self, path: Path) -> None:
        """Takes what an earlier start found, but for failures, which run again.

        Raises :class:`ConfigError` for a file of another kind or version, or of anything else.
        """
        if not path.exists():
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            there = (content["kind"], content["version"])
            outcomes = content["recipes"]
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"{path} has no results of recipes; give another --json") from None
        if there != (self.kind, self.version):
            raise ConfigError(
                f"{path} has results of {' '.join(there)}, these recipes are {self.kind} "
                f"{self.version}; give another --json"
            )
        self.outcomes = {k: one for k, one in outcomes.items() if one["status"] != FAILED}

    def write(self, path: Path) -> None:
        content = {"kind": self.kind, "version": self.version, "recipes": self.outcomes}
        write_text(path, json.dumps(content, indent=1) + "\n")

    def has(self, name: str) -> bool:
        return name in self.outcomes

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.recipe] = asdict(outcome)

    def summary(self) -> str:
        counts = Counter(one["status"] for one in self.outcomes.values())
        return f"{self.kind} {self.version}: {counts}"


def line(outcome: Outcome) -> str:
    return f"{outcome.recipe}: {outcome.status} {outcome.layout} {outcome.seconds} s {outcome.why[:2]}\n{outcome.tail}"
def write_tables(x): ...
