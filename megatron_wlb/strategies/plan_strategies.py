"""``wlb plan --strategies``: strategies for a user's documents, and what each gains."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_wlb.cli.inputs import machine_title
from megatron_wlb.cli.model import Model
from megatron_wlb.cli.output import console, progress_bar, say, table_of
from megatron_wlb.cost.execution import Execution
from megatron_wlb.cost.shape import padded_vocabulary
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.errors import ConfigError
from megatron_wlb.settings.config import flag_of
from megatron_wlb.simulator.trial import Steps
from megatron_wlb.strategies.plan.propose import StrategySpace
from megatron_wlb.strategies.plan.strategy import write_strategies
from megatron_wlb.strategies.strategy_search import StrategyOutcome, StrategyStudy, study
from megatron_wlb.study import write_recipe as recipe
from megatron_wlb.study.search import Space

WORTH_SAYING = 1.005
"""A speed-up below it is none."""


def run(args: argparse.Namespace, steps: Steps, searched: Space, model: Model) -> int:
    """Proposes, simulates and shows."""
    if searched.fixed:
        given = ", ".join(flag_of(name) for name in searched.fixed)
        raise ConfigError(
            f"{given} gives all replicas one size, but --strategies searches sizes for each; leave "
            "one of them out"
        )
    if len(searched.num_micro_batches) > 1:
        given = " ".join(map(str, searched.num_micro_batches))
        raise ConfigError(
            f"--num-micro-batches {given} are several sizes of a step, but --strategies takes one; "
            "give one"
        )
    window, (windows,) = searched.window, searched.num_micro_batches
    hardware = model.config.wlb.wlb_hardware
    assert isinstance(steps.source, LengthSource)
    seed = steps.seeds[0]
    with progress_bar("simulating strategies") as progress:
        space = _space(searched, bf16=not args.fp32)
        found = study(
            space, steps.source, window=window, windows_a_step=windows, num_steps=steps.num,
            seed=seed, long_documents=steps.long_documents, progress=progress,
        )  # fmt: skip
    if args.out:
        write_strategies(args.out, [one.candidate.strategy for one in found.outcomes])
    if args.json:
        print(json.dumps(_json(found, space), indent=1))
        return 0
    out = console()
    recompute = space.recompute.granularity or "no"
    title = (
        f"{Path(args.model).stem} on {machine_title(searched.num_devices, hardware)}, "
        f"{windows * window:,} tokens a step, "
        f"{recompute} recomputation, {'fp32' if args.fp32 else 'bf16'}"
    )
    out.print(_table(found, title, seed))
    out.print(_where(found))
    say(out, _verdict(found))
    if args.out:
        flags = _flags(args.out, searched, space, model)
        out.print(f"strategies: {args.out}; train with them, {recipe.to_add(flags)} added:")
        machine = searched.num_devices, space.cluster.devices_per_node
        command = recipe.command(flags, *machine, model.environment, model.variables)
        out.print(command, soft_wrap=True)
    return 0


def _flags(out: Path, searched: Space, space: StrategySpace, model: Model) -> recipe.Flags:
    """The command line whose replicas fit memory as they are priced here."""
    own = {
        "expert_model_parallel_size": space.ep_size if space.ep_size > 1 else None,
        "expert_tensor_parallel_size": 1 if space.etp_size else None,
        **recipe.recompute_settings(space.recompute),
        "wlb_strategies": str(out),
        "wlb_hardware": model.config.wlb.wlb_hardware,
        "wlb_memory_gib": space.memory_gib,
    }
    return {
        **{flag: value for told in model.flags.values() for flag, value in told.items()},
        **model.batch_flags(searched.num_micro_batches[0], bits=space.execution.bf16),
        **recipe.flags_of(own),
    }


def _expert_ranks(searched: Space) -> int:
    """The most ranks to divide experts over, which Megatron's own groups of all ranks take too."""
    numbers = [one.num_experts for one in searched.shape.experts]
    return math.gcd(*numbers, searched.num_devices) if numbers else 1


