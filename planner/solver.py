"""Solving a PuLP problem and saying truthfully how good the answer is.

HiGHS through ``highspy`` where it is installed, CBC otherwise. PuLP reports the status "Optimal" when a solver stops at
its time limit, so only ``sol_status`` and the dual bound are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pulp

Floats: TypeAlias = npt.NDArray[np.float64]

SolutionStatus = Literal["optimal", "feasible", "infeasible", "unbounded", "unknown"]

_STATUS: dict[int, SolutionStatus] = {
    pulp.LpSolutionOptimal: "optimal",
    pulp.LpSolutionIntegerFeasible: "feasible",
    pulp.LpSolutionInfeasible: "infeasible",
    pulp.LpSolutionUnbounded: "unbounded",
    pulp.LpSolutionNoSolutionFound: "unknown",
}


@dataclass(frozen=True, slots=True)
class Solution:
    """How a solve ended. The variables of the problem hold the values.

    ``objective`` is None without a solution. ``bound`` is the proven side of the optimum (a lower bound when
    minimising); where the solver proved nothing it is infinite. ``status`` is ``optimal`` only when the asked gap is
    proven.
    """

    status: SolutionStatus
    objective: float | None
    bound: float

    @property
    def found(self) -> bool:
        """Whether the variables hold a solution."""
        return self.objective is not None


class Problem(pulp.LpProblem):  # type: ignore[misc]
    """One whose variables are looked for in its rows when these have changed, not each time they are asked for."""

    def __init__(self, name: str, sense: int) -> None:
        super().__init__(name, sense)
        self._rows, self._goal, self._listed = -1, None, list[pulp.LpVariable]()

    def variables(self) -> list[pulp.LpVariable]:
        """All of them, by name."""
        if self.numConstraints() != self._rows or self.objective is not self._goal:
            self._rows, self._goal, self._listed = self.numConstraints(), self.objective, super().variables()
        return self._listed


def solve(
    problem: pulp.LpProblem, *, time_limit_s: float | None = None, gap: float = 0.0, small: bool = False
) -> Solution:
    """Solve in place, on one thread (equal problems get equal answers), until the relative ``gap`` is proven. ``small``: see
    :func:`run_small`."""
    solver = _solver(time_limit_s, gap, small=small)
    problem.solve(solver)
    status = _STATUS[problem.sol_status]
    nothing = math.inf if problem.sense == pulp.LpMaximize else -math.inf
    if status in ("infeasible", "unbounded", "unknown"):
        return Solution(status, None, nothing)
    objective = float(pulp.value(problem.objective) or 0.0)
    bound = _bound(problem, objective, nothing, optimal=status == "optimal")
    return Solution(status, objective, bound)


class _AtOnce(pulp.HiGHS):  # type: ignore[misc]
    """HiGHS, given its model as a whole: PuLP's own way, a column and a row at a time, takes as long as a small solve."""

    def __init__(self, *, small: bool, **options: object) -> None:
        super().__init__(**options)
        self.small = small

    def callSolver(self, lp: pulp.LpProblem) -> None:
        run_small(lp.solverModel) if self.small else lp.solverModel.run()

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        lp.solverModel = new_highs(mip_rel_gap=self.gapRel, mip_abs_gap=self.gapAbs)
        if self.timeLimit is not None:
            lp.solverModel.setOptionValue("time_limit", float(self.timeLimit))

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:
        highspy = highs_module()
        infinite = highspy.kHighsInf
        variables, rows = lp.variables(), list(lp.constraints.values())
        sign = -1.0 if lp.sense == pulp.LpMaximize else 1.0
        for kind in (variables, rows):
            for index, item in enumerate(kind):
                item.index = index
        lows, highs = _ends(((v.lowBound, v.upBound) for v in variables), infinite)
        model: Any = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(variables), len(rows)
        model.col_cost_ = np.array([sign * lp.objective.get(variable, 0.0) for variable in variables])
        model.col_lower_, model.col_upper_ = lows, highs
        if any(variable.cat == pulp.LpInteger for variable in variables):
            kinds = highspy.HighsVarType
            whole = [variable.cat == pulp.LpInteger for variable in variables]
            model.integrality_ = [kinds.kInteger if each else kinds.kContinuous for each in whole]
        model.row_lower_, model.row_upper_ = _ends(((row.getLb(), row.getUb()) for row in rows), infinite)
        terms = [[(variable.index, factor) for variable, factor in row.items() if factor != 0] for row in rows]
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *map(len, terms)], dtype=np.int32)
        model.a_matrix_.index_ = np.array([index for row in terms for index, _ in row], dtype=np.int32)
        model.a_matrix_.value_ = np.array([factor for row in terms for _, factor in row], dtype=np.float64)
        lp.solverModel.passModel(model)


def _ends(pairs: Iterable[tuple[float | None, float | None]], infinite: float) -> tuple[Floats, Floats]:
    """Lower and upper ends of ranges; None is no end."""
    ends = [(-infinite if low is None else low, infinite if high is None else high) for low, high in pairs]
    table = np.array(ends, dtype=np.float64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


def _solver(time_limit_s: float | None, gap: float, *, small: bool) -> Any:
    if highs_module() is None:
        return pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_s, gapRel=gap, gapAbs=0.0, threads=1)
    return _AtOnce(small=small, timeLimit=time_limit_s, gapRel=gap, gapAbs=0.0)


def _bound(problem: pulp.LpProblem, objective: float, nothing: float, *, optimal: bool) -> float:
    """The dual bound, with the objective's constant, which the solver is not given; CBC shows it only at the end."""
    information = getattr(getattr(problem, "solverModel", None), "getInfo", None)
    if information is None or not problem.isMIP():
        return objective if optimal else nothing
    sign = -1.0 if problem.sense == pulp.LpMaximize else 1.0
    return sign * float(information().mip_dual_bound) + float(problem.objective.constant)


def new_highs(**options: object) -> Any:
    """HiGHS without a model, on one thread, that prints nothing."""
    highs = _silent_highs()()
    for name, value in ({"threads": 1} | options).items():
        highs.setOptionValue(name, value)
    return highs


_HEURISTICS = tuple(f"mip_heuristic_run_{kind}" for kind in ("feasibility_jump", "rens", "root_reduced_cost"))


def run_small(highs: Any) -> None:
    """Solve a program of some hundred whole numbers as it is. Presolving it, and looking for solutions beside branch and bound,
    takes four times as long as it saves; both are left to where rounding errors end the plain way."""
    kinds = highs_module().HighsModelStatus
    for aided in (False, True):
        highs.setOptionValue("presolve", "choose" if aided else "off")
        for heuristic in _HEURISTICS:
            highs.setOptionValue(heuristic, aided)
        highs.run()
        if highs.getModelStatus() in (kinds.kOptimal, kinds.kInfeasible, kinds.kTimeLimit):
            return


@cache
def _silent_highs() -> Any:
    class Silent(highs_module().Highs):  # type: ignore[misc]
        def enableCallbacks(self) -> None:
            """The constructor's last step: HiGHS 1.16 greets on standard output here, before any option could be set."""
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    return Silent


def highs_module() -> Any:
    """highspy, or None where it is not installed."""
    try:
        import highspy
    except ImportError:
        return None
    return highspy
