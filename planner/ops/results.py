"""Where an operation's results lie: views move strides, pointwise operations inherit the operands' order of dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.ir.body import Node
from planner.ir.types import TensorType
from planner.ops.attention import fused_attention
from planner.ops.einsums import batched_product
from planner.ops.families import CONVOLUTIONS, POINTWISE, RECURRENT, RESHAPES, TRANSPOSED_CONVOLUTIONS, VIEWS
from planner.ops.fourier import FOURIER, transformed
from planner.ops.layout import (
    Layout,
    broadcast_strides,
    channels_last,
    fresh,
    inherited,
    reshaped,
    row_major,
    with_channels_last,
)

# Images whose channels lie innermost stay so (``suggest_memory_format``); everything else is row by row.
KEEPS_CHANNELS_LAST = CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS | {
    "adaptive_avg_pool2d", "avg_pool2d", "cat", "constant_pad_nd", "group_norm", "max_pool2d", "pad", "upsample_bicubic2d",
    "upsample_bilinear2d", "upsample_nearest2d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact2d",
}
# TensorAdvancedIndexing.cpp, layer_norm.cpp (``rms_norm_composite``).
COPIES_INTO_ROWS = frozenset({"masked_fill", "rms_norm"})
INHERITS = POINTWISE - COPIES_INTO_ROWS
# The result's dims lie in the order of the first operand's.
KEEPS_ORDER = frozenset({"flip", "glu", "sort"})
# TensorShape.cpp, ``clone_preserve_strides``: the part is written into a copy of all the storage that the first operand is in.
PATCHES = frozenset({"select_scatter", "slice_scatter"})


def result_layouts(
    node: Node, operands: Sequence[Layout], outputs: Sequence[TensorType], batch: int, needs: Sequence[bool]
) -> tuple[tuple[Layout, ...], bool]:
    """Layouts of a node's outputs (local types ``outputs``), and whether they share the first operand's storage. ``needs``: of
    which operands a gradient is made.

    ``getitem`` expects the picked output's layout as its operand.
    """
    if node.base in VIEWS and operands:
        return tuple(_view(node, operands[0], type_, batch) for type_ in outputs), True
    if node.base in RESHAPES:
        view = reshaped(operands[0], outputs[0].sizes(batch))
        return ((view,), True) if view is not None else ((fresh(outputs[0], batch),), False)
    if node.base == "contiguous" and operands[0].contiguous:
        return (operands[0],), True
    if node.base in KEEPS_CHANNELS_LAST and _channels_last(node, operands):
        return tuple(with_channels_last(type_.sizes(batch), type_.dtype) for type_ in outputs), False
    if node.base in PATCHES and not operands[0].overlaps:
        return (operands[0],), False
    if node.base in KEEPS_ORDER | PATCHES:
        return tuple(inherited(operands[:1], type_.sizes(batch), type_.dtype) for type_ in outputs), False
    if node.base in INHERITS and outputs:
        return tuple(inherited(operands, type_.sizes(batch), type_.dtype) for type_ in outputs), False
    if node.base == "scaled_dot_product_attention" and fused_attention(node, operands, any(needs[3:4])):
        return (inherited(operands[:1], outputs[0].sizes(batch), outputs[0].dtype),), False
    if node.base in FOURIER:
        return tuple(transformed(node, operands[0], type_.sizes(batch), type_.dtype) for type_ in outputs), False
    if node.base in RECURRENT and dict(node.arguments).get("batch_first"):
        return tuple(_step_by_step(fresh(type_, batch), at) for at, type_ in enumerate(outputs)), False
    product = batched_product(node, operands) if node.base == "einsum" else None
    if product is not None:
        return (product.result,), False
    return tuple(fresh(type_, batch) for type_ in outputs), False


def _step_by_step(rows: Layout, at: int) -> Layout:
    """What a recurrent network makes of [batch, steps, ...]: its outputs lie in memory step by step (RNN.cpp transposes them in
    the end), and the states after the last step row by row."""
    samples, _, width = rows.sizes
    return rows if at else Layout(rows.sizes, (width, samples * width, 1), rows.dtype)


def _channels_last(node: Node, operands: Sequence[Layout]) -> bool:
    """Whether channels lie innermost in the result: as in a convolution's input or weight, or in all that is joined."""
    if node.base == "cat":
        return all(map(channels_last, operands))
    return any(map(channels_last, operands[: 2 if node.base in CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS else 1]))


def _view(node: Node, operand: Layout, output: TensorType, batch: int) -> Layout:
    arguments, sizes, rank = dict(node.arguments), output.sizes(batch), len(operand.sizes)
    strides = list(operand.strides)
    base = node.base
    if base == "getitem" or base in ("alias", "detach", "split", "split_with_sizes", "chunk", "narrow"):
        pass
    elif base == "transpose":
        first, second = _integer(arguments["dim0"]), _integer(arguments["dim1"])
        if rank > 1:
            strides[first], strides[second] = strides[second], strides[first]
    elif base == "permute":
        dims = arguments["dims"]
        assert isinstance(dims, tuple)
        strides = [strides[_integer(dim)] for dim in dims]
    elif base == "unsqueeze":
        at = _integer(arguments["dim"]) % (rank + 1)
        strides.insert(at, operand.sizes[at] * strides[at] if at < rank else 1)
    elif base == "squeeze":
        strides = _squeezed(operand, arguments)
    elif base in ("select", "unbind"):
        del strides[_integer(arguments.get("dim", 0))]
    elif base == "slice":
        strides[_integer(arguments.get("dim", 0))] *= _integer(arguments.get("step", 1))
    elif base == "unfold":
        at = _integer(arguments["dimension"])
        strides.append(strides[at])
        strides[at] *= _integer(arguments["step"])
    elif base == "view_as_complex":
        strides = [stride // 2 for stride in strides[:-1]]
    elif base == "view_as_real":
        strides = [*(2 * stride for stride in strides), 1]
    elif base in ("expand", "expand_as"):
        strides = list(broadcast_strides(operand, sizes))
    else:
        view = reshaped(operand, sizes)
        return view if view is not None else row_major(sizes, output.dtype)
    return Layout(sizes, tuple(strides), output.dtype)


def _squeezed(operand: Layout, arguments: Mapping[str, object]) -> list[int]:
    dims = arguments.get("dim")
    rank = len(operand.sizes)
    named = dims if isinstance(dims, tuple) else (dims,)
    asked = range(rank) if dims is None else [_integer(dim) % rank for dim in named]
    return [stride for dim, stride in enumerate(operand.strides) if not (dim in asked and operand.sizes[dim] == 1)]


def _integer(argument: object) -> int:
    if not isinstance(argument, int):
        raise TypeError(f"an integer was expected in place of {argument!r}")
    return argument
