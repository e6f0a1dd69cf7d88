"""What Fourier transforms hold (torch 2.13, aten/src/ATen/native/SpectralOps.cpp; ``fft_r2c_backward`` and ``fft_c2r_backward``
in torch/csrc/autograd/FunctionsManual.cpp)."""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir.body import Node
from planner.ops.call import Call
from planner.ops.layout import Layout, row_major, with_innermost

_ONE_KERNEL = frozenset({"fft_fft", "fft_ifft", "fft_ihfft", "fft_rfft", "fft_rfft2", "fft_rfftn"})
"""Of real numbers, by a kernel of their own, which keeps them (for their extents)."""
_MADE_COMPLEX = frozenset({"fft_fft2", "fft_fftn", "fft_ifft2", "fft_ifftn"})
"""Real numbers are made complex first."""
_ONE_SIDED = frozenset({"fft_ifft", "fft_ihfft", "fft_rfft", "fft_rfft2", "fft_rfftn"})
"""Half of the result says the other: the gradient is filled up, and transformed whole."""
_REAL_RESULT = frozenset({"fft_hfft", "fft_irfft", "fft_irfft2", "fft_irfftn"})
FOURIER = _ONE_KERNEL | _MADE_COMPLEX | _REAL_RESULT


def transformed(node: Node, operand: Layout, sizes: Sequence[int], dtype: str) -> Layout:
    """Where a result lies: of a transform along one dim, with that innermost (torch/_meta_registrations.py, ``_exec_fft``)."""
    dim = dict(node.arguments).get("dim")
    return with_innermost(operand, dim, sizes, dtype) if isinstance(dim, int) else row_major(sizes, dtype)


def turns_gradient(node: Node, operand: Layout) -> bool:
    """Whether the operand's gradient has its dims in another order than the operand."""
    return transformed(node, operand, operand.sizes, operand.dtype).in_order != operand.in_order


def kept_copy(call: Call) -> int | None:
    """Bytes of the copy that autograd keeps of the operand, filled up with zeros; 0 where it keeps the operand; None where
    nothing."""
    if call.operands[0].is_complex or call.node.base not in _ONE_KERNEL:
        return None
    return _resized(call) if _resized(call) > call.operands[0].size_bytes else 0


def forward_bytes(call: Call) -> int:
    """Held beside the result: a complex, a conjugate or a filled up operand."""
    own, resized = call.operands[0].size_bytes, _resized(call)
    made = 2 * resized if call.node.base in _MADE_COMPLEX and not call.operands[0].is_complex else 0
    kept = kept_copy(call)
    return made + (resized if resized > own and not kept else 0) + (own if call.node.base == "fft_hfft" else 0)


def gradient_storage(call: Call) -> int:
    """Bytes of the storage in which the operand's gradient lies: of real numbers, as large as complex ones'."""
    own, resized = call.operands[0].size_bytes, _resized(call)
    return own if call.operands[0].is_complex or resized < own else 2 * resized


def backward_bytes(call: Call) -> int:
    """Held beside that: the gradient of the filled up or cut operand; where one side says the other, the whole before it is
    transformed."""
    own, resized = call.operands[0].size_bytes, _resized(call)
    if call.operands[0].is_complex:
        return resized if resized != own else 0
    whole = 4 if call.node.base in _ONE_SIDED else 2
    return max(whole * resized - gradient_storage(call), 2 * resized if resized < own else 0)


def _resized(call: Call) -> int:
    """Bytes of the operand with as many numbers as were asked for."""
    layout, given = call.operands[0], call.arguments
    dims, lengths = given.get("dim"), given.get("n", given.get("s"))
    if lengths is None:
        return layout.size_bytes
    wanted = list(lengths) if isinstance(lengths, tuple) else [lengths]
    at = list(dims) if isinstance(dims, tuple) else [dims] if dims is not None else list(range(-len(wanted), 0))
    size = layout.size_bytes
    for place, (dim, length) in enumerate(zip(at, wanted, strict=True)):
        assert isinstance(dim, int)
        if not isinstance(length, int) or length < 0:
            continue
        last = place == len(at) - 1 and call.node.base in _REAL_RESULT
        size = size // layout.sizes[dim] * (length // 2 + 1 if last else length)
    return size
