"""A program that is solved again and again keeps to its time."""

from __future__ import annotations

import numpy as np

from planner.search.linear import Program, Row


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
