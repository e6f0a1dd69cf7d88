"""Where torch's versions differ in what a test looks at."""

from __future__ import annotations

import pytest
import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def flash_attention_keeps(dtype: str) -> None:
    """Skip the test where this torch keeps other bytes than the formulas, which are of 2.13."""
    if dtype == "float64" and VERSION < (2, 13):
        pytest.skip("before 2.13 flash attention on CPUs keeps a float64's log-sum-exp in 4 bytes")


def split_backward_holds(schedule: str) -> None:
    """Skip the test where this torch's weight part copies what came into its nodes (``_backward.py``, ``summed_grad``)."""
    if schedule in ("zbv", "interleaved-zero-bubble") and VERSION < (2, 13):
        pytest.skip("before 2.13 the weight part of a split backward pass holds copies of the gradients that come in")


def reductions_overlap(precision: str) -> None:
    """Skip the test where this torch keeps a unit's gradients until the next unit's are reduced (``_fsdp_param_group.py``)."""
    if precision in ("bf16", "fp16") and VERSION == (2, 12):
        pytest.skip("FSDP of 2.12 holds the half-precision gradients of two units while it reduces them")


def has_no_idle_buffers(model: str) -> None:
    """Skip the test where this torch's stages have receive buffers for gradients that never come."""
    if model == "frozen" and VERSION < (2, 13):
        pytest.skip("before 2.13 a stage has receive buffers for the gradients of all that it sends")


def has_derivative(operation: str) -> None:
    """Skip the test of an operation whose derivative this torch lacks."""
    if {"nextafter of a constant": (2, 13), "aminmax": (2, 12)}.get(operation, (0, 0)) > VERSION:
        pytest.skip(f"the derivative of {operation} came later")


def line_of_assert(said: str) -> tuple[str, str]:
    """What a refused assert on a number of a tensor is called, and where it is: torch before 2.13 refuses it when the model has
    run, so that its line is not known."""
    if VERSION < (2, 13):
        return "depends on tensor values: an assert on what .item\\(\\) gave", r"user_model.py:make$"
    return said, r"user_model.py:\d+$"


def knows_states(network: str) -> None:
    """Skip the test where this torch traces other shapes of the states that layers end in than they have."""
    if network.startswith("nn.LSTM") and VERSION < (2, 13):
        pytest.skip("before 2.13 a trace stacks the states of an LSTM's layers, which torch joins")
