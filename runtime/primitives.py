"""Collectives on plain tensors, without gradients: torch's functional operators over a group named by its name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

_operators = torch.ops._c10d_functional


def _run(operator: Callable[..., Tensor], x: Tensor, *arguments: object) -> Tensor:
    """What arrives. Complex numbers travel as pairs of real ones: backends know no others."""
    sent = x.contiguous()
    arrived: Tensor = _operators.wait_tensor(operator(torch.view_as_real(sent) if x.is_complex() else sent, *arguments))
    return torch.view_as_complex(arrived) if x.is_complex() else arrived


def all_reduce(x: Tensor, operation: Literal["sum", "max"], group: str) -> Tensor:
    """``operation`` over the ranks' ``x``; a new tensor."""
    return _run(_operators.all_reduce, x, operation, group)


def all_gather(x: Tensor, dim: int, degree: int, group: str) -> Tensor:
    """The ranks' ``x`` joined along ``dim``."""
    if dim > 0 and _outermost(x, dim):
        whole = _run(_operators.all_gather_into_tensor, _from(x, dim), degree, group)
        return _with(x.shape[:dim], whole)
    whole = _run(_operators.all_gather_into_tensor, x, degree, group)
    return whole if dim == 0 else torch.cat(whole.chunk(degree, 0), dim)


def reduce_scatter(x: Tensor, dim: int, degree: int, group: str) -> Tensor:
    """The own part along ``dim`` of the sum over the ranks' ``x``."""
    if dim > 0 and _outermost(x, dim):
        part = _run(_operators.reduce_scatter_tensor, _from(x, dim), "sum", degree, group)
        return _with(x.shape[:dim], part)
    lined = x if dim == 0 else torch.cat(x.chunk(degree, dim), 0)
    return _run(_operators.reduce_scatter_tensor, lined, "sum", degree, group)


def _outermost(x: Tensor, dim: int) -> bool:
    """Whether parts along ``dim`` lie end to end in a whole: no dim outside of it has an extent (a micro-batch of one sample).
    Nothing has to be copied then."""
    return math.prod(x.shape[:dim]) == 1


def _from(x: Tensor, dim: int) -> Tensor:
    """``x`` without the dims outside of ``dim``, each of which is one."""
    return x.contiguous().view(x.shape[dim:])


def _with(outer: torch.Size, x: Tensor) -> Tensor:
    """``x`` with these dims outside: what has just arrived, which nobody else holds, so that it need not be a view (FSDP2 warns
    of a block that returns one)."""
    made: Tensor = torch.ops.aten._unsafe_view(x, [*outer, *x.shape])
    return made


def all_to_all(x: Tensor, split_dim: int, concat_dim: int, degree: int, group: str) -> Tensor:
    """Part ``i`` of ``x`` along ``split_dim`` goes to rank ``i``; what arrives is joined along ``concat_dim``."""
    ones = [1] * degree
    arrived = _run(_operators.all_to_all_single, torch.stack(x.chunk(degree, split_dim)), ones, ones, group)
    return torch.cat(arrived.unbind(0), concat_dim)


def narrow(x: Tensor, dim: int, degree: int, rank: int) -> Tensor:
    """The own one of ``degree`` equal parts of ``x`` along ``dim``; a view."""
    extent = x.size(dim) // degree
    return x.narrow(dim, rank * extent, extent)
