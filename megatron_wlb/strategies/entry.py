"""Strategies as an :class:`~megatron_wlb.planning.extension.Extension`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_wlb.data.corpora import Corpora
from megatron_wlb.settings.config import Config
from megatron_wlb.strategies.plan import strategy_run
from megatron_wlb.strategies.plan.assigner import StrategyPlanner

if TYPE_CHECKING:
    from megatron_wlb.cli.model import Model
    from megatron_wlb.simulator.trial import Steps
    from megatron_wlb.strategies.run.strategy_session import StrategySession
    from megatron_wlb.study.search import Space


class Strategies:
    """Replicas of unlike layouts, which follow the documents of each step."""

    def alone(self, config: Config, num_ranks: int) -> Config:
        strategy_run.check(config)
        strategy_run.check_ranks(config, num_ranks)
        return strategy_run.undivided(config)

    def planner(self, config: Config, corpora: Corpora, num_ranks: int) -> StrategyPlanner:
        return strategy_run.StrategyRun.of(config, corpora, num_ranks).planner(corpora)

    def session(self) -> type[StrategySession]:
        from megatron_wlb.strategies.run.strategy_session import StrategySession

        return StrategySession

    def advise(self, args: argparse.Namespace, steps: Steps, space: Space, model: Model) -> int:
        from megatron_wlb.strategies import plan_strategies

        strategy_run.check_shape(space.shape, f"--model {args.model}")
        return plan_strategies.run(args, steps, space, model)
