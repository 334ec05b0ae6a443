"""How far the package's cuts are from the best ones: small steps, solved exactly.

SlimPack finds slices by a mixed-integer programme (§4.1); the package cuts in closed form
(:mod:`megatron_wlb.planning.slicing.cut`). Here few documents run on one pipeline, and the
programme is of the whole step: where documents are cut, in which units whole ones run, how many
units each chain has, and the time of each pass on each rank under the runtime's schedule of these
chains. SCIP solves it within OR-tools. All is *simulated*, with the costs of
:mod:`_papers.one_pipeline`.

As in the package both passes run the same units, chains come heaviest first, a unit has slices of
at most one document, and cuts are multiples of some tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

from _papers.one_pipeline import BACKWARD, BOTH, FORWARD, UNLIKE_COST, Pass, Piece
from _papers.paper import K
from megatron_wlb.cost import Parallelism
from megatron_wlb.cost.schedule.messages import slice_graph
from megatron_wlb.cost.step_costs import StageCosts, StepCosts
from megatron_wlb.data.length_source import LengthSource
from megatron_wlb.plan import Document
from megatron_wlb.planning.slicing.cut import Slicer, numbers_of_units
from megatron_wlb.planning.slicing.pipeline import Pipeline
from megatron_wlb.planning.slicing.units import Cuts

GAP = 0.002
"""Share of an optimum within which a solution counts as one."""
WINDOW = 64 * K
MULTIPLE = 1024
"""Tokens that cuts are multiples of: a 64th of the window, as the package has it for short ones."""
LEAST = 8 * K
"""Shorter documents are left out: they only fill units up, and there would be many."""


@dataclass(frozen=True)
class Case:
    """Documents of some windows on one pipeline, in so many units."""

    pp_size: int
    num_windows: int
    num_units: int

    @property
    def name(self) -> str:
        return f"PP {self.pp_size}, {self.num_windows} windows, {self.num_units} units"


def documents_of(case: Case, seed: int) -> list[int]:
    """Lengths of documents from :data:`LEAST` on, as many as fill the windows, longest first."""
    stream = LengthSource.of_distribution("reference").stream(
        100, window=WINDOW, longest=WINDOW, windows_a_step=8, seed=seed, long_documents="split"
    )
    lengths: list[int] = []
    while True:
        for document in stream.next_step():
            if document.length >= LEAST:
                lengths.append(document.length)
                if sum(lengths) >= case.num_windows * WINDOW:
                    return sorted(lengths, reverse=True)


@dataclass(frozen=True)
class Step:
    """A step of units."""

    us: float
    heaviest: float
    """The heaviest unit over the mean, of both passes."""
    ends: float
    """The first and the last unit in the mean, over that of all."""
    chains: tuple[int, ...]


def package(case: Case, lengths: Sequence[int]) -> Step:
    """The package's own cuts into as many units."""
    layout = Parallelism(pp_size=case.pp_size)
    slicer = Slicer(
        Cuts(UNLIKE_COST, WINDOW, multiple=MULTIPLE),
        Pipeline(StepCosts(StageCosts.even(UNLIKE_COST, case.pp_size)), layout),
        [case.num_units] if case.num_units else numbers_of_units(case.num_windows, case.pp_size),
    )
    documents = [Document(0, at, 0, n, True, 0, at, 0) for at, n in enumerate(lengths)]
    (units,) = slicer.cut(documents, 0)
    times_us = [
        sum(BOTH.us(Piece(0, span.start, span.stop)) for span in own) for own in units.spans
    ]
    return _step(slicer.pipeline.simulated_us([units]), times_us, units.chains)


def bound_us(case: Case, lengths: Sequence[int]) -> float:
    """Less than any cuts take: the ranks' mean work, and no rank waits."""
    return sum(BOTH.us(Piece(0, 0, length)) for length in lengths) / case.pp_size


def optimum(case: Case, lengths: Sequence[int], num_units: int, best_us: float) -> tuple[Step, int]:
    """The shortest step of ``num_units``, and of how many shapes of chains.

    Each shape is solved without whole numbers first. Those whose bound is below the best step,
    which begins at ``best_us``, are solved exactly.
    """
    shapes = list(_shapes(lengths, num_units))
    bounds = sorted((_Programme(case, lengths, shape, num_units).relaxed_us(), n)
                    for n, shape in enumerate(shapes))  # fmt: skip
    best = Step(best_us, math.nan, math.nan, ())
    for least_us, number in bounds:
        if least_us >= best.us * (1 - GAP):
            break
        found = _Programme(case, lengths, shapes[number], num_units).solved(best.us)
        if found is not None and found.us < best.us:
            best = found
    return best, len(shapes)


