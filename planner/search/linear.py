"""Linear and integer programs as rows over columns, solved again and again while rows are added.

HiGHS keeps its basis between two solves (through ``highspy``). Where highspy is missing the same rows are stated in PuLP and
CBC solves them anew each time (:mod:`planner.solver`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.solver import highs_module, new_highs, run_small

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """``low <= sum of values x columns <= high``; ``lasting``: never left out again."""

    low: float
    high: float
    columns: Indices
    values: Floats
    lasting: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """``bound``: proven lower bound of the objective (infinite: infeasible; minus infinity: nothing proven). ``values`` of the
    columns, None without a solution; ``optimal``: solved to the asked gap."""

    bound: float
    objective: float
    values: Floats | None
    optimal: bool


PRECISE = 1e-9
LOOSE = 1e-6
"""A row that is met with more than this to spare is not tight."""
MANY_STEPS, LEAST_SIZE = 2, 1_000
"""After so many steps for each row and column, of so many at least, the simplex method is going round in circles."""
INFEASIBLE = Outcome(math.inf, math.inf, None, True)


@dataclass(frozen=True, eq=False)
class Corner:
    """A basis of the simplex method, of so many rows, after so many times that rows were left out."""

    basis: Any
    rows: int
    deleted: int


@dataclass
class Program:
    """Minimise ``cost`` over columns between ``low`` and ``high``; ``integer`` columns are whole where a solve asks for it.
    ``precise``: rows may be missed by :data:`PRECISE` only."""

    cost: Floats
    low: Floats
    high: Floats
    integer: NDArray[np.bool_]
    precise: bool = False
    rows: list[Row] = field(default_factory=list)
    _highs: Any = None
    _passed: int = 0
    _deleted: int = 0
    _here: Corner | None = None
    _whole: bool = False

    def add(self, rows: Sequence[Row]) -> None:
        """More constraints."""
        self.rows += rows

    def add_sum(self, columns: Indices) -> None:
        """A row of the columns' sum, to be bounded later."""
        self.add([Row(-math.inf, math.inf, columns, np.ones(len(columns)))])

    def widen(self, count: int) -> int:
        """So many columns more, none of them below zero; returns the first. (They cost nothing, and are real.)"""
        first, more = len(self.cost), np.zeros(count)
        self.cost, self.low = np.append(self.cost, more), np.append(self.low, more)
        self.high = np.append(self.high, np.full(count, math.inf))
        self.integer = np.append(self.integer, np.zeros(count, dtype=bool))
        if self._highs is not None:
            none = np.zeros(0)
            infinite = np.full(count, highs_module().kHighsInf)
            self._highs.addCols(count, more, more, infinite, 0, none.astype(np.int32), none.astype(np.int32), none)
        return first

    @property
    def corner(self) -> Corner | None:
        """Where the last solve ended; None where that is not known."""
        if self._here is None and self._highs is not None:
            self._here = Corner(self._highs.getBasis(), self._passed, self._deleted)
        return self._here

    def begin(self, corner: Corner) -> None:
        """Have the next solve begin there, unless rows that were known then are left out."""
        if corner is self._here or corner.deleted != self._deleted or self._highs is None:
            return
        basis, more = corner.basis, self._passed - corner.rows
        if more:
            highspy = highs_module()
            basis = highspy.HighsBasis()
            basis.col_status = corner.basis.col_status
            basis.row_status = [*corner.basis.row_status, *[highspy.HighsBasisStatus.kBasic] * more]
            basis.valid, basis.alien = True, False
        self._highs.setBasis(basis)
        self._here = corner

    def bound_row(self, index: int, low: float, high: float) -> None:
        """Other sides of a row."""
        row = self.rows[index]
        if (row.low, row.high) == (low, high):
            return
        self.rows[index] = Row(low, high, row.columns, row.values)
        if index < self._passed:
            self._highs.changeRowBounds(index, low, high)

    def forget(self, values: Floats, most: int, newest: int) -> list[Row]:
        """Where more than ``most`` rows need not last, leave out those of them that these values do not meet tightly, but for
        the ``newest``; says which. All rows that are bounded later must be before the first of them."""
        passing = [at for at, row in enumerate(self.rows[: self._passed]) if not row.lasting]
        if len(passing) <= most:
            return []
        loose = [
            at for at in passing[:-newest]
            if float(self.rows[at].values @ values[self.rows[at].columns]) > self.rows[at].low + LOOSE
        ]
        if loose and self._highs is not None:
            self._highs.deleteRows(len(loose), np.array(loose, dtype=np.int32))
            self._deleted, self._here = self._deleted + 1, None
        gone, rows = set(loose), self.rows
        self.rows = [row for at, row in enumerate(rows) if at not in gone]
        self._passed -= len(loose) if self._highs is not None else 0
        return [rows[at] for at in loose]

    def bound_column(self, index: int, low: float, high: float) -> None:
        """Other bounds of a column."""
        self.low[index], self.high[index] = low, high
        if self._highs is not None:
            self._highs.changeColBounds(index, low, high)

    def solve(self, *, whole: bool, time_limit_s: float, gap: float = 0.0, limit: float = math.inf) -> Outcome:
        """The best values, whole where ``whole`` asks for it, until the relative ``gap`` is proven; with real values also until
        the objective is known to be above the ``limit``."""
        highspy = highs_module()
        if highspy is None:
            from planner.search.linear_pulp import solve_rows

            return solve_rows(self, whole=whole, time_limit_s=time_limit_s, gap=gap)
        self._update(highspy, whole)
        highs, self._here = self._highs, None
        # The simplex method's clock goes on from run to run, that of branch and bound begins with each.
        highs.setOptionValue("time_limit", (0.0 if whole else highs.getRunTime()) + max(time_limit_s, 0.02))
        highs.setOptionValue("mip_rel_gap", gap)
        highs.setOptionValue("objective_bound", highspy.kHighsInf if whole or math.isinf(limit) else limit)
        kinds = highspy.HighsModelStatus
        lost = MANY_STEPS * max(LEAST_SIZE, len(self.cost) + len(self.rows))
        highs.setOptionValue("simplex_iteration_limit", highspy.kHighsIInf if whole else lost)
        if whole:
            run_small(highs)
        else:
            highs.setOptionValue("presolve", "choose")
            highs.run()
            if highs.getModelStatus() in (kinds.kUnknown, kinds.kNotset, kinds.kIterationLimit):
                self._retry()
        status, information = highs.getModelStatus(), highs.getInfo()
        if status == kinds.kInfeasible:
            return INFEASIBLE
        if status == kinds.kObjectiveBound:
            return Outcome(limit, math.inf, None, True)
        optimal = status == kinds.kOptimal
        bound = information.mip_dual_bound if whole else information.objective_function_value if optimal else -math.inf
        feasible = information.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if not feasible or not (whole or optimal):
            return Outcome(bound, math.inf, None, False)
        values = np.array(highs.getSolution().col_value)
        return Outcome(bound, information.objective_function_value, values, optimal)

    def _retry(self) -> None:
        """The simplex method lost its way in rounding errors, or goes round in circles where many rows are met at once: ask an
        interior point method, which starts anew."""
        self._highs.clearSolver()
        self._highs.setOptionValue("solver", "ipm")
        self._highs.run()
        self._highs.setOptionValue("solver", "choose")

    def _update(self, highspy: Any, whole: bool) -> None:
        """Bring HiGHS' model up to date."""
        if self._highs is None:
            tolerances = ("primal_feasibility_tolerance", "mip_feasibility_tolerance") if self.precise else ()
            self._highs = new_highs(**dict.fromkeys(tolerances, PRECISE))
            model = highspy.HighsLp()
            count = len(self.cost)
            model.num_col_, model.num_row_ = count, 0
            model.col_cost_, model.col_lower_ = self.cost, self.low
            model.col_upper_ = np.where(np.isposinf(self.high), highspy.kHighsInf, self.high)
            self._highs.passModel(model)
        fresh = self.rows[self._passed :]
        if fresh:
            sizes = [len(row.columns) for row in fresh]
            self._highs.addRows(
                len(fresh), np.array([row.low for row in fresh]), np.array([row.high for row in fresh]), sum(sizes),
                np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int32),
                np.concatenate([row.columns for row in fresh]).astype(np.int32),
                np.concatenate([row.values for row in fresh]),
            )
            self._passed = len(self.rows)
        if whole != self._whole:
            places = np.flatnonzero(self.integer).astype(np.int32)
            kind = highspy.HighsVarType.kInteger if whole else highspy.HighsVarType.kContinuous
            self._highs.changeColsIntegrality(len(places), places, np.full(len(places), kind))
            self._whole = whole
