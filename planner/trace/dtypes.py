"""torch's dtypes by the names that graphs have for them, and operations that take but a dtype or a shape from a tensor."""

from __future__ import annotations

import torch

CONSTANT = frozenset({
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
})
"""Operations that take a shape and a dtype from a tensor, and none of its values: no gradient goes through them."""

AS_ANOTHER = frozenset({"expand_as", "reshape_as", "type_as", "view_as"})
"""Operations that take a shape or a dtype from their second operand, and no values."""

WITHOUT_GRADIENT = frozenset({"bernoulli", "normal"})
"""Draws whose probabilities, means and deviations get a gradient of zeros."""


def name_of(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