def evenest(case: Case, lengths: Sequence[int], chains: Sequence[int]) -> Step:
    """The paper's programme: units as equal as can be, in both passes together; its step.

    The chains are given, as equal units can be had in many ways.
    """
    counts = [count for count in chains if count > 1]
    programme = _Programme(case, lengths, counts, sum(chains))
    return programme.even()


def _step(us: float, times_us: Sequence[float], chains: Sequence[int]) -> Step:
    mean_us = sum(times_us) / len(times_us)
    ends_us = (times_us[0] + times_us[-1]) / 2
    return Step(us, max(times_us) / mean_us, ends_us / mean_us, tuple(chains))


def _shapes(lengths: Sequence[int], num_units: int) -> Iterator[list[int]]:
    """Numbers of slices of the longest documents, which leave no document without a unit.

    A longer document has no fewer slices than a shorter one, and of one slice is whole.
    """

    def more(left: int, most: int, num: int) -> Iterator[list[int]]:
        yield []
        if num < len(lengths):
            longest = lengths[num] // MULTIPLE
            for count in range(2, min(left, most, longest) + 1):
                for rest in more(left - count, count, num + 1):
                    yield [count, *rest]

    yield from more(num_units, num_units, 0)


class _Programme:
    """One shape of chains: of the longest documents, ``counts`` slices each."""

    def __init__(
        self, case: Case, lengths: Sequence[int], counts: Sequence[int], num_units: int
    ) -> None:
        self._case, self._lengths = case, lengths
        self._counts = [*counts]
        chains = (*counts, *[1] * (num_units - sum(counts)))
        self._chains = chains
        self._graph = slice_graph(case.pp_size, chains)
        self._num = num_units

    def relaxed_us(self) -> float:
        solver, _ = self._made(whole=False)
        assert solver.Solve() == pywraplp.Solver.OPTIMAL
        return float(solver.Objective().Value()) * self._unit_us

    def solved(self, cutoff_us: float) -> Step | None:
        """The shortest step, or None where it is above the cutoff."""
        solver, _ = self._made(whole=True, cutoff_us=cutoff_us)
        return self._read(solver) if _solve(solver) else None

    def even(self) -> Step:
        """Of the evenest units."""
        solver, _ = self._made(whole=True, even=True)
        assert _solve(solver)
        return self._read(solver)

    def _read(self, solver: pywraplp.Solver) -> Step:
        """Replays what was found: rounding in the solver is no figure."""
        tables = {}
        for name, cost in (("forward", FORWARD), ("backward", BACKWARD)):
            tables[name] = np.array([
                sum(cost.us(piece) for piece in own) for own in self._pieces(solver)
            ])  # fmt: skip
        times_us = np.repeat(
            np.array([tables["forward"], tables["backward"]])[:, None] / self._case.pp_size,
            self._case.pp_size,
            axis=1,
        )
        us = float(self._graph.step_us(times_us, np.zeros(self._num)))
        both = (tables["forward"] + tables["backward"]).tolist()
        return _step(us, both, self._chains)

    def _pieces(self, solver: pywraplp.Solver) -> list[list[Piece]]:
        units: list[list[Piece]] = [[] for _ in range(self._num)]
        begin = 0
        for document, count in enumerate(self._counts):
            cuts = [0]
            for at in range(1, count):
                grid = [
                    stop
                    for stop in self._grid(document)
                    if solver.LookupVariable(f"cut {document} {at} {stop}").solution_value() > 0.5
                ]
                cuts += grid
            cuts.append(self._lengths[document])
            for at in range(count):
                units[begin + at].append(Piece(document, cuts[at], cuts[at + 1]))
            begin += count
        for document in range(len(self._counts), len(self._lengths)):
            for unit in range(self._num):
                chosen = solver.LookupVariable(f"whole {document} {unit}")
                if chosen.solution_value() > 0.5:
                    units[unit].append(Piece(document, 0, self._lengths[document]))
        return units

    def _grid(self, document: int) -> range:
        return range(MULTIPLE, self._lengths[document], MULTIPLE)

    @property
    def _unit_us(self) -> float:
        """Times are in this, so that the solver's numbers are about 1."""
        return bound_us(self._case, self._lengths)

    def _made(
        self, *, whole: bool, cutoff_us: float = math.inf, even: bool = False
    ) -> tuple[pywraplp.Solver, pywraplp.Variable]:
        solver = pywraplp.Solver.CreateSolver("SCIP" if whole else "GLOP")
        make = solver.BoolVar if whole else (lambda name: solver.NumVar(0, 1, name))
        unit_us = self._unit_us
        nothing = solver.Sum([])
        tokens = [nothing for _ in range(self._num)]
        times = {cost: [nothing for _ in range(self._num)] for cost in (FORWARD, BACKWARD)}
        begin = 0
        for document, count in enumerate(self._counts):
            length = self._lengths[document]
            before = (nothing, nothing, nothing)
            for at in range(count):
                after = tuple(
                    nothing + value
                    for value in (
                        length, *(_us(cost, length) / unit_us for cost in (FORWARD, BACKWARD))
                    )
                )  # fmt: skip
                if at < count - 1:
                    chosen = {s: make(f"cut {document} {at + 1} {s}") for s in self._grid(document)}
                    solver.Add(solver.Sum(list(chosen.values())) == 1)
                    after = (
                        solver.Sum([stop * one for stop, one in chosen.items()]),
                        *(
                            solver.Sum([_us(c, s) / unit_us * one for s, one in chosen.items()])
                            for c in (FORWARD, BACKWARD)
                        ),
                    )
                tokens[begin + at] += after[0] - before[0]
                for n, cost in enumerate((FORWARD, BACKWARD), 1):
                    times[cost][begin + at] += after[n] - before[n]
                solver.Add(after[0] - before[0] >= min(MULTIPLE, length))
                before = after
            begin += count
        for document in range(len(self._counts), len(self._lengths)):
            length = self._lengths[document]
            chosen_in = [make(f"whole {document} {unit}") for unit in range(self._num)]
            solver.Add(solver.Sum(chosen_in) == 1)
            for unit, one in enumerate(chosen_in):
                tokens[unit] += length * one
                for cost in (FORWARD, BACKWARD):
                    times[cost][unit] += _us(cost, length) / unit_us * one
        for unit in range(self._num):
            solver.Add(tokens[unit] <= WINDOW)
        last = solver.NumVar(0, cutoff_us / unit_us if whole else math.inf, "last")
        if even:
            for unit in range(self._num):
                solver.Add(times[FORWARD][unit] + times[BACKWARD][unit] <= last)
        else:
            self._schedule(solver, times, last)
        solver.Minimize(last)
        return solver, last

    def _schedule(
        self,
        solver: pywraplp.Solver,
        times: dict[Pass, list[pywraplp.LinearExpr]],
        last: pywraplp.Variable,
    ) -> None:
        """Each pass of each rank starts when what it waits for is done."""
        pp_size = self._case.pp_size
        nothing = np.zeros((2, pp_size, self._num)), np.zeros(self._num)
        stops: list[pywraplp.Variable] = []
        for node, wait in zip(self._graph.nodes, self._graph.waits(*nothing), strict=True):
            assert not node.is_transfer
            cost = FORWARD if node.action.kind == "F" else BACKWARD
            stop = solver.NumVar(0, math.inf, "")
            duration = times[cost][node.action.micro_batch] / pp_size
            solver.Add(stop >= duration)
            for other in (wait.first, wait.second):
                if other >= 0:
                    solver.Add(stop >= stops[other] + duration)
            stops.append(stop)
        for stop in stops:
            solver.Add(last >= stop)


def _us(cost: Pass, stop: int) -> float:
    return cost.us(Piece(0, 0, stop))


def _solve(solver: pywraplp.Solver) -> bool:
    parameters = pywraplp.MPSolverParameters()
    parameters.SetDoubleParam(pywraplp.MPSolverParameters.RELATIVE_MIP_GAP, GAP)
    return bool(solver.Solve(parameters) == pywraplp.Solver.OPTIMAL)
