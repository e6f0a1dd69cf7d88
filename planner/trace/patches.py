"""What is written into a part of complex numbers, by operations that torch can differentiate.

A trace has no change in place: ``spectrum[..., :modes] = product`` is a ``slice_scatter``, of which torch 2.13 has a gradient
for real numbers alone, as of ``select_scatter`` (``GRADIENT_IMPLEMENTED_FOR_COMPLEX`` in its gen_variable_type.py has neither).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _by_parts(scatter: Callable[..., Tensor]) -> Callable[..., Any]:
    """``scatter`` of complex numbers through that of their real and imaginary parts, which are views; real ones as they are."""

    def scattered(whole: Tensor, patch: Tensor, dim: int = 0, *where: int | None) -> Any:
        if not whole.is_complex():
            return NotImplemented
        written = scatter(torch.view_as_real(whole), torch.view_as_real(patch), dim % whole.dim(), *where)
        return torch.view_as_complex(written)

    return scattered


PATCHES: dict[Any, Callable[..., Any]] = {
    aten.slice_scatter.default: _by_parts(aten.slice_scatter.default),
    aten.select_scatter.default: _by_parts(aten.select_scatter.default),
    aten._conj.default: aten.conj_physical.default,  # a view that no view_as_real takes
}
"""Decompositions for ``run_decompositions``, by operation."""
