"""Solving a PuLP problem and saying truthfully how good the answer is.

HiGHS through ``highspy`` where it is installed, CBC otherwise. PuLP reports the status "Optimal" when a solver stops at
its time limit, so only ``sol_status`` and the dual bound are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import pulp

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


def solve(problem: pulp.LpProblem, *, time_limit_s: float | None = None, gap: float = 0.0) -> Solution:
    """Solve in place, on one thread (equal problems get equal answers), until the relative ``gap`` is proven."""
    solver = _solver(time_limit_s, gap)
    problem.solve(solver)
    status = _STATUS[problem.sol_status]
    nothing = math.inf if problem.sense == pulp.LpMaximize else -math.inf
    if status in ("infeasible", "unbounded", "unknown"):
        return Solution(status, None, nothing)
    objective = float(pulp.value(problem.objective) or 0.0)
    bound = _bound(problem, objective, nothing, optimal=status == "optimal")
    return Solution(status, objective, bound)


def _solver(time_limit_s: float | None, gap: float) -> Any:
    highs = pulp.HiGHS(msg=False, timeLimit=time_limit_s, gapRel=gap, gapAbs=0.0, threads=1)
    if highs.available():
        return highs
    return pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_s, gapRel=gap, gapAbs=0.0, threads=1)


def _bound(problem: pulp.LpProblem, objective: float, nothing: float, *, optimal: bool) -> float:
    """The dual bound, with the objective's constant, which the solver is not given; CBC shows it only at the end."""
    information = getattr(getattr(problem, "solverModel", None), "getInfo", None)
    if information is None or not problem.isMIP():
        return objective if optimal else nothing
    sign = -1.0 if problem.sense == pulp.LpMaximize else 1.0
    return sign * float(information().mip_dual_bound) + float(problem.objective.constant)


def highs_module() -> Any:
    """highspy, or None where it is not installed."""
    try:
        import highspy
    except ImportError:
        return None
    return highspy