def _space(searched: Space, *, bf16: bool) -> StrategySpace:
    """The schemes, with as little recomputation as lets some replica take a whole window."""
    tried = None
    for recompute in searched.recomputes:
        tried = StrategySpace(
            padded_vocabulary(searched.shape, searched.hardware.devices_per_node),
            Execution(recompute=recompute, bf16=bf16),
            searched.hardware,
            searched.num_devices,
            searched.memory_gib,
            searched.headroom,
            searched.max_tp,
            ep_size=_expert_ranks(searched),
            etp_size=1 if searched.shape.experts else None,
            longest=searched.window,
        )
        if any(tokens >= searched.window for _, tokens in tried.costs):
            break
    assert tried is not None
    return tried


def _table(found: StrategyStudy, title: str, seed: int) -> Table:
    equal = found.proposal.best_equal.strategy
    table = table_of(
        title,
        ("", "strategy", "documents up to", "steps", "in its steps", "alone", "exchange ms"),
        ("", "strategy"),
        f"simulated: {found.num_steps} steps, seed {seed}. Speed-ups over the best equal layout, "
        f"{equal}, with documents assigned in the same way. alone: if every step had it",
    )
    for number, one in enumerate(found.outcomes, start=1):
        strategy = one.candidate.strategy
        table.add_row(
            str(number),
            str(strategy),
            f"{strategy.max_tokens:,}",
            f"{one.num_chosen / found.num_steps:.0%}",
            f"{one.equal_us / one.chosen_us:.3f}" if one.num_chosen else "",
            f"{found.equal_us / one.alone_us:.3f}" if one.alone_us else "too short",
            f"{one.exchange_us / 1e3:,.1f}",
        )
    return table


def _where(found: StrategyStudy) -> Table:
    table = table_of(
        "Which documents go where",
        ("", "replicas", "documents", "shortest", "longest", "tokens"),
        ("", "replicas"),
    )
    for number, one in enumerate(found.outcomes, start=1):
        for use in one.uses:
            table.add_row(
                str(number), use.replicas, f"{use.num_documents:,}", f"{use.shortest:,}",
                f"{use.longest:,}", f"{use.token_share:.1%}",
            )  # fmt: skip
    return table


def _verdict(found: StrategyStudy) -> str:
    equal = found.proposal.best_equal.strategy
    if found.gain < WORTH_SAYING:
        return f"Strategies gain nothing on these documents, simulated: {equal} is as fast."
    best = found.best_alone
    alone = found.equal_us / (best.alone_us or found.equal_us)
    return (
        f"Chosen step by step, strategies do {found.gain:.3f} × the work a second of {equal}, "
        f"simulated; {best.candidate.strategy} in every step does {alone:.3f} ×."
    )


def _json(found: StrategyStudy, space: StrategySpace) -> Mapping[str, Any]:
    return {
        "simulated": True,
        "num_devices": space.cluster.num_devices,
        "devices_per_node": space.cluster.devices_per_node,
        "recompute": space.recompute.title,
        "bf16": space.execution.bf16,
        "best_equal": str(found.proposal.best_equal.strategy),
        "num_tried": found.proposal.num_tried,
        "num_steps": found.num_steps,
        "equal_ms": found.equal_us / 1e3 / found.num_steps,
        "dynamic_ms": found.dynamic_us / 1e3 / found.num_steps,
        "speedup": found.gain,
        "strategies": [_row(one, found) for one in found.outcomes],
        "schemes": {str(scheme): tokens for scheme, tokens in space.costs},
        "rejected": {str(scheme): reason for scheme, reason in space.rejected.items()},
    }


def _row(one: StrategyOutcome, found: StrategyStudy) -> dict[str, Any]:
    return {
        "strategy": str(one.candidate.strategy),
        "max_tokens": one.candidate.strategy.max_tokens,
        "num_chosen": one.num_chosen,
        "speedup_in_its_steps": one.equal_us / one.chosen_us if one.num_chosen else None,
        "speedup_alone": found.equal_us / one.alone_us if one.alone_us else None,
        "exchange_ms": one.exchange_us / 1e3,
        "documents": [asdict(use) for use in one.uses],
    }
