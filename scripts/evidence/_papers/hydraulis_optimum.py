"""How far from the optimum Hydraulis's two assignments are, the paper's ways and ours.

Equation 3 says which replica runs which documents, Equation 1 which of these a micro-batch has.
OR-tools' CP-SAT solves both, offline. Beside them: Algorithm 1 of Appendix D, which is 100 random
orders of which the best is kept, and the package's own two stages
(:mod:`megatron_wlb.planning.balance.dispatch`, :mod:`megatron_wlb.planning.balance.assign`).
Objectives are the paper's; times of steps are *simulated*; those of solvers are *measured*.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from _papers.hydraulis import Case, printed_layout, proposed, space_of, steps_of
from _papers.paper import Effort
from megatron_wlb.errors import ConfigError
from megatron_wlb.planning.balance.assign import bins_of, pack, replica_us
from megatron_wlb.planning.balance.dispatch import Numbers, StepDocuments, dispatch
from megatron_wlb.planning.balance.replica_costs import ReplicaCosts, Scheme
from megatron_wlb.strategies.plan.assigner import Candidate, assign

TRIALS = 100
"""Random orders of Algorithm 1 (Appendix D, footnote)."""
GAP = 0.001
"""Share of an optimum within which a solution counts as one."""
LIMIT = 5.0
"""Deterministic time of a search, about a second of one core each."""
UNITS = 1_000_000
"""Times are rounded to this part of the longest sum, because the solver counts in integers."""


def estimates_us(step: StepDocuments, candidate: Candidate, documents: Numbers) -> list[float]:
    """Equation 2 of each replica."""
    found = [0.0] * len(documents)
    for costs, members in candidate.groups:
        us = step.us(costs)
        for number in members:
            own = documents[number]
            if own:
                found[number] = float(us[own].sum() + costs.warm_up * us[own].max())
    return found


def trials(
    step: StepDocuments, candidate: Candidate, seed: int, num_trials: int = TRIALS
) -> Numbers:
    """Algorithm 1 as printed: each document of a random order goes where the slowest replica is
    least slow after it, the first of equal ones.
    """
    random = np.random.default_rng(seed)
    groups = {n: costs for costs, members in candidate.groups for n in members}
    us = np.array([step.us(groups[n]) for n in range(len(groups))])
    warm_up = np.array([groups[n].warm_up for n in range(len(groups))])
    best_us, best = math.inf, np.zeros(0, dtype=np.int64)
    for _ in range(num_trials):
        sums_us, longest_us = np.zeros(len(us)), np.zeros(len(us))
        chosen = np.zeros(len(step.sizes), dtype=np.int64)
        for at in random.permutation(len(step.sizes)):
            loads_us = sums_us + warm_up * longest_us
            # The slowest of the others: the slowest of all, or the second where it is that one.
            slowest = int(loads_us.argmax())
            second_us = np.delete(loads_us, slowest).max(initial=0.0)
            others_us = np.where(np.arange(len(us)) == slowest, second_us, loads_us[slowest])
            able = np.isfinite(us[:, at])
            own_us = np.where(able, us[:, at], 0.0)
            new_us = sums_us + own_us + warm_up * np.maximum(longest_us, own_us)
            to = int(np.where(able, np.maximum(new_us, others_us), math.inf).argmin())
            chosen[at] = to
            sums_us[to] += us[to, at]
            longest_us[to] = max(longest_us[to], us[to, at])
        most_us = float((sums_us + warm_up * longest_us).max())
        if most_us < best_us:
            best_us, best = most_us, chosen
    return [np.flatnonzero(best == number).tolist() for number in range(len(us))]


@dataclass(frozen=True)
class Solved:
    """What a search found, and the objective that no solution is below."""

    documents: Numbers
    us: float
    bound_us: float


def ideal_dispatch(
    step: StepDocuments, candidate: Candidate, hint: Numbers, limit: float = LIMIT
) -> Solved:
    """Equation 3: the slowest replica by Equation 2 is as fast as can be."""
    model, unit_us = cp_model.CpModel(), _unit_us(step, candidate)
    # Replicas that are alike may change places: the longest document is on the first, and so on.
    hint = list(hint)
    for _, members in candidate.groups:
        own_hints = sorted(
            (hint[number] for number in members), key=lambda own: min(own, default=len(step.sizes))
        )
        for number, each in zip(members, own_hints, strict=True):
            hint[number] = each
    most_us = max(estimates_us(step, candidate, hint))
    most = model.new_int_var(0, math.ceil(most_us / unit_us), "slowest")
    model.add_hint(most, math.ceil(most_us / unit_us))
    given = {document: number for number, own in enumerate(hint) for document in own}
    chosen: list[dict[int, cp_model.IntVar]] = [{} for _ in step.sizes]
    for costs, members in candidate.groups:
        units = [_units(us, unit_us) for us in step.us(costs).tolist()]
        longest = [step.first(costs), *range(step.first(costs) + 1, len(units))]
        before: dict[int, cp_model.IntVar] = {}
        for number in members:
            own = {at: model.new_bool_var(f"{at} on {number}") for at in longest}
            for at, one in own.items():
                chosen[at][number] = one
                model.add_hint(one, given[at] == number)
            load = sum(units[at] * one for at, one in own.items())
            if costs.warm_up:
                extra = model.new_int_var(0, units[longest[0]], "")
                model.add_hint(extra, max((units[at] for at in hint[number]), default=0))
                for at, one in own.items():
                    model.add(extra >= units[at] * one)
                assert costs.warm_up == int(costs.warm_up)
                load += int(costs.warm_up) * extra
            model.add(load <= most)
            for at in longest if before else ():
                model.add(sum(before[n] for n in range(longest[0], at)) >= own[at])
            before = own
    for own in chosen:
        model.add_exactly_one(own.values())
    model.minimize(most)
    solver = _solved(model, limit)
    documents: Numbers = [[] for _ in hint]
    for at, own in enumerate(chosen):
        documents[next(n for n, one in own.items() if solver.boolean_value(one))].append(at)
    if max(estimates_us(step, candidate, documents)) > most_us:  # Rounding, or no better one.
        documents = hint
    us = max(estimates_us(step, candidate, documents))
    return Solved(documents, us, min(us, solver.best_objective_bound * unit_us))


def equation_1_us(step: StepDocuments, costs: ReplicaCosts, bins: Numbers) -> float:
    """Equation 1's objective: the heaviest micro-batch, as often as the pipeline runs one."""
    us = step.us(costs)
    return max(float(us[own].sum()) for own in bins) * (costs.warm_up + len(bins))


