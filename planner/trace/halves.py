"""Half precisions, and what takes their place where terms are added up."""

from __future__ import annotations

from dataclasses import replace

from planner.ir.body import Node
from planner.ir.types import Dtype, Ref
from planner.trace.flat import FlatGraph

HALF = frozenset({"bfloat16", "float16"})
WIDE = "float32"
"""What sums over the batch, and what follows them, are in where the model computes in a half."""


def wide_copy(graph: FlatGraph, value: str, name: str, origin: Node) -> Node:
    """The node that casts a half to float32. ``origin``: whose operand that is to be."""
    arguments = (("self", Ref(value)), ("dtype", Dtype(WIDE)), ("non_blocking", False), ("copy", False))
    type_ = replace(graph.type_of(value), dtype=WIDE)
    return Node(name, "to.dtype", arguments, (type_,), origin.module, origin.source, graph.differentiable(value))
