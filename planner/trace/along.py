"""Along which dims an operation works: what a position holds then depends on the others of that dim."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from planner.ir.body import Node
from planner.ir.types import Argument, Ref, TensorType
from planner.ops.families import ATTENTION, RECURRENT
from planner.ops.fourier import FOURIER

SCANS = frozenset({
    "argsort", "cummax", "cummin", "cumprod", "cumsum", "kthvalue", "logcumsumexp", "sort", "topk",
    "_log_softmax", "_softmax", "log_softmax", "softmax", "unfold",
})
"""Along one dim, the last where none is said."""
MOVES = frozenset({"flip", "roll", "rot90"})
"""Along several dims, all where none are said."""
LAST_NORMS = frozenset({"_fused_rms_norm", "layer_norm", "native_layer_norm", "rms_norm"})
MATRICES = frozenset({"cholesky", "inverse", "logdet", "matrix_exp", "slogdet", "svd", "tril", "triu"})
FACTORED = re.compile(r"linalg_(cholesky|det|eig|inv|lu|matrix_exp|matrix_power|pinv|qr|slogdet|solve|svd)")
"""Of the last two dims."""
WINDOWED = re.compile(r"(?:pool|conv|conv_transpose|upsample_\w*|_pad|grid_sampler_)([123])d")
PRODUCTS = {
    "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "bmm": ("self", "mat2"), "dot": ("self", "tensor"),
    "matmul": ("self", "other"), "mm": ("self", "mat2"), "mv": ("self", "vec"),
}
"""The two factors of a matrix product."""


def along(node: Node, rank: int) -> tuple[int, ...]:
    """Dims of the first operand, of ``rank``, along which the operation works, counted from the front."""
    arguments = dict(node.arguments)
    windowed = WINDOWED.search(node.base)
    if node.base in SCANS:
        return _from_front((arguments.get("dim", arguments.get("dimension", -1)),), rank)
    if node.base in MOVES or node.base in FOURIER:
        said = arguments.get("dims", arguments.get("dim"))
        one = node.base in FOURIER and not node.base.endswith(("2", "n"))
        return _from_front(said if isinstance(said, tuple) else (said,), rank) or (_last(1, rank) if one else _last(rank, rank))
    if node.base in LAST_NORMS:
        shape = arguments["normalized_shape"]
        return _last(len(shape) if isinstance(shape, tuple) else 1, rank)
    if node.base == "group_norm":
        return tuple(range(1 if isinstance(arguments["num_groups"], int) else 2, rank))
    if node.base in MATRICES or FACTORED.search(node.base):
        return _last(2, rank)
    if node.base == "select_scatter" or (node.base == "slice_scatter" and _is_at_numbers(arguments)):
        return _from_front((arguments["dim"],), rank)
    if node.base in ("constant_pad_nd", "pad"):
        widths = arguments["pad"]
        return tuple(rank - 1 - at // 2 for at, width in enumerate(widths) if width) if isinstance(widths, tuple) else ()
    if node.base in RECURRENT and "batch_first" in arguments:
        return (int(bool(arguments["batch_first"])),)
    if windowed:
        channels = "conv" in node.base and isinstance(arguments.get("groups", 1), int)
        return _last(int(windowed.group(1)) + channels, rank)
    return ()


def contracted(node: Node, type_of: Callable[[str], TensorType]) -> Iterator[tuple[str, int]]:
    """Operands with a dim over which the operation adds up products."""
    arguments = dict(node.arguments)
    if node.base in PRODUCTS:
        first, second = (_name(arguments[key]) for key in PRODUCTS[node.base])
        yield first, type_of(first).rank - 1
        yield second, max(type_of(second).rank - 2, 0)
    elif node.base == "linear":
        for name in map(_name, (arguments["input"], arguments["weight"])):
            yield name, type_of(name).rank - 1
    elif node.base == ATTENTION:
        for key in ("query", "key"):
            yield _name(arguments[key]), type_of(_name(arguments[key])).rank - 1
        for key in ("key", "value"):
            yield _name(arguments[key]), type_of(_name(arguments[key])).rank - 2
    elif node.base == "einsum" and isinstance(equation := arguments["equation"], str) and "." not in equation:
        left, arrow, right = equation.replace(" ", "").partition("->")
        for name, letters in zip(node.operands, left.split(","), strict=False):
            yield from ((name, dim) for dim, letter in enumerate(letters) if arrow and letter not in right)


def _name(argument: Argument) -> str:
    assert isinstance(argument, Ref)
    return argument.name


def _is_at_numbers(arguments: Mapping[str, Argument]) -> bool:
    """Whether a slice begins or ends at the same position whatever the batch, or skips some."""
    bounds = (arguments.get("start"), arguments.get("end"))
    return arguments.get("step", 1) != 1 or any(isinstance(bound, int) and 0 != bound < 1 << 62 for bound in bounds)


def _from_front(dims: Sequence[Argument], rank: int) -> tuple[int, ...]:
    return tuple(dim % max(rank, 1) for dim in dims if isinstance(dim, int))


def _last(count: int, rank: int) -> tuple[int, ...]:
    return tuple(range(max(rank - count, 0), rank))