def ideal_packing(
    step: StepDocuments, costs: ReplicaCosts, documents: list[int], limit: float = LIMIT
) -> tuple[Solved, Solved]:
    """Equation 1 with the best number of micro-batches: by LPT, and by the solver from there on.

    Numbers are Appendix C's. One whose bound is above the best objective is not solved.
    """
    us, lengths = step.us(costs)[documents], step.lengths[documents]
    total_us, longest_us = float(us.sum()), float(us.max())
    num_tokens = int(lengths.sum())
    least = max(1, -(-num_tokens // costs.max_tokens))
    most = max(least, min(len(documents), num_tokens // costs.least_tokens))
    numbers = range(least, most + 1)
    by_lpt = {number: bins_of(step, costs, documents, number) for number in numbers}
    bounds_us = {
        number: max(longest_us, total_us / number) * (costs.warm_up + number) for number in numbers
    }
    lpt = min(by_lpt.values(), key=lambda bins: equation_1_us(step, costs, bins))
    lpt_us = equation_1_us(step, costs, lpt)
    best, best_us = lpt, lpt_us
    open_us = [math.inf]
    for number in sorted(numbers, key=bounds_us.__getitem__):
        if bounds_us[number] >= best_us * (1 - GAP):
            open_us.append(bounds_us[number])
            continue
        found = _ideal_bins(step, costs, documents, by_lpt[number], limit)
        open_us.append(found.bound_us)
        if found.us < best_us:
            best, best_us = found.documents, found.us
    return (
        Solved(lpt, lpt_us, min(lpt_us, *open_us)),
        Solved(best, best_us, min(best_us, *open_us)),
    )


def _ideal_bins(
    step: StepDocuments, costs: ReplicaCosts, documents: list[int], hint: Numbers, limit: float
) -> Solved:
    """Equation 1 for one number of micro-batches."""
    us = step.us(costs)
    turns, model = costs.warm_up + len(hint), cp_model.CpModel()
    unit_us = float(us[documents].sum()) / UNITS
    hint_us = equation_1_us(step, costs, hint)
    most = model.new_int_var(0, math.ceil(hint_us / turns / unit_us) + len(documents), "heaviest")
    model.add_hint(most, math.ceil(hint_us / turns / unit_us))
    given = {document: number for number, own in enumerate(hint) for document in own}
    of = {at: [model.new_bool_var(f"{at} in {n}") for n in range(len(hint))] for at in documents}
    for at, row in of.items():
        model.add_exactly_one(row)
        for number, one in enumerate(row):
            model.add_hint(one, given[at] == number)
    for number in range(len(hint)):
        model.add(sum(_units(us[at], unit_us) * of[at][number] for at in documents) <= most)
        model.add(sum(step.sizes[at] * of[at][number] for at in documents) <= costs.max_tokens)
    # Micro-batches may change places: the longest document is in the first.
    model.add(of[documents[0]][given[documents[0]]] == 1)
    model.minimize(most)
    solver = _solved(model, limit)
    bins: Numbers = [[] for _ in hint]
    for at, row in of.items():
        bins[[solver.boolean_value(one) for one in row].index(True)].append(at)
    bins = [own for own in bins if own] if len(hint) > len(documents) else bins
    found_us = equation_1_us(step, costs, bins)
    if found_us > hint_us:
        bins, found_us = hint, hint_us
    bound_us = solver.best_objective_bound * unit_us * turns
    return Solved(bins, found_us, min(found_us, bound_us))


def _units(us: float, unit_us: float) -> int:
    """Rounded down, so that the bound holds."""
    return int(us / unit_us) if math.isfinite(us) else 0


def _unit_us(step: StepDocuments, candidate: Candidate) -> float:
    times = (step.us(costs) for costs, _ in candidate.groups)
    return max(float(us[np.isfinite(us)].sum()) for us in times) / UNITS


def _solved(model: cp_model.CpModel, limit: float) -> cp_model.CpSolver:
    """Searched by one worker in deterministic time, so that each machine finds the same."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.relative_gap_limit = GAP
    solver.parameters.max_deterministic_time = limit
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    return solver


@dataclass(frozen=True)
class Dispatched:
    """One step, dispatched in a way."""

    estimate_us: float
    """The slowest replica, by Equation 2."""
    step_us: float
    """The slowest replica, simulated, packed by the package."""
    seconds: float
    """CPU time of dispatching, measured."""


@dataclass(frozen=True)
class Step:
    """One step in all ways."""

    ours: Dispatched
    trials: Dispatched
    ideal: Dispatched
    bound_us: float
    """What Equation 3 is not below."""
    lpt_us: float
    """Equation 1 of the slowest replica of the ideal dispatch, packed by LPT."""
    packed_us: float
    """The same by the solver."""
    packed_bound_us: float
    own_packing_us: float
    """The replica simulated, packed by the package; and by the solver with its own number of
    micro-batches, and with the package's."""
    ideal_packing_us: float
    same_number_us: float
    packing_s: float
    """CPU time of the solver, measured."""


@dataclass(frozen=True)
class Setting:
    """A case and a strategy: a layout of equal replicas, or one that is chosen step by step."""

    case: Case
    layout: str
    """``Table 3``, a scheme, ``chosen``, or ``unlike``: chosen of those of several schemes."""

    def candidate(self, step: StepDocuments, hardware: str) -> Candidate:
        space = space_of(self.case, hardware)
        if self.layout == "Table 3":
            return printed_layout(self.case, hardware)
        if self.layout not in ("chosen", "unlike"):
            return space.equal(space.price(Scheme.parse(self.layout)))
        least = 2 if self.layout == "unlike" else 1
        some = [c for c in proposed(self.case, hardware).candidates if len(c.groups) >= least]
        found = [a for c in some if (a := assign(step, c))]
        if not found:
            raise ConfigError(
                f"{self.layout}: none of the strategies for {self.case} takes {step.longest} tokens"
            )
        return min(found, key=lambda one: one.step_us).candidate


def compared(setting: Setting, effort: Effort, limit: float = LIMIT) -> list[list[Step]]:
    """Steps in all ways, a list for each seed."""
    return [
        [
            one_step(StepDocuments([d.length for d in step]), setting, effort.hardware, seed, limit)
            for step in steps_of(setting.case, effort.steps, seed)
        ]
        for seed in effort.seeds
    ]


def one_step(
    step: StepDocuments, setting: Setting, hardware: str, seed: int, limit: float = LIMIT
) -> Step:
    candidate = setting.candidate(step, hardware)
    started_s = time.process_time()
    own = dispatch(step, candidate.groups, math.inf)
    assert own is not None
    own_s = time.process_time() - started_s
    random = trials(step, candidate, seed)
    random_s = time.process_time() - started_s - own_s
    hint = min((own, random), key=lambda each: max(estimates_us(step, candidate, each)))
    ideal = ideal_dispatch(step, candidate, hint, limit)
    ideal_s = time.process_time() - started_s - own_s - random_s
    ours, tried, best = (
        Dispatched(
            max(estimates_us(step, candidate, each)), _step_us(step, candidate, each), seconds
        )
        for each, seconds in ((own, own_s), (random, random_s), (ideal.documents, ideal_s))
    )
    estimates = estimates_us(step, candidate, ideal.documents)
    slowest = int(np.argmax(estimates))
    ((costs, _),) = [pair for pair in candidate.groups if slowest in pair[1]]
    documents = sorted(ideal.documents[slowest])
    started_s = time.process_time()
    lpt, packed = ideal_packing(step, costs, documents, limit)
    packing_s = time.process_time() - started_s
    (ours_packed,) = pack(step, costs, [documents], 0.0)
    same = _ideal_bins(step, costs, documents, ours_packed.bins, limit)
    solved_us, same_us = (
        replica_us(step, costs, [(0, _in_order(step, costs, bins))])[0]
        for bins in (packed.documents, same.documents)
    )
    return Step(
        ours, tried, best, ideal.bound_us, lpt.us, packed.us, packed.bound_us, ours_packed.us,
        solved_us, same_us, packing_s,
    )  # fmt: skip


def _in_order(step: StepDocuments, costs: ReplicaCosts, bins: Numbers) -> Numbers:
    """The running order of the package: long ones between short ones."""
    us = step.us(costs)
    order = sorted(range(len(bins)), key=lambda at: (float(us[bins[at]].sum()), at))
    return [bins[at] for at in (*order[::2], *order[1::2][::-1])]


def _step_us(step: StepDocuments, candidate: Candidate, documents: Sequence[list[int]]) -> float:
    """The slowest replica, simulated, each packed by the package, without the exchange."""
    slowest_us = 0.0
    for costs, members in candidate.groups:
        busy = [sorted(documents[number]) for number in members if documents[number]]
        if busy:
            slowest_us = max(slowest_us, *(own.us for own in pack(step, costs, busy, 0.0)), 0.0)
    return slowest_us
