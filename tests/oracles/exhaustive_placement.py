"""The cheapest placement of a small body by trying every combination of strategies and parameter placements.

Written from the algebra alone: it shares no code with the solver's space, its reductions or its pricing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from planner.ir.body import Body
from planner.ir.placement import PARTIAL, REPLICATE, SHARED, OpStrategy, Placement, conversion, shard
from planner.placement import Pricing

PARAMETER_PLACEMENTS = (REPLICATE, SHARED, shard(0), shard(1))


def cheapest_seconds(
    body: Body,
    degree: int,
    table: Mapping[str, Sequence[OpStrategy]],
    boundary: Mapping[str, Placement],
    pricing: Pricing,
) -> float:
    """Seconds of the best placement; infinite where none is legal."""
    return min((_seconds(body, degree, chosen, placed, boundary, pricing)
                for chosen, placed in _combinations(body, table)), default=math.inf)


def _combinations(
    body: Body, table: Mapping[str, Sequence[OpStrategy]]
) -> Iterator[tuple[dict[str, OpStrategy], dict[str, Placement]]]:
    nodes = [node.name for node in body.nodes]
    names = [parameter.name for parameter in body.parameters]
    for chosen in itertools.product(*(table[name] for name in nodes)):
        for placed in itertools.product(PARAMETER_PLACEMENTS, repeat=len(names)):
            yield dict(zip(nodes, chosen, strict=True)), dict(zip(names, placed, strict=True))


def _seconds(
    body: Body,
    degree: int,
    chosen: Mapping[str, OpStrategy],
    parameters: Mapping[str, Placement],
    boundary: Mapping[str, Placement],
    pricing: Pricing,
) -> float:
    lies = {value.name: boundary.get(value.name, REPLICATE) for value in body.inputs} | dict(parameters)
    total = sum(pricing.parameter_seconds(p.type, parameters[p.name]) for p in body.parameters)
    done: set[tuple[str, Placement]] = set()
    reads: list[tuple[str, Placement]] = []
    for node in body.nodes:
        strategy = chosen[node.name]
        forward_s, backward_s = pricing.strategy_comm_seconds(strategy, grows=True)
        total += sum(pricing.node_seconds(body, node, strategy)) + forward_s + backward_s * (node.name in body.asked)
        reads.extend(zip(node.operands, strategy.operands, strict=True))
        lies[node.name] = strategy.outputs[0]
    reads.extend((name, boundary.get(name, REPLICATE)) for name in body.outputs)
    for name, target in reads:
        if (name, target) in done:
            continue
        done.add((name, target))
        step = conversion(lies[name], target, body.types[name], degree, differentiable=name in body.differentiable)
        if step is None or (name in parameters and not _readable(lies[name], target)):
            return math.inf
        if lies[name] != target:
            forward_s, backward_s = pricing.conversion_seconds(step, body.types[name])
            returned = name in body.differentiable and all(
                reader.differentiable and reader.name in body.asked for reader in body.nodes if name in reader.operands
            )
            total += forward_s + backward_s * returned
    return total


def _readable(lies: Placement, target: Placement) -> bool:
    """State is read as it lies, or cut out of the whole."""
    return lies == target or (lies.state in ("replicate", "shared") and target.state == "shard")


__all__ = ["PARAMETER_PLACEMENTS", "PARTIAL", "cheapest_seconds"]
