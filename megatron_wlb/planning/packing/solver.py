"""The paper's baseline in its best form: fixed windows, packed by a solver (§3.2, Equation 1)."""

from __future__ import annotations

import logging
import math
import time
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megatron_wlb.cost import CostModel
from megatron_wlb.errors import ConfigError, PackingError
from megatron_wlb.plan import Document
from megatron_wlb.planning.packing.base import Limits
from megatron_wlb.planning.packing.fixed import FixedPacker
from megatron_wlb.planning.packing.settings import SOLVER_LIMIT, PackingSettings

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver

logger = logging.getLogger(__name__)

UNITS = 100_000
"""Work is rounded to this part of a mean window's, because the solver counts in integers."""
PROGRESS_S = 1.0
"""The least seconds between two progress lines."""


class FixedSolverPacker(FixedPacker):
    """The best fixed windows that OR-tools' CP-SAT finds, over ``num_batches`` global batches.

    Minimises the sum, over the steps, of the work of each one's heaviest window. For one global
    batch this is Equation 1 (``x_ij``: piece i is in window j; each piece in one window; no window
    above its length). For several, Equation 1 would leave all windows open but the heaviest one.
    The search begins with the windows of ``fixed-greedy``, moves its pieces, and cuts no further.

    ``limit`` bounds the search in CP-SAT's *deterministic time*, about a second of one core each: a
    wall-clock limit would end the search at another plan on every rank. For the same reason one
    worker with a fixed seed searches.

    Departure from Equation 1: minimised is the predicted time of the documents, not Σ d² alone.

    Raises :class:`ConfigError` as :class:`FixedGreedyPacker` does, for a ``limit`` that is not
    positive, or if OR-tools is not installed; and, from :meth:`pack`, :class:`PackingError` if no
    solution was found within the limit.
    """

    name: ClassVar[str] = "fixed-solver"
    reads = frozenset({"fixed_batches", "solver_limit"})
    tried = ()  # it takes seconds a step

    def __init__(
        self,
        limits: Limits,
        cost: CostModel,
        num_batches: int = 1,
        limit: float = SOLVER_LIMIT,
    ) -> None:
        super().__init__(limits, cost, num_batches)
        if not 0 < limit < math.inf:
            raise ConfigError(f"solver_limit is {limit}; give a positive number of seconds")
        self.limit = limit
        _cp_model()  # Missing OR-tools is an error now, not at the first step.

    @classmethod
    def make(cls, settings: PackingSettings, limits: Limits, cost: CostModel) -> FixedSolverPacker:
        return cls(limits, cost, settings.fixed_batches, settings.solver_limit)

    def _repack(self, windows: list[list[Document]], step: int) -> list[list[list[Document]]]:
        size = self.limits.num_micro_batches
        # Long pieces first: from there the search gets further within the same limit.
        windows = [sorted(w, key=lambda piece: -piece.length) for w in self._balance(windows)]
        hint = [number for number, window in enumerate(windows) for _ in window]
        pieces = [*chain(*windows)]
        lengths = [piece.length for piece in pieces]
        work_us = self._costs_us.of(np.array(lengths, dtype=np.int64))
        unit_us = float(work_us.sum()) / len(windows) / UNITS or 1.0
        work: list[int] = np.rint(work_us / unit_us).astype(np.int64).tolist()
        model = _cp_model().CpModel()
        in_window = [
            [model.new_bool_var(f"piece {i} in window {j}") for j in range(len(windows))]
            for i in range(len(pieces))
        ]
        for row, number in zip(in_window, hint, strict=True):
            model.add_exactly_one(row)
            for j, chosen in enumerate(row):
                model.add_hint(chosen, j == number)
        loads = [0] * len(windows)
        for number, piece_work in zip(hint, work, strict=True):
            loads[number] += piece_work
        heaviest = []
        for first in range(0, len(windows), size):
            heaviest.append(model.new_int_var(0, sum(work), f"heaviest of {first}"))
            model.add_hint(heaviest[-1], max(loads[first : first + size]))
            for j in range(first, first + size):
                column = [row[j] for row in in_window]
                model.add(_dot(column, lengths) <= self.limits.micro_batch_tokens)
                model.add(_dot(column, work) <= heaviest[-1])
        model.minimize(sum(heaviest))
        solver = self._solve(model, step, sum(work) / size)
        solved: list[list[Document]] = [[] for _ in windows]
        for piece, row in zip(pieces, in_window, strict=True):
            solved[[solver.boolean_value(chosen) for chosen in row].index(True)].append(piece)
        return [solved[first : first + size] for first in range(0, len(windows), size)]

    def _solve(self, model: CpModel, step: int, mean_work: float) -> CpSolver:
        cp_model = _cp_model()

        class Progress(cp_model.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
            logged_s = -PROGRESS_S

            def on_solution_callback(self) -> None:
                if self.wall_time - self.logged_s >= PROGRESS_S:
                    self.logged_s = self.wall_time
                    logger.info(
                        "step %d: solver at imbalance %.3f, at best %.3f, after %.0f s",
                        step,
                        self.objective_value / (mean_work or 1),
                        self.best_objective_bound / (mean_work or 1),
                        self.wall_time,
                    )

        solver: CpSolver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.symmetry_level = 0  # Breaking symmetries would break the first plan.
        solver.parameters.max_deterministic_time = self.limit
        start_s = time.monotonic()
        status = solver.solve(model, Progress())
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            raise PackingError(
                f"fixed-solver found no plan for step {step} within solver_limit {self.limit} "
                f"(deterministic seconds; {solver.status_name(status)}); raise it or use "
                "fixed-greedy"
            )
        logger.info(
            "step %d: solver ends at imbalance %.3f (%s) after %.1f s",
            step,
            solver.objective_value / (mean_work or 1),
            solver.status_name(status).lower(),
            time.monotonic() - start_s,
        )
        return solver


def _dot(variables: list[Any], factors: list[int]) -> Any:
    return _cp_model().LinearExpr.weighted_sum(variables, factors)


def _cp_model() -> Any:
    """OR-tools' module, imported when first needed: it is an optional dependency."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ConfigError(
            f"fixed-solver needs OR-tools ({error}); install it with "
            "`pip install 'megatron-wlb[solver]'`"
        ) from None
    return cp_model
