"""Parameters of one class are expected to be alike."""

from __future__ import annotations

import numpy as np
import pytest

from planner.validate.descent import Line, Problem, model_optimum
from planner.validate.parameters import Parameter
from planner.validate.prior import covariance


def _traffic(engine: str) -> Parameter:
    return Parameter("engine", engine, "pointwise_traffic", 1.0, 0.5, 0.1, 4.0)


def _gemm(chip: str, field: str = "gemm") -> Parameter:
    return Parameter("chip", chip, field, 0.7, 0.2, 0.2, 0.95)


FOUND = (
    _traffic("torchtitan"), _traffic("xla"), _traffic("fsdp"), _gemm("hopper"), _gemm("hopper-500w"), _gemm("ampere"),
    _gemm("hopper", "gemm_float8"),
)  # fmt: skip


def test_a_covariance_has_the_spreads_and_is_positive() -> None:
    matrix = covariance(FOUND)
    assert np.diag(matrix) == pytest.approx([item.spread**2 for item in FOUND])
    assert np.linalg.eigvalsh(matrix).min() > 0
    assert np.allclose(matrix, matrix.T)


def test_what_is_alike_varies_together() -> None:
    matrix = covariance(FOUND)
    compiled, eager, chip = matrix[0, 1], matrix[0, 2], matrix[0, 3]
    assert compiled > eager > chip == 0
    assert matrix[3, 4] > matrix[3, 5] > 0 and matrix[3, 6] > 0


def test_what_no_run_moves_lies_where_its_class_was_fitted_to() -> None:
    """Two compiled engines: runs of one want twice the traffic; the other, without runs, is drawn along, an eager one less."""
    found = FOUND[:3]
    slopes = np.array([[1.0, 0.0, 0.0]] * 20)
    line = Line(np.zeros(3), np.full(20, -np.log(2.0)), slopes, 0.0)
    point = model_optimum(Problem((), found, np.ones(20)), line)
    assert point[0] == pytest.approx(np.log(2.0), abs=0.05)
    assert point[1] == pytest.approx(0.6 * point[0], abs=0.01) and point[2] == pytest.approx(0.3 * point[0], abs=0.01)
