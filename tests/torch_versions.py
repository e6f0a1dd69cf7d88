"""Where torch's versions differ in what a test looks at."""

from __future__ import annotations

import pytest
import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def flash_attention_keeps(dtype: str) -> None:
    """Skip the test where this torch keeps other bytes than the formulas, which are of 2.13."""
    if dtype == "float64" and VERSION < (2, 13):
        pytest.skip("before 2.13 flash attention on CPUs keeps a float64's log-sum-exp in 4 bytes")


def has_derivative(operation: str) -> None:
    """Skip the test of an operation whose derivative this torch lacks."""
    if {"nextafter of a constant": (2, 13), "aminmax": (2, 12)}.get(operation, (0, 0)) > VERSION:
        pytest.skip(f"the derivative of {operation} came later")
