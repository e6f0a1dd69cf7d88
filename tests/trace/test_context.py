"""What depends on no parameter is computed once where it is the same, and only there."""

from __future__ import annotations

import pytest

from planner.ir.body import Node
from planner.ir.types import Argument, BatchMultiple, Ref, TensorType
from planner.trace.context import split_context
from planner.trace.flat import FlatGraph

TYPE = TensorType((BatchMultiple(1), 8), "float64")


def merged(op: str, first: dict[str, Argument], second: dict[str, Argument], types: tuple[TensorType, TensorType]) -> bool:
    """Whether two operations on a batch input are one after the pass."""
    nodes = tuple(Node(name, op, (("self", Ref("batch:x")), *arguments.items()), (made,))
                  for name, arguments, made in zip(("a", "b"), (first, second), types, strict=True))
    graph = FlatGraph(where="model", batch_inputs=(), inputs={"batch:x": TYPE}, nodes=nodes, outputs=("a", "b"), classes={},
                      values={}, trainable=frozenset(), sequence=0)
    return split_context(graph).outputs == ("a", "a")


@pytest.mark.parametrize(("op", "first", "second"), [
    ("clamp", {"min": 1}, {"min": 1.0}),
    ("fill.Scalar", {"value": True}, {"value": 1}),
    ("mul.Scalar", {"other": 0.0}, {"other": -0.0}),
    ("rot90", {"k": 1, "dims": (0, 1)}, {"k": 1, "dims": (0, True)}),
])
def test_numbers_that_only_python_takes_for_equal(op: str, first: dict[str, Argument], second: dict[str, Argument]) -> None:
    assert not merged(op, first, second, (TYPE, TYPE))
    assert merged(op, first, dict(first), (TYPE, TYPE)) and merged(op, second, dict(second), (TYPE, TYPE))


def test_equal_operations_of_other_types() -> None:
    assert not merged("add.Scalar", {"other": 1}, {"other": 1}, (TYPE, TensorType(TYPE.shape, "int64")))


def test_masks_that_are_drawn_are_two() -> None:
    dropped: dict[str, Argument] = {"p": 0.5, "train": True}
    assert not merged("dropout", dropped, dict(dropped), (TYPE, TYPE))
    assert merged("dropout", dropped | {"p": 0.0}, dropped | {"p": 0.0}, (TYPE, TYPE))
