"""Autograd functions where no gradient arrives."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

Backward = Callable[[Any, Tensor], tuple[Tensor | None, ...]]


def or_none(backward: Backward) -> Backward:
    """A Function's ``backward`` that makes no gradients of none, and calls no collective for them
    (runtime/weight_part.py)."""
    @wraps(backward)
    def given(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * len(ctx.needs_input_grad) if gradient is None else backward(ctx, gradient)

    return given
