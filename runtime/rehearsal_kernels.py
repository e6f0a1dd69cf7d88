"""What an accelerator's kernels keep and make, on fake tensors of the CPU, whose own kernels keep more: norms and dropout as
one kernel each, attention by the flash kernel, whatever of it is dropped. Extents, dtypes and storages are theirs; values
are none.

Sources: aten/src/ATen/native/layer_norm.cpp and cuda/layer_norm_kernel.cu (``_fused_rms_norm``: the roots of each row, float32
of half precisions; ``native_layer_norm``: mean, too), Dropout.cpp (``native_dropout``: a mask of bytes),
transformers/cuda/sdp_utils.cpp (which operands the kernels take; a seed stands for what they drop).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_HALF = (torch.bfloat16, torch.float16)
_FLASH_HEAD, _ALIGNED_BYTES = 256, 16


@contextmanager
def accelerator_kernels() -> Iterator[None]:
    """Meanwhile torch.nn.functional keeps what it does on CUDA. (A mode would be gone while a backward pass recomputes.)"""
    try:
        for name, kernel in _KERNELS.items():
            setattr(F, name, kernel)
        yield
    finally:
        for name, own in _OWN.items():
            setattr(F, name, own)


def _asked(ctx: Any, at: int) -> bool:
    """Whether the backward pass under way goes on to a tensor that was given, or is for it."""
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[at][0]))
    except RuntimeError:  # Torch does not tell of a leaf that a pass is for.
        return True


class _Norm(torch.autograd.Function):
    """Of rows, with so many statistics of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: int, statistics: int) -> Tensor:
        wide = torch.float32 if x.dtype in _HALF else x.dtype
        ctx.save_for_backward(x, weight, bias, *(x.new_empty(rows, dtype=wide) for _ in range(statistics)))
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given = [x for x in ctx.saved_tensors[:3] if x is not None]
        needs = [need and _asked(ctx, at) for at, need in zip(range(len(given)), ctx.needs_input_grad, strict=False)]
        made = [x.new_empty(x.shape) if need else None for x, need in zip(given, needs, strict=True)]
        return (*made, *(None,) * (5 - len(made)))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(gradients[0])


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is not None and weight.dtype is not input.dtype:
        plain: Tensor = _OWN["rms_norm"](input, normalized_shape, weight, eps)
        return plain
    made: Tensor = _Norm.apply(input, weight, None, _rows(input, normalized_shape), 1)
    return made


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if any(value is not None and value.dtype is not input.dtype for value in (weight, bias)):
        plain: Tensor = _OWN["layer_norm"](input, normalized_shape, weight, bias, eps)
        return plain
    made: Tensor = _Norm.apply(input, weight, bias, _rows(input, normalized_shape), 2)
    return made


def _rows(x: Tensor, normalized_shape: Sequence[int]) -> int:
    return math.prod(x.shape[: x.dim() - len(normalized_shape)])


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0 < p < 1 or inplace:
        plain: Tensor = _OWN["dropout"](input, p, training, inplace)
        return plain
    made: Tensor = _Dropout.apply(input)
    return made


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **others: Any
) -> Tensor:
    """By the CPU's flash kernel, which keeps what CUDA's fused ones do, where one of these runs; else composed."""
    own, grouped = _OWN["scaled_dot_product_attention"], bool(others.get("enable_gqa"))
    if not _fuses(query, key, value, attn_mask, grouped=grouped, causal=bool(others.get("is_causal"))):
        with sdpa_kernel(SDPBackend.MATH):
            composed: Tensor = own(query, key, value, attn_mask, dropout_p, **others)
            return composed
    if attn_mask is not None and attn_mask.dim() == 3:  # The CPU's takes two dims or four.
        attn_mask = attn_mask.unsqueeze(0)
    fused: Tensor = own(query, key, value, attn_mask, 0.0, **others)
    return fused


def _fuses(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, grouped: bool, causal: bool) -> bool:
    """Whether the flash kernel or the memory-efficient one runs attention."""
    head = query.shape[-1]
    alike = query.dim() == key.dim() == value.dim() == 4 and head == key.shape[-1] == value.shape[-1]
    alike &= query.shape[0] == key.shape[0] == value.shape[0] and all(x.stride(-1) == 1 for x in (query, key, value))
    if not alike or (mask is not None and mask.requires_grad):
        return False
    heads, *others = (operand.shape[1] for operand in (query, key, value))
    square = not causal or query.shape[-2] == key.shape[-2]
    divides = len({*others}) == 1 and (heads % others[0] == 0 if grouped else heads == others[0])
    if query.dtype in _HALF and mask is None and head <= _FLASH_HEAD and square and divides:
        return True
    aligned = head * query.element_size() % _ALIGNED_BYTES == 0 and (mask is None or mask.stride(-1) == 1)
    return query.dtype in (*_HALF, torch.float32) and aligned and [heads, heads] == others


_KERNELS: Mapping[str, Callable[..., Tensor]] = {
    "dropout": _dropout, "layer_norm": _layer_norm, "rms_norm": _rms_norm, "scaled_dot_product_attention": _attention,
}
_OWN: Mapping[str, Callable[..., Tensor]] = {name: getattr(F, name) for name in _KERNELS}
