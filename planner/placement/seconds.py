"""Seconds of a placed body, added up from the placement itself: the solver does not grade its own answer."""

from __future__ import annotations

from planner.ir.body import Body
from planner.ir.placement import BodyPlacement
from planner.placement.edges import edges
from planner.placement.pricing import Pricing
from planner.placement.space import conversion_seconds, inner_seconds, legal_conversion


def body_seconds(body: Body, placement: BodyPlacement, pricing: Pricing) -> float:
    """Forward and backward of one micro-batch on one rank: operations, collectives inside them, conversions once per
    (value, target placement), and the parameters' share of what is summed once a step."""
    strategies = {node.node: node.strategy for node in placement.nodes}
    operations = sum(
        sum(pricing.node_seconds(body, node, strategies[node.name]))
        + inner_seconds(pricing, body, node, strategies[node.name])
        for node in body.nodes
        if node.base != "getitem"
    )
    conversions = sum(
        conversion_seconds(pricing, step, edge.value)
        for edge in edges(body, placement)
        if edge.source != edge.target
        and (step := legal_conversion(edge.value, edge.source, edge.target, placement.degree)) is not None
    )
    parameters = sum(
        pricing.parameter_seconds(parameter.type, placed)
        for parameter, placed in zip(body.parameters, placement.parameters, strict=True)
    )
    return operations + conversions + parameters
