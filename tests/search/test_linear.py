"""A program that is solved again and again keeps to its time."""

from __future__ import annotations

import numpy as np
import pytest

from planner.search import linear as linear_module
from planner.search.linear import Program, Row


@pytest.mark.slow
def test_a_time_limit_is_that_of_one_solve() -> None:
    """By the solver's own clock: its simplex method counts from the first run on, its branch and bound from each."""
    draw = np.random.default_rng(0)
    columns, limit_s = np.arange(60), 0.2
    program = Program(-draw.integers(1, 50, 60).astype(float), np.zeros(60), np.full(60, 5.0), np.ones(60, dtype=bool))
    weights = draw.integers(1, 40, (40, 60)).astype(float)
    program.add([Row(-np.inf, float(row.sum() * 1.3), columns, row) for row in weights])
    spent = []
    for whole in (True, True, False, True, False):
        before = 0.0 if program._highs is None else program._highs.getRunTime()
        answer = program.solve(whole=whole, time_limit_s=limit_s)
        spent.append(program._highs.getRunTime() - before)
        assert answer.optimal == (not whole)
    assert max(spent) < 3 * limit_s  # It would be four times as long, had the clock gone on.


def test_a_simplex_method_that_goes_round_in_circles_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interior point method says the same. (Which programs make it go round is not known; here it may not take a step.)"""
    draw = np.random.default_rng(1)
    columns, answers, asked = np.arange(60), [], list[Program]()
    retry = Program._retry

    def retrying(program: Program) -> None:
        asked.append(program)
        retry(program)

    monkeypatch.setattr(Program, "_retry", retrying)
    cost, weights = -draw.integers(1, 50, 60).astype(float), draw.integers(1, 40, (40, 60)).astype(float)
    for steps in (2, 0):
        monkeypatch.setattr(linear_module, "MANY_STEPS", steps)
        program = Program(cost, np.zeros(60), np.full(60, 5.0), np.zeros(60, dtype=bool))
        program.add([Row(-np.inf, float(row.sum() * 1.3), columns, row) for row in weights])
        answers.append(program.solve(whole=False, time_limit_s=10.0))
        assert bool(asked) == (not steps)
    assert answers[0].optimal and answers[1].optimal
    assert answers[1].bound == pytest.approx(answers[0].bound, rel=1e-7)
