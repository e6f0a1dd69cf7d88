"""Which values of an emitted function have a variable, and which are written into the expression that reads them.

The text (codegen/functions.py) and the memory that it holds (planner/costing/expressions.py) follow this one rule: a variable
holds its tensor until the function returns, what is written into an expression goes as soon as it is read. An expression's
size is its operations and the values that it reads, a parameter for four (its name is long); no text, so that both count alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.ir.body import Node

VALUE, PARAMETER = 1, 4
"""Sizes of what has a name."""
LARGEST, LARGEST_OPERAND = 16, 6
"""Sizes of expressions that are written into a view of them, and into any other on the same line of the user's code."""
VIEWS = frozenset({
    "reshape", "view", "transpose", "permute", "unsqueeze", "squeeze", "expand", "flatten", "unflatten", "contiguous", "t",
    "slice", "select", "to", "type_as", "neg", "clone",
})
_PARTED = frozenset({"split", "split_with_sizes", "chunk"})
_LEADING = frozenset({"linear", "matmul", "mm", "layer_norm", "rms_norm", "embedding"})
DRAWN = frozenset({"exponential", "rand_like", "randint_like", "randn_like"})
"""Operations that draw numbers of the shape and the dtype of their operand."""
_MASKS = {"dropout": "p", "native_dropout": "p", "scaled_dot_product_attention": "dropout_p"}


def draws(node: Node) -> bool:
    """Whether an operation draws random masks or numbers."""
    return node.base in DRAWN or (node.base in _MASKS and bool(node.argument(_MASKS[node.base])))


def expression_size(operands: Iterable[int]) -> int:
    """Of an operation on operands of these sizes."""
    return 1 + sum(operands)


def inlined(node: Node, reader: Node | None, size: int, *, leads: bool, bias: bool) -> bool:
    """Whether the only result of ``node``, an expression of ``size``, is written into its only reader (None: a conversion).
    ``leads``: it is the reader's first argument; ``bias``: the reader adds a bias."""
    if size > LARGEST:
        return False
    if reader is None:
        return node.base in _LEADING
    if node.base == "linear" and bias:
        return leads
    if reader.base in VIEWS | _PARTED and leads:
        return node.base in VIEWS | _LEADING | {"add"}
    return _same_line(node, reader) and size <= LARGEST_OPERAND


def _same_line(first: Node, second: Node) -> bool:
    mine, its = first.source, second.source
    return mine is not None and its is not None and (mine.file, mine.line) == (its.file, its.line)
