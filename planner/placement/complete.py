"""From what a plan file stores of a placement (boundary and parameters) back to the placement of every node."""

from __future__ import annotations

from collections.abc import Mapping

from planner.ir.body import Body
from planner.ir.errors import PlanFileError
from planner.ir.placement import REPLICATE, BodyPlacement, Placement
from planner.placement.place import place_body
from planner.placement.pricing import Pricing
from planner.placement.space import splittable
from planner.placement.table import Rules, strategy_table


def complete(
    body: Body,
    degree: int,
    boundary: Mapping[str, Placement],
    parameters: Mapping[str, Placement],
    pricing: Pricing,
    *,
    rules: Rules = strategy_table,
) -> BodyPlacement:
    """The cheapest placement of a body's nodes under a boundary (by value name; ``replicate`` where it says nothing)
    and a placement of every parameter.

    As in the search, a whole activation is cut only where the boundary is split.
    Raises PlanFileError where a name or a placement cannot be, or where no placement of the nodes goes with them.
    """
    where = f"placement of {body.name}"
    _check_names(body, boundary, parameters, where)
    for name, placement in (*boundary.items(), *parameters.items()):
        _check_placement(body, name, placement, degree, where, inside=name in parameters)
    split = any(placement.state == "shard" for placement in boundary.values())
    placed = place_body(body, degree, boundary, parameters, pricing, rules=rules, activations="split" if split else "whole")
    if placed is None:
        raise PlanFileError(
            where, f"no placement of its operations over {degree} ranks goes with these parameters and boundary",
            "the placements that `plan` wrote, or replicate for all",
        )
    return placed.placement


def _check_names(
    body: Body, boundary: Mapping[str, Placement], parameters: Mapping[str, Placement], where: str
) -> None:
    own = {parameter.name for parameter in body.parameters}
    for name in sorted(own ^ set(parameters)):
        wrong = f"parameter {name} has no placement" if name in own else f"{name} is no parameter of it"
        raise PlanFileError(where, wrong, f"one placement for each of {', '.join(sorted(own)) or 'no parameters'}")
    values = {value.name for value in body.inputs} | set(body.outputs)
    for name in sorted(set(boundary) - values):
        raise PlanFileError(where, f"{name} is no input or output of it", f"one of {', '.join(sorted(values))}")


def _check_placement(body: Body, name: str, placement: Placement, degree: int, where: str, *, inside: bool) -> None:
    type_ = body.types[name]
    if degree == 1 and placement != REPLICATE:
        raise PlanFileError(where, f"{name} is {placement} on one rank", "replicate")
    if placement.state == "partial" or (placement.state == "shared" and not inside):
        raise PlanFileError(where, f"{name} is {placement}", "replicate or shard(dim)")
    if placement.state == "shard" and not 0 <= placement.dim < type_.rank:
        raise PlanFileError(where, f"{name} {type_} is {placement}", f"a dim from 0 to {type_.rank - 1}")
    if not inside and not splittable(type_, placement, degree):
        raise PlanFileError(where, f"{name} {type_} is {placement}", f"a dim that {degree} ranks divide evenly")
