"""What is expected of a parameter before any run, and of one that no run tells anything of, given those of its like.

The logarithm of a parameter over its expected value is a sum of independent parts: one that all subjects share in the same
field, one that its class shares, one that the products of one chip share, and its own. Their variances add up to the square of
its spread. A parameter that no run moves then lies where its like were fitted to, and one that few runs move is drawn there
(partial pooling: Gelman and Hill 2007, chapter 12).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import engine
from planner.validate.parameters import MATMULS, Parameter

SHARED, CLASS, SUBJECT = 0.3, 0.3, 0.2
"""Shares of a variance: of all subjects, of a class, of the products of one chip. The rest is a parameter's own."""


def covariance(found: Sequence[Parameter]) -> NDArray[np.float64]:
    """Of the logarithms of the parameters over what is expected of them."""
    result = np.zeros((len(found), len(found)))
    for row, first in enumerate(found):
        for column, second in enumerate(found):
            result[row, column] = first.spread * second.spread * _correlation(first, second)
    return result


def _correlation(first: Parameter, second: Parameter) -> float:
    if first == second:
        return 1.0
    alike = first.kind == second.kind and first.field == second.field and first.kind in ("engine", "chip", "clock", "link")
    products = first.subject == second.subject and first.field in MATMULS and second.field in MATMULS
    return SHARED * alike + CLASS * (alike and class_of(first) == class_of(second)) + SUBJECT * products


def class_of(parameter: Parameter) -> str:
    """Engines by what they fuse, chips by their generation."""
    if parameter.kind == "engine":
        return engine(parameter.subject.partition("+")[0]).keeps
    return parameter.subject.partition("-")[0]
