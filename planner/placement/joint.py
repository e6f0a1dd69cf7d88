"""Bodies that share parameters as one space: a tied parameter is one vertex that is read in all of them.

Names are those of the bodies behind their number and a colon. Prices are weighted, so that they are parts of the joint unit:
the dearest seconds of all blocks that the bodies stand for are a million units.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.ir.placement import OpStrategy, Placement
from planner.placement.space import Choice, Pick, Space, Vertex

Tie = Collection[tuple[int, str]]
"""Parameters that must lie alike: the number of the body and the parameter's name in it."""


@dataclass(frozen=True)
class Joint(Space):
    """``parts``: of each value, the space that it is from, its name there and the weight of prices there."""

    parts: Mapping[str, tuple[Space, str, float]] = field(default_factory=dict, repr=False)

    def conversion_price(self, name: str, source: int, target: int) -> float | None:
        space, own, weight = self.parts[name]
        price = space.conversion_price(own, source, target)
        return None if price is None else weight * price


def join(spaces: Sequence[Space], counts: Sequence[int], ties: Collection[Tie]) -> Joint:
    """The space of several bodies, of which ``counts`` blocks are each. Tied parameters are pinned vertices of their spaces."""
    unit_s = sum(count * space.unit_s for count, space in zip(counts, spaces, strict=True))
    weights = [count * space.unit_s / unit_s for count, space in zip(counts, spaces, strict=True)]
    vertices: dict[str, Vertex] = {}
    parts: dict[str, tuple[Space, str, float]] = {}
    for at, (space, weight) in enumerate(zip(spaces, weights, strict=True)):
        vertices |= {_named(at, vertex.name): _weighted(vertex, at, weight) for vertex in space.vertices}
        parts |= {_named(at, name): (space, name, weight) for name in space.values}
    for tie in ties:
        tied = [vertices.pop(_named(at, name)) for at, name in sorted(tie)]
        vertices[tied[0].name] = _tied(tied)
    values = {name: space.values[own] for name, (space, own, _) in parts.items()}
    first = spaces[0]
    return Joint(
        first.degree, values, tuple(vertices.values()), frozenset(), first.pricing, unit_s, first.activations,
        known=first.known, parts=parts,
    )


def apart(picks: Mapping[str, OpStrategy | Placement], bodies: int) -> list[dict[str, OpStrategy | Placement]]:
    """What the vertices of each body pick, by their own names."""
    found: list[dict[str, OpStrategy | Placement]] = [{} for _ in range(bodies)]
    for name, picked in picks.items():
        at, _, own = name.partition(":")
        found[int(at)][own] = picked
    return found


def _named(at: int, name: str) -> str:
    return f"{at}:{name}"


def _weighted(vertex: Vertex, at: int, weight: float) -> Vertex:
    reads, writes = (tuple(_named(at, name) for name in names) for names in (vertex.reads, vertex.writes))
    return Vertex(
        _named(at, vertex.name), reads, writes,
        tuple(replace(choice, price=weight * choice.price, picks=_picks(choice, at)) for choice in vertex.choices),
    )


def _picks(choice: Choice, at: int) -> tuple[Pick, ...]:
    return tuple((_named(at, name), picked) for name, picked in choice.picks)


def _tied(vertices: Sequence[Vertex]) -> Vertex:
    """One vertex for parameters that lie alike, with the placements that all of them have."""
    tables = [{choice.writes: choice for choice in vertex.choices} for vertex in vertices]
    common = [placed for placed in tables[0] if all(placed in table for table in tables)]
    return Vertex(vertices[0].name, (), tuple(name for vertex in vertices for name in vertex.writes), tuple(
        Choice(
            (), placed * len(vertices), sum(table[placed].price for table in tables),
            tuple(pick for table in tables for pick in table[placed].picks),
        )
        for placed in common
    ))
