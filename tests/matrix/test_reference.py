"""How gradients are compared."""

from __future__ import annotations

import math

import torch

from tests.matrix.reference import TOLERANCE, worst_gradient


def test_a_parameter_without_elements_has_no_gradient_to_be_off() -> None:
    """As MobileBERT's decoder where embeddings are as wide as its layers."""
    expected = {"empty": torch.zeros(0, 8), "weight": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    assert worst_gradient({"weight": expected["weight"]}, expected) == ("", 0.0)
    name, error = worst_gradient({"weight": expected["weight"] + 4 * TOLERANCE}, expected)
    assert name == "weight" and math.isclose(error, 2, rel_tol=1e-3)
    assert worst_gradient({}, expected) == ("weight", math.inf)
