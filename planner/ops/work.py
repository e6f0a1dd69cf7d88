"""What one operation costs: FLOPs, bytes moved and the shape of its matrix product, of one rank's local tensors.

``flops`` counts a multiply and an add each: 2mnk for a product, the whole of [queries, keys] for attention, causal or
not: the model FLOPs convention (Chowdhery et al. 2022, PaLM, appendix B: 12 L H Q T a token). What a causal kernel
skips shows in its time, where :class:`AttentionShape` says that it is causal. Everything that is neither is
memory-bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.ir.body import Node
from planner.ir.types import DTYPE_BYTES, TensorType
from planner.ops.families import (
    ATTENTION,
    CONVOLUTIONS,
    CREATIONS,
    GEMMS,
    GROUPED_PRODUCT,
    RECURRENT,
    TRANSPOSED_CONVOLUTIONS,
    VIEW_FAMILY,
)

WorkKind = Literal["gemm", "attention", "memory", "free"]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """[batch, heads, queries, head_dim] against [batch, heads, keys, head_dim]."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool


@dataclass(frozen=True, slots=True)
class Work:
    """One call. ``gemm``: (m, n, k, batch) of [m, k] x [k, n]; ``launches``: kernels that memory-bound work takes;
    ``function``, ``elements``: what it computes and of how many, for chips on which that was measured as a whole;
    ``irregular``: what it reads does not lie side by side (:mod:`planner.ir.irregular`)."""

    flops: float
    bytes_moved: int
    kind: WorkKind
    gemm: tuple[int, int, int, int] | None = None
    attention: AttentionShape | None = None
    launches: int = 1
    function: str = ""
    elements: int = 0
    irregular: bool = False


FREE = Work(0.0, 0, "free", launches=0)
_PRODUCTS = GEMMS | RECURRENT
# Kernels of operations that eager torch runs as several.
_LAUNCHES = {"cross_entropy_loss": 2}
# Operations whose parameter's gradient reads their operand too, in a kernel of its own.
_NORMS = frozenset({"layer_norm", "rms_norm"})
# Operations whose parameter's gradient is a sum over rows, in a kernel of its own.
_SUMMED = frozenset({"add", "sub", "mul"})


def work(node: Node, operands: Sequence[TensorType], outputs: Sequence[TensorType], batch: int) -> Work:
    """Forward of ``node`` on local types (aligned with ``Node.operands`` and ``Node.types``) for ``batch`` samples."""
    if node.base in VIEW_FAMILY or node.base in CREATIONS or not outputs:
        return FREE
    sizes, made = [operand.sizes(batch) for operand in operands], [output.sizes(batch) for output in outputs]
    counts = [math.prod(extents) for extents in (*sizes, *made)]
    moved = sum([count * DTYPE_BYTES[t.dtype] for count, t in zip(counts, (*operands, *outputs), strict=True)])
    if node.base == ATTENTION:
        shape = _attention_shape(node, sizes)
        return Work(
            4.0 * shape.batch * shape.heads * shape.queries * shape.keys * shape.head_dim, moved, "attention", None,
            shape
        )
    product = _product(node, sizes, made[0]) if node.base in _PRODUCTS else None
    if product is not None:
        return Work(2.0 * math.prod(product), moved, "gemm", product)
    if node.base == "embedding":
        moved = 2 * outputs[0].size_bytes(batch)
    return Work(
        0.0, moved, "memory", launches=_LAUNCHES.get(node.base, 1), function=_function(node),
        elements=max(counts),
    )


def _function(node: Node) -> str:
    """The operation's name among a chip's functions; GELU has two forms."""
    approximate = dict(node.arguments).get("approximate", "none")
    return node.base if approximate == "none" else f"{node.base}_{approximate}"


def backward_work(
    node: Node, operands: Sequence[TensorType], outputs: Sequence[TensorType], batch: int, needs: Sequence[bool],
    parameters: Sequence[bool], *, forward: Work,
) -> tuple[Work, Work]:
    """(input gradient, weight gradient) of one call, whose ``forward`` was counted. ``needs``: operands that a gradient
    flows to; ``parameters``: which of them are parameters. A product's gradient for one factor is one product with the
    same m, n and k permuted; attention is 2.5 forwards (the scores are made again: Dao 2023, section 3.1), counted as 2
    in model FLOPs; a memory-bound operation reads the output's gradient and what forward read, and writes the operand's
    gradient."""
    to_input = any(need and not own for need, own in zip(needs, parameters, strict=True))
    to_weight = any(need and own for need, own in zip(needs, parameters, strict=True))
    if forward.kind == "free" or not (to_input or to_weight):
        return FREE, FREE
    if forward.kind == "attention":
        return Work(2.0 * forward.flops, 2 * forward.bytes_moved, "attention", None, forward.attention), FREE
    if forward.kind == "gemm":
        return _product_backward(node, forward, needs, parameters)
    moved = _gradient_bytes(node, operands, outputs, batch, needs, parameters)
    if node.base == "embedding":
        weight = sum(t.size_bytes(batch) for t, own in zip(operands, parameters, strict=True) if own)
        return FREE, Work(0.0, 2 * outputs[0].size_bytes(batch) + weight, "memory", launches=2)
    launches = forward.launches if node.base in _LAUNCHES else 1
    own_input = FREE
    if to_input and moved:
        name = f"{forward.function}_backward"
        own_input = Work(0.0, moved, "memory", launches=launches, function=name, elements=forward.elements)
    own_weight = FREE
    if to_weight:
        summed = outputs[0].elements(batch) if node.base in _SUMMED else 0
        read = (2 if node.base in _NORMS else 1) * outputs[0].size_bytes(batch)
        own_weight = Work(0.0, read, "memory", function="sum" if summed else "", elements=summed)
    return own_input, own_weight


