"""What a block hands on: row by row, and never in the memory of a parameter."""

from __future__ import annotations

import pytest

from planner.ir.body import Body, BodyValue, Node
from planner.ir.types import Argument, BatchMultiple, Extent, Ref, TensorType
from planner.trace.packing import packed

BATCH = BatchMultiple(1)
WEIGHT = TensorType((8, 16), "float32")
GIVEN = TensorType((BATCH, 8, 16), "float32")


def node(name: str, op: str, shape: tuple[Extent, ...], *arguments: tuple[str, Argument]) -> Node:
    return Node(name, op, arguments, (TensorType(shape, "float32"),), differentiable=True)


def body(*nodes: Node) -> Body:
    return Body("Start", (BodyValue("x", GIVEN, True),), (BodyValue("w", WEIGHT, True),), (), nodes, (nodes[-1].name,))


@pytest.mark.parametrize(("nodes", "added"), [
    # Of one sample this is contiguous already, and would stay a view.
    ([node("y", "expand", (BATCH, 8, 16), ("self", Ref("w")), ("size", (-1, 8, 16)))], ["clone"]),
    ([node("y", "unsqueeze", (1, 8, 16), ("self", Ref("w")), ("dim", 0))], ["clone"]),
    ([node("y", "transpose", (16, 8), ("self", Ref("w")), ("dim0", 0), ("dim1", 1))], ["clone", "contiguous"]),
    ([node("y", "transpose", (BATCH, 16, 8), ("self", Ref("x")), ("dim0", 1), ("dim1", 2))], ["contiguous"]),
    ([node("y", "add", (BATCH, 8, 16), ("self", Ref("x")), ("other", Ref("w")))], []),
    ([node("z", "expand", (BATCH, 8, 16), ("self", Ref("w")), ("size", (-1, 8, 16))),
      node("y", "neg", (BATCH, 8, 16), ("self", Ref("z")))], []),
])
def test_what_is_copied(nodes: list[Node], added: list[str]) -> None:
    before = body(*nodes)
    after = packed(before)
    assert [each.op for each in after.nodes[len(nodes):]] == added and after.nodes[: len(nodes)] == before.nodes
    assert after.outputs == ((after.nodes[-1].name,) if added else before.outputs)
