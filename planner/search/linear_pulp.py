"""A program's rows stated in PuLP, for where highspy is missing: CBC solves them anew each time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pulp

from planner.solver import Problem, solve

if TYPE_CHECKING:
    from planner.search.linear import Outcome, Program


def solve_rows(program: Program, *, whole: bool, time_limit_s: float, gap: float) -> Outcome:
    """As :meth:`Program.solve`. Without a proof the bound is minus infinity: CBC tells its own at the end only."""
    from planner.search.linear import INFEASIBLE, Outcome

    problem = Problem("counts", pulp.LpMinimize)
    columns = [
        problem.add_variable(
            f"c{at}", _side(low), _side(high), pulp.LpInteger if whole and integer else pulp.LpContinuous
        )
        for at, (low, high, integer) in enumerate(zip(program.low, program.high, program.integer, strict=True))
    ]
    problem += pulp.LpAffineExpression([(columns[at], float(program.cost[at])) for at in np.flatnonzero(program.cost)])
    for row in program.rows:
        terms = pulp.LpAffineExpression(
            [(columns[at], float(value)) for at, value in zip(row.columns, row.values, strict=True)]
        )
        if row.low == row.high:
            problem += terms == row.low
            continue
        if math.isfinite(row.low):
            problem += terms >= row.low
        if math.isfinite(row.high):
            problem += terms <= row.high
    answer = solve(problem, time_limit_s=max(time_limit_s, 0.1), gap=gap)
    if answer.status == "infeasible":
        return INFEASIBLE
    if answer.objective is None:
        return Outcome(-math.inf, math.inf, None, False)
    values = np.array([column.value() or 0.0 for column in columns])
    optimal = answer.status == "optimal"
    # Within the asked gap the answer may be above the optimum.
    bound = answer.bound * (1 - gap) if optimal and whole else answer.bound
    return Outcome(bound, answer.objective, values, optimal)


def _side(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
