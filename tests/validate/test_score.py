"""Families weigh the same; what fits is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.ir.plan import Breakdown, Prediction
from planner.validate.predict import RowPrediction
from planner.validate.score import score
from tests.validate import tables


class _Prepared:
    """Stands for a prepared row: a row and an engine's name."""

    def __init__(self, **changes: str) -> None:
        self.row = tables.row(**changes)
        self.job = type("Job", (), {"engine": self.row.engine})


def predicted(step_s: float, *, memory: int = 1, **changes: str) -> RowPrediction:
    """A row, and that a step of it takes ``step_s``."""
    prediction = Prediction(step_s, 0.0, 0.0, 0.0, memory, 2, Breakdown(*[0.0] * 9), ())
    prepared: Any = _Prepared(**changes)
    return RowPrediction(prepared, prediction)


def test_families_weigh_the_same_whatever_their_rows() -> None:
    found = [
        predicted(0.011, row_id="a", tp="1"), predicted(0.009, row_id="b", tp="2"), predicted(0.010, row_id="c", tp="4"),
        predicted(0.016, row_id="d", family="other", engine="megatron", tp="8"),
    ]
    result = score(found, [item.row for item in found])
    assert result.rows == 4
    assert abs(result.families["toys"].mean - 0.2 / 3) < 1e-12
    assert abs(result.families["other"].mean - 0.6) < 1e-12
    assert abs(result.mean - (0.2 / 3 + 0.6) / 2) < 1e-12
    assert abs(result.middle - 0.1) < 1e-12
    assert (result.engines["megatron"].worst_row, result.engines["megatron"].rows) == ("d", 1)
    assert abs(result.chips["A100-SXM-80GB"].mean - result.mean) < 1e-12


def test_a_repeat_is_counted_as_one_and_supersedes_only_where_it_is_predicted() -> None:
    old, new = predicted(0.011, row_id="old"), predicted(0.012, row_id="new")
    odd = tables.row(row_id="odd", notes="what cannot be predicted")
    result = score([old, new], [old.row, new.row, odd])
    assert (result.rows, result.repeats, result.families["toys"].worst_row) == (1, ("old",), "new")
    assert score([old, new], [old.row, tables.row(row_id="another", tp="2"), new.row]).repeats == ("old",)


def test_unscored_rows_count_for_memory_alone() -> None:
    unscored = predicted(9.0, row_id="x", trust="C", peak_mem_gib="1", memory=2**29)
    result = score([unscored], [unscored.row])
    assert (result.rows, result.mean, result.middle) == (0, None, None)
    assert result.memory["torch-eager"].bias == -0.5


def test_runs_that_ran_should_fit_and_those_that_ran_out_of_memory_should_not() -> None:
    ran = [predicted(1.0, row_id="good"), predicted(1.0, row_id="bad", memory=3, tp="2")]
    failed = [predicted(1.0, row_id="grew", memory=3), predicted(1.0, row_id="slipped", tp="2")]
    fits = score(ran, [item.row for item in ran], failed).fits
    assert (fits.ran_fitting, fits.ran_not_fitting, fits.failed_fitting, fits.failed_not_fitting) == (1, 1, 1, 1)
    assert fits.wrong == ("bad", "slipped")


@pytest.mark.slow
def test_a_row_that_was_not_timed_has_no_error() -> None:
    item = predicted(1.0, step_time_s="")
    assert item.error is None and replace(item).step_s == 1.0
