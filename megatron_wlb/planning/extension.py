"""What an extension gives that plans and runs steps in its own way, as strategies do."""

from __future__ import annotations

import argparse
from typing import Any, Protocol

from megatron_wlb.data.corpora import Corpora
from megatron_wlb.extensions import load
from megatron_wlb.planning.plan_ahead import Plans
from megatron_wlb.settings.config import Config


class Extension(Protocol):
    """Plans and runs steps in place of the core."""

    def alone(self, config: Config, num_ranks: int) -> Config:
        """The settings that all replicas have in common, as of a run on one rank.

        Raises :class:`ConfigError` for settings that it cannot run with.
        """
        ...

    def planner(self, config: Config, corpora: Corpora, num_ranks: int) -> Plans:
        """Plans the training steps from the first one on; a ledger is planned again by it."""
        ...

    def session(self) -> type[Any]:
        """What runs it under Megatron's loop: a :class:`.Session`."""
        ...

    def advise(self, args: argparse.Namespace, steps: Any, space: Any, model: Any) -> int:
        """Answers ``wlb plan`` for the machine and model of ``space``, a :class:`.Space`, and the
        documents of ``steps``, which are :class:`.Steps`.
        """
        ...


def strategies() -> Extension:
    """Replicas of unlike layouts (docs/strategies.md)."""
    made: Extension = load("strategies")()
    return made


def extension_of(config: Config) -> Extension | None:
    """What plans and runs the steps of these settings; None is the core."""
    return None if config.wlb.wlb_strategies is None else strategies()
