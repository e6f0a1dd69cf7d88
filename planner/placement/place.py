"""Placing one body: from its strategies to the cheapest placement, for a given boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.ir.body import Body, Node
from planner.ir.placement import REPLICATE, BodyPlacement, NodePlacement, OpStrategy, Placement
from planner.placement.model import cheapest_picks
from planner.placement.pricing import Pricing
from planner.placement.reduce import contract, prune
from planner.placement.seconds import body_seconds
from planner.placement.space import Activations, StrategyTable, build_space, item_index, output_vertex
from planner.placement.table import Rules, strategy_table


@dataclass(frozen=True)
class PlacedBody:
    """A placement and its seconds: forward and backward of one micro-batch on one rank, communication included."""

    placement: BodyPlacement
    seconds: float


def place_body(
    body: Body,
    degree: int,
    boundary: Mapping[str, Placement],
    fixed_parameters: Mapping[str, Placement],
    pricing: Pricing,
    *,
    rules: Rules = strategy_table,
    state_price: float = 0.0,
    activations: Activations = "any",
    contracted: bool = True,
) -> PlacedBody | None:
    """The cheapest placement of a body, or None where nothing fits the boundary and the fixed parameters.

    ``boundary`` places block inputs and outputs by value name (``replicate`` where it says nothing). ``rules``
    replaces the table of sharding rules; ``contracted=False`` gives the ILP the body as it is.
    ``state_price``: see :mod:`planner.placement.space`; it steers the choice and is no part of the seconds.
    ``activations``: what the block may do with them (:data:`Activations`).
    """
    if degree == 1:
        placement = whole_placement(body)
        return PlacedBody(placement, body_seconds(body, placement, pricing))
    table = rules(body, degree)
    space = build_space(
        body, degree, table,
        {name: (placed,) for name, placed in boundary.items()},
        {name: (placed,) for name, placed in fixed_parameters.items()},
        pricing,
        state_price,
        activations,
    )
    pruned = prune(space)
    if pruned is None:
        return None
    picks = cheapest_picks(contract(pruned) if contracted else pruned)
    return None if picks is None else placed_body(body, degree, picks, table, pricing)


def placed_body(
    body: Body, degree: int, picks: Mapping[str, OpStrategy | Placement], table: StrategyTable, pricing: Pricing
) -> PlacedBody:
    """Read the placement off what a space's vertices pick."""
    placement = _placement(body, degree, picks, table)
    return PlacedBody(placement, body_seconds(body, placement, pricing))


def whole_placement(body: Body) -> BodyPlacement:
    """The placement on one rank: everything whole."""
    nodes = tuple(
        NodePlacement(node.name, OpStrategy(
            "replicate", (REPLICATE,) * len(node.operands), (REPLICATE,) * len(node.types)
        ))
        for node in body.nodes
    )
    inputs, parameters, outputs = (
        (REPLICATE,) * len(values) for values in (body.inputs, body.parameters, body.outputs)
    )
    return BodyPlacement(body.name, 1, inputs, parameters, nodes, outputs)


def _placement(
    body: Body, degree: int, picks: Mapping[str, OpStrategy | Placement], table: StrategyTable
) -> BodyPlacement:
    nodes: list[NodePlacement] = []
    chosen: dict[str, OpStrategy] = {}
    for node in body.nodes:
        if node.base == "getitem":
            strategy = _item_strategy(node, chosen[node.operands[0]], table)
        else:
            picked = picks[node.name]
            assert isinstance(picked, OpStrategy)
            strategy = picked
        chosen[node.name] = strategy
        nodes.append(NodePlacement(node.name, strategy))
    return BodyPlacement(
        body.name,
        degree,
        _placements(picks, [value.name for value in body.inputs]),
        _placements(picks, [parameter.name for parameter in body.parameters]),
        tuple(nodes),
        _placements(picks, [output_vertex(at) for at in range(len(body.outputs))]),
    )


def _placements(picks: Mapping[str, OpStrategy | Placement], names: Sequence[str]) -> tuple[Placement, ...]:
    placements = tuple(picks[name] for name in names)
    return tuple(placement for placement in placements if isinstance(placement, Placement))


def _item_strategy(node: Node, producer: OpStrategy, table: StrategyTable) -> OpStrategy:
    """The strategy of a ``getitem``: it lies as its producer wrote the item."""
    written = producer.outputs[item_index(node)]
    for strategy in table.get(node.name, ()):
        if strategy.operands == strategy.outputs == (written,):
            return strategy
    return OpStrategy("item", (written,), (written,))


