"""Operation: what one node of a placed body does on one rank, before any price."""

from __future__ import annotations

from dataclasses import dataclass

from planner.ir.graph import Body, Node
from planner.ir.placement import OpStrategy, local_type
from planner.ir.types import TensorType
from planner.ops.work import FREE, Work, backward_work, work


@dataclass(frozen=True, slots=True)
class Operation:
    """One node's local share for one micro-batch. ``dtype``: of its results; ``weighted``: some operand is a parameter;
    the three passes are the forward, the input gradient and the weight gradient."""

    node: str
    base: str
    dtype: str
    weighted: bool
    forward: Work
    to_input: Work
    to_weight: Work


def measure_operation(body: Body, node: Node, strategy: OpStrategy, degree: int, microbatch: int) -> Operation:
    """Count one node under ``strategy``, on rank 0 of ``degree`` (which holds the most)."""
    parameters = {value.name for value in body.parameters}
    owned = tuple(name in parameters for name in node.operands)
    if node.base == "getitem":
        return Operation(node.name, node.base, node.type.dtype, False, FREE, FREE, FREE)
    operands = tuple(
        local_type(body.types[name], placed, degree) for name, placed in zip(node.operands, strategy.operands, strict=True)
    )
    outputs = tuple(local_type(type_, placed, degree) for type_, placed in zip(node.types, strategy.outputs, strict=True))
    needs = body.made(node)
    to_input, to_weight = backward_work(node, operands, outputs, microbatch, needs, owned)
    return Operation(
        node.name, node.base, _dtype(outputs), any(owned), work(node, operands, outputs, microbatch), to_input, to_weight
    )


def _dtype(outputs: tuple[TensorType, ...]) -> str:
    return next((t.dtype for t in outputs if t.floating), "float32")
