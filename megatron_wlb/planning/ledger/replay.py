"""Plans the steps of a ledger again, from its corpora and settings, and compares their digests."""

from __future__ import annotations

import dataclasses

from megatron_wlb.cost import cost_from_dict
from megatron_wlb.data.corpora import Corpora
from megatron_wlb.errors import ConfigError, PlanError
from megatron_wlb.planning.extension import strategies
from megatron_wlb.planning.from_config import make_planner
from megatron_wlb.planning.guards import check_ranges
from megatron_wlb.planning.ledger.history import History, Start
from megatron_wlb.planning.plan_ahead import Plans
from megatron_wlb.reading import MOST_DEVICES, whole_number
from megatron_wlb.settings.config import from_flat


def replay(history: History) -> int:
    """Plans all steps that count; how many there are.

    Each start of the run has its own settings and layout, and goes on from the state before it.

    Raises:
        ConfigError: the ledger begins in the midst of a run.
        CorpusError: a corpus is not where it was.
        PlanError: a step is planned otherwise; names it.
    """
    if history.base.iteration:
        raise ConfigError(
            f"{history.path} begins after step {history.base.iteration}, and the "
            "planner's state at that step is unknown; only a ledger from the first step on can be "
            "planned again"
        )
    planner: Plans | None = None
    number = -1
    for step in history.steps:
        if planner is None or step.start != number:
            before, number = planner, step.start
            planner = _planner(history.starts[number])
            if before is not None:
                planner.load_state_dict(before.state_dict())
        plan = planner.next_plan()
        found = "no plan" if plan is None else plan.digest[: len(step.digest)]
        if found != step.digest:
            raise PlanError(
                f"{history.path}: step {step.iteration} is planned as {found} now, but ran as "
                f"{step.digest}; settings, corpora or the release differ"
            )
    return len(history.steps)


def _planner(start: Start) -> Plans:
    # Ledgers have what is not the default, and `hold` was that before packings were chosen.
    # Strategies have neither a packing nor one cost.
    default = {} if start.cost is None else {"wlb_packing": "hold"}
    config = from_flat(default | start.settings)
    check_ranges(config)
    dp_size = whole_number("dp_size", start.dp_size, 1, MOST_DEVICES)
    if not config.data.data_path and not config.data.mock_data:
        raise ConfigError(
            "--replay reads the corpora of --data-path, which this run did not have (blends of "
            "single splits are not in its ledger); leave it out"
        )
    data = dataclasses.replace(config.data, vocab_size=start.vocab_size)
    config = dataclasses.replace(config, data=data)
    corpora = Corpora.open(config)
    if start.cost is None:
        return strategies().planner(config, corpora, dp_size)
    return make_planner(config, corpora, cost_from_dict(start.cost), dp_size)
