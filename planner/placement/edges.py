"""The conversions that a placed body performs: what pricing, verification and the ledger all walk over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.ir.body import Body
from planner.ir.placement import BodyPlacement, Placement
from planner.placement.space import Value, body_values, item_index


@dataclass(frozen=True, slots=True)
class Edge:
    """A value in ``source`` that is read in ``target``; ``reader`` is the first node that reads it so, or an output."""

    name: str
    value: Value
    source: Placement
    target: Placement
    reader: str


def edges(body: Body, placement: BodyPlacement) -> tuple[Edge, ...]:
    """Every (value, target placement) once, in execution order, those that need no conversion included. An item of a
    node with several outputs is the value of its ``getitem``."""
    values = body_values(body)
    lies = source_placements(body, placement)
    strategies = {node.node: node.strategy for node in placement.nodes}
    reads = [
        (name, target, node.name)
        for node in body.nodes
        if node.base != "getitem"
        for name, target in zip(node.operands, strategies[node.name].operands, strict=True)
    ]
    outputs = zip(body.outputs, placement.outputs, strict=True)
    reads += [(name, target, "the block's output") for name, target in outputs]
    found: dict[tuple[str, Placement], Edge] = {}
    for name, target, reader in reads:
        found.setdefault((name, target), Edge(name, values[name], lies[name], target, reader))
    return tuple(found.values())


def source_placements(body: Body, placement: BodyPlacement) -> Mapping[str, Placement]:
    """How each value of a placed body lies where it is produced. Buffers are whole on every rank."""
    lies = {value.name: placed for value, placed in zip(body.inputs, placement.inputs, strict=True)}
    lies |= {value.name: placed for value, placed in zip(body.parameters, placement.parameters, strict=True)}
    lies |= {buffer.name: Placement("replicate") for buffer in body.buffers}
    strategies = {node.node: node.strategy for node in placement.nodes}
    for node in body.nodes:
        if node.base == "getitem":
            lies[node.name] = strategies[node.operands[0]].outputs[item_index(node)]
        elif strategies[node.name].outputs:
            lies[node.name] = strategies[node.name].outputs[0]
    return lies
