"""The form that a placed body must have, checked between passes."""

from __future__ import annotations

from planner.ir.body import Body
from planner.ir.errors import InternalError
from planner.ir.placement import BodyPlacement
from planner.placement.edges import edges
from planner.placement.space import legal_conversion
from planner.placement.table import Rules, strategy_table


def verify(body: Body, placement: BodyPlacement, *, rules: Rules = strategy_table) -> None:
    """Raise InternalError unless the placement is one of this body, every strategy is one of the rules', and every
    value can be converted into each placement it is read in.

    At degree 1 only the form is checked: one rank has nothing to convert. ``rules`` replaces the table of sharding
    rules.
    """
    where = f"placement of {body.name} over {placement.degree}"
    _verify_form(body, placement, where)
    if placement.degree == 1:
        return
    table = rules(body, placement.degree)
    for node, placed in zip(body.nodes, placement.nodes, strict=True):
        if node.base == "getitem":
            if placed.strategy.operands != placed.strategy.outputs:
                raise InternalError(where, f"{node.name} lies otherwise than the item it picks", "an item is not moved")
        elif placed.strategy not in table[node.name]:
            raise InternalError(
                where, f"{node.name} ({node.op}) runs the strategy {placed.strategy.name!r}", "one of the rules'"
            )
    for edge in edges(body, placement):
        if legal_conversion(edge.value, edge.source, edge.target, placement.degree) is None:
            raise InternalError(
                where, f"{edge.name} is {edge.source} and {edge.reader} reads it {edge.target}",
                "a legal conversion between them",
            )
        if not edge.value.differentiable and {edge.source.state, edge.target.state} & {"shared", "partial"}:
            raise InternalError(
                where, f"{edge.name} carries no gradient and is {edge.source}, read {edge.target}", "replicate or shard"
            )


def _verify_form(body: Body, placement: BodyPlacement, where: str) -> None:
    if placement.body != body.name:
        raise InternalError(where, f"it was made for {placement.body}", body.name)
    for what, placements, values in (
        ("inputs", placement.inputs, body.inputs),
        ("parameters", placement.parameters, body.parameters),
        ("outputs", placement.outputs, body.outputs),
    ):
        if len(placements) != len(values):
            raise InternalError(where, f"{len(placements)} {what}", f"{len(values)}")
    if tuple(placed.node for placed in placement.nodes) != tuple(node.name for node in body.nodes):
        raise InternalError(where, "its nodes are not the body's", "one strategy a node, in execution order")
    for node, placed in zip(body.nodes, placement.nodes, strict=True):
        operands, outputs = len(placed.strategy.operands), len(placed.strategy.outputs)
        if operands != len(node.operands) or outputs != len(node.types):
            raise InternalError(
                where, f"{node.name} has a strategy for {operands} operands and {outputs} outputs",
                f"{len(node.operands)} and {len(node.types)}",
            )
