"""The solver says truthfully how good an answer is, with either engine."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pulp
import pytest

from planner.solver import Problem, solve


def knapsack(items: int, *, maximise: bool = False) -> Problem:
    """A cover (or packing) problem with a constant in its objective."""
    draw = random.Random(0)
    problem = Problem("knapsack", pulp.LpMaximize if maximise else pulp.LpMinimize)
    taken = [problem.add_variable(f"x{at}", cat=pulp.LpBinary) for at in range(items)]
    problem += pulp.lpSum(draw.randint(10, 60) * x for x in taken) + 7
    for _ in range(items):
        total = pulp.lpSum(draw.randint(10, 60) * x for x in taken)
        problem += total <= 9 * items if maximise else total >= 9 * items
    return problem


@pytest.fixture(params=["highs", "cbc"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """HiGHS, and CBC as where highspy is missing."""
    if request.param == "cbc":
        monkeypatch.setitem(sys.modules, "highspy", None)
    return str(request.param)


@pytest.mark.parametrize("maximise", [False, True])
def test_an_optimum_is_proven_with_the_constant_of_the_objective(engine: str, maximise: bool) -> None:
    problem = knapsack(8, maximise=maximise)
    solution = solve(problem)
    assert solution.status == "optimal" and solution.found
    assert solution.objective == pytest.approx(solution.bound) == pytest.approx(pulp.value(problem.objective))


def test_an_infeasible_problem_has_no_objective(engine: str) -> None:
    problem = knapsack(4)
    problem += pulp.lpSum(problem.variables()) <= 0
    solution = solve(problem)
    assert solution.status == "infeasible" and solution.objective is None and solution.bound == -math.inf


@pytest.mark.slow
def test_a_time_out_is_not_called_optimal() -> None:
    solution = solve(knapsack(120), time_limit_s=0.5)
    assert solution.status in ("feasible", "unknown")
    if solution.objective is not None:
        assert solution.bound < solution.objective


def test_a_linear_problem_has_its_optimum_as_bound(engine: str) -> None:
    problem = Problem("linear", pulp.LpMinimize)
    x = problem.add_variable("x", 0.0)
    problem += 2 * x + 1
    problem += x >= 3
    solution = solve(problem)
    assert solution.status == "optimal" and solution.objective == solution.bound == pytest.approx(7.0)


def test_a_problem_lists_the_variables_of_its_rows_and_of_its_objective_whenever_they_change() -> None:
    problem = Problem("listed", pulp.LpMinimize)
    x, y, z = (problem.add_variable(name, 1.0) for name in "xyz")
    problem += x >= 2
    assert problem.variables() == [x]
    problem += x + y >= 4
    assert problem.variables() == [x, y]
    problem += x + z
    assert problem.variables() == [x, y, z] and solve(problem).objective == 3.0
    problem.setObjective(y + 2 * z)
    assert solve(problem).objective == 3.0 and y.value() == 1.0


def test_nothing_is_printed() -> None:
    """Standard output belongs to the command's one JSON object. Asked in a process of its own: HiGHS writes past Python's."""
    program = """
import pulp
from planner.solver import Problem, new_highs, solve

problem = Problem("linear", pulp.LpMinimize)
problem += 2 * problem.add_variable("x", 3.0)
assert solve(problem).bound == 6.0
new_highs().run()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