def _product_backward(
    node: Node, forward: Work, needs: Sequence[bool], parameters: Sequence[bool]
) -> tuple[Work, Work]:
    assert forward.gemm is not None
    m, n, k, count = forward.gemm
    if node.base in RECURRENT:
        to_input = any(need and not own for need, own in zip(needs, parameters, strict=True))
        return forward if to_input else FREE, forward if any(needs) else FREE
    first, second = (1, 2) if node.base in ("addmm", "baddbmm") else (0, 1)
    totals = {False: FREE, True: FREE}
    for index, shape in ((first, (m, k, n, count)), (second, (k, n, m, count))):
        if index < len(needs) and needs[index]:
            own = parameters[index]
            before = totals[own]
            # Two gradients of the same kind (of two activations) are two calls: doubling the batch prices them alike.
            shape = shape if before.gemm is None else (*before.gemm[:3], 2 * count)
            totals[own] = Work(before.flops + forward.flops, before.bytes_moved + forward.bytes_moved, "gemm", shape)
    return totals[False], totals[True]


def _gradient_bytes(
    node: Node, operands: Sequence[TensorType], outputs: Sequence[TensorType], batch: int, needs: Sequence[bool],
    parameters: Sequence[bool],
) -> int:
    written = sum(
        t.size_bytes(batch) for t, need, own in zip(operands, needs, parameters, strict=True) if need and not own
    )
    read = sum(t.size_bytes(batch) for t in outputs)
    if node.base in ("add", "sub", "rsub"):
        # The gradient passes through; only a broadcast operand's is summed.
        largest = max(t.elements(batch) for t in outputs)
        return sum(
            read + t.size_bytes(batch) for t, need, own in zip(operands, needs, parameters, strict=True)
            if need and not own and t.elements(batch) < largest
        )
    return written + read + sum(t.size_bytes(batch) for t in operands)


def _attention_shape(node: Node, sizes: Sequence[tuple[int, ...]]) -> AttentionShape:
    query, key = sizes[0], sizes[1]
    causal = bool(dict(node.arguments).get("is_causal", False))
    heads = query[-3] if len(query) > 2 else 1
    return AttentionShape(math.prod(query[:-3]), heads, query[-2], key[-2], query[-1], causal)


def _product(
    node: Node, sizes: Sequence[tuple[int, ...]], output: tuple[int, ...]
) -> tuple[int, int, int, int] | None:
    """(m, n, k, batch) of a product, rows folded where the second factor has no batch of its own; None: it sums nothing."""
    if node.base in CONVOLUTIONS:
        weight = sizes[1]
        return math.prod(output) // max(weight[0], 1), weight[0], math.prod(weight[1:]), 1
    if node.base in TRANSPOSED_CONVOLUTIONS:  # the weight is [in, out of a group, kernel]: a convolution's gradient
        weight = sizes[1]
        return math.prod(sizes[0]) // max(weight[0], 1), math.prod(weight[1:]), weight[0], 1
    if node.base == GROUPED_PRODUCT:
        (rows, depth), (groups, _, columns) = sizes[0], sizes[1]
        return -(-rows // groups), columns, depth, groups
    if node.base == "einsum":
        return _letters(str(dict(node.arguments)["equation"]), sizes)
    if node.base in RECURRENT:
        return _steps(bool(dict(node.arguments)["batch_first"]), sizes)
    first, second = (sizes[1], sizes[2]) if node.base in ("addmm", "baddbmm") else (sizes[0], sizes[1])
    depth = first[-1]
    if node.base == "linear":
        return math.prod(first[:-1]), second[0], depth, 1
    columns = second[-1] if len(second) > 1 else 1
    if len(second) <= 2:
        return math.prod(first[:-1]), columns, depth, 1
    rows = first[-2] if len(first) > 1 else 1
    return rows, columns, depth, math.prod(output) // max(rows * columns, 1)


def _letters(equation: str, sizes: Sequence[tuple[int, ...]]) -> tuple[int, int, int, int] | None:
    """Of an ``einsum`` of two operands: what lies in both and the result is the batch. Others sum no products."""
    given, _, result = equation.partition("->")
    terms = given.split(",")
    if len(terms) != 2 or "..." in equation:
        return None
    left, right = (dict(zip(term, extents, strict=True)) for term, extents in zip(terms, sizes, strict=True))
    summed = [letter for letter in left if letter in right and letter not in result]
    if not summed:
        return None
    rows, columns = ({letter: own[letter] for letter in own if letter in result} for own in (left, right))
    both = [max(rows.pop(letter), columns.pop(letter)) for letter in result if letter in rows and letter in columns]
    depth = math.prod(max(left[letter], right[letter]) for letter in summed)
    return math.prod(rows.values()), math.prod(columns.values()), depth, math.prod(both)


def _steps(batch_first: bool, sizes: Sequence[tuple[int, ...]]) -> tuple[int, int, int, int]:
    """Of a recurrent layer: the products of one step, of all its layers and directions, for as many steps as there are."""
    steps = sizes[0][1] if batch_first and len(sizes[0]) > 2 else sizes[0][0]
    weights = [extents for extents in sizes[1:] if len(extents) == 2]
    depth = weights[-1][1]
    return math.prod(sizes[0][:-1]) // steps, sum(map(math.prod, weights)) // depth, depth, steps
