"""How torch multiplies the two operands of an ``einsum``: as one batched product of what they fold to.

Source: aten/src/ATen/native/Linear.cpp of torch 2.13, ``einsum`` and ``sumproduct_pair``. Letters of both operands and the
result are the batch, the others of one operand its rows or columns; a fold that strides do not allow is a copy; the result is
the product's with its dims in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from planner.ir.body import Node
from planner.ops.layout import Layout, reshaped, row_major


@dataclass(frozen=True, slots=True)
class Fold:
    """One operand: whether its fold is a ``view``, and (then) whether the dims keep their order."""

    view: bool
    in_order: bool


@dataclass(frozen=True, slots=True)
class BatchedProduct:
    """``result``: how it lies."""

    left: Fold
    right: Fold
    result: Layout


def batched_product(node: Node, operands: Sequence[Layout]) -> BatchedProduct | None:
    """None where it is none: one operand or more than two, an ellipsis, a diagonal, nothing to sum over, nothing left, a letter
    that is summed in one operand alone, or one along which an operand is broadcast."""
    equation = dict(node.arguments).get("equation")
    if not isinstance(equation, str) or "..." in equation or "->" not in equation or len(operands) != 2:
        return None
    given, output = equation.replace(" ", "").split("->")
    left, right = given.split(",")
    sums = sorted(letter for letter in left if letter in right and letter not in output)
    both = [letter for letter in output if letter in left and letter in right]
    rows, columns = ([letter for letter in output if letter in own and letter not in both] for own in (left, right))
    plain = all(len(set(term)) == len(term) for term in (left, right, output))
    alone = any(letter not in output and letter not in sums for letter in left + right)
    if not plain or alone or not sums or not output:
        return None
    pairs = list(zip(left + right, (*operands[0].sizes, *operands[1].sizes), strict=True))
    extents: Mapping[str, int] = dict(pairs)
    if any(extents[letter] != extent for letter, extent in pairs) or all(extents[letter] == 1 for letter in sums):
        return None
    swapped = _swapped(output, rows, columns, extents)
    order = (*both, *columns, *rows) if swapped else (*both, *rows, *columns)
    made = row_major([extents[letter] for letter in order], operands[0].dtype)
    stride = dict(zip(order, made.strides, strict=True))
    result = Layout(tuple(extents[letter] for letter in output), tuple(stride[letter] for letter in output), operands[0].dtype)
    mine, its = (both, rows, sums), (both, sums, columns)
    if swapped:
        mine, its = (both, sums, rows), (both, columns, sums)
    return BatchedProduct(_fold(operands[0], left, mine), _fold(operands[1], right, its), result)


def _swapped(output: str, rows: Sequence[str], columns: Sequence[str], extents: Mapping[str, int]) -> bool:
    """Whether the second operand is the product's first: all its own dims, to which those of extent 1 belong, come before
    the first one's (``rows``). Dims to sum over come after the result's."""
    place = {letter: at for at, letter in enumerate(dict.fromkeys((*output, *extents)))}
    first = [place[letter] for letter in rows if extents[letter] != 1]
    second = [place[letter] for letter in extents if letter in columns or extents[letter] == 1]
    return bool(first and second) and max(second) < min(first)


def _fold(operand: Layout, letters: str, groups: Sequence[Sequence[str]]) -> Fold:
    """Three dims of these letters."""
    order = [letters.index(letter) for group in groups for letter in group]
    turned = Layout(
        tuple(operand.sizes[dim] for dim in order), tuple(operand.strides[dim] for dim in order), operand.dtype
    )
    sizes = [prod(operand.sizes[letters.index(letter)] for letter in group) for group in groups]
    long = [dim for dim in order if operand.sizes[dim] != 1]
    return Fold(reshaped(turned, sizes) is not None, long == sorted(long))
