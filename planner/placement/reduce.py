"""Exact reductions of a space: same optimum, fewer and smaller vertices.

``prune`` drops choices that no choice of a neighbour can meet (arc consistency). ``contract`` merges two vertices
joined by a value that nothing else reads; of the pairs of choices that look the same from outside, the cheapest stays
(one step of bucket elimination: Dechter 1999). A view or a unary operation follows its producer one to one, so it
disappears without leaving a trace in the solver's problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from planner.placement.space import Choice, Space, Vertex

# A merged vertex may have as many choices as the larger of the two, or so many. Larger ones make the solver slower
# than the two vertices apart.
MOST_CHOICES = 24

_Ends = tuple[tuple[int, ...], tuple[int, ...]]
"""How some reads and some writes lie."""
_Side = tuple[tuple[int, ...], tuple[int, ...], Choice]
"""A choice, and how its outer reads and writes lie."""


def prune(space: Space) -> Space | None:
    """The space without choices that take part in no legal combination with a neighbour; None where nothing is left."""
    choices = {vertex.name: vertex.choices for vertex in space.vertices}
    waiting = dict.fromkeys(space.writer)
    while waiting:
        value = next(iter(waiting))
        del waiting[value]
        for vertex in _prune_value(space, value, choices):
            if not choices[vertex.name]:
                return None
            waiting.update(dict.fromkeys((*vertex.reads, *vertex.writes)))
    return space.with_vertices([replace(vertex, choices=choices[vertex.name]) for vertex in space.vertices])


def _prune_value(space: Space, value: str, choices: dict[str, tuple[Choice, ...]]) -> Iterator[Vertex]:
    """Make writer and readers of a value consistent; yields the vertices that lost choices."""
    writer, at = space.writer[value]
    for reader, slot in space.readers.get(value, ()):
        sources = dict.fromkeys(choice.writes[at] for choice in choices[writer.name])
        targets = dict.fromkeys(choice.reads[slot] for choice in choices[reader.name])
        legal = {(p, q) for p in sources for q in targets if space.conversion_price(value, p, q) is not None}
        met_sources, met_targets = {p for p, _ in legal}, {q for _, q in legal}
        if len(met_sources) < len(sources):
            choices[writer.name] = tuple(c for c in choices[writer.name] if c.writes[at] in met_sources)
            yield writer
        if len(met_targets) < len(targets):
            choices[reader.name] = tuple(c for c in choices[reader.name] if c.reads[slot] in met_targets)
            yield reader


def contract(space: Space) -> Space:
    """Merge neighbours until pinned vertices, values with several readers or large vertices stand between them."""
    vertices = {vertex.name: vertex for vertex in space.vertices}
    refused: set[tuple[str, str]] = set()
    while (pair := _next_pair(space, refused)) is not None:
        first, second = pair
        merged = _merge(space, first, second)
        if len(merged.choices) > max(len(first.choices), len(second.choices), MOST_CHOICES):
            refused.add((first.name, second.name))
            continue
        del vertices[first.name]
        del vertices[second.name]
        vertices[merged.name] = merged
        space = space.with_vertices(tuple(vertices.values()))
    return space


def _next_pair(space: Space, refused: set[tuple[str, str]]) -> tuple[Vertex, Vertex] | None:
    """The writer and the only reader of some value, the pair with the fewest combinations first."""
    best: tuple[Vertex, Vertex] | None = None
    for value, slots in space.readers.items():
        writer = space.writer[value][0]
        reader = slots[0][0]
        if any(vertex.name != reader.name for vertex, _ in slots) or writer.name == reader.name:
            continue
        if {writer.name, reader.name} & space.pinned or (writer.name, reader.name) in refused:
            continue
        if best is None or _combinations(writer, reader) < _combinations(*best):
            best = writer, reader
    return best


def _combinations(first: Vertex, second: Vertex) -> int:
    return len(first.choices) * len(second.choices)


def _merge(space: Space, first: Vertex, second: Vertex) -> Vertex:
    """One vertex for both. Values that only they read disappear into its choices."""
    names = {first.name, second.name}
    inner = {
        value for value in (*first.writes, *second.writes)
        if (slots := space.readers.get(value)) is not None and all(vertex.name in names for vertex, _ in slots)
    }
    all_reads, all_writes = (*first.reads, *second.reads), (*first.writes, *second.writes)
    inner_reads = [value for value in all_reads if value in inner]
    inner_writes = [value for value in all_writes if value in inner]
    # Mostly one value is between them, and read once.
    alone = len(inner_reads) == len(inner_writes) == 1
    cheapest: dict[_Ends, tuple[float, Choice, Choice]] = {}
    two_sides = _sides(second, inner)
    for inside, ones in _sides(first, inner).items():
        for other, twos in two_sides.items():
            read, written = inside[0] + other[0], inside[1] + other[1]
            if alone:
                between = space.conversion_price(inner_reads[0], written[0], read[0])
            else:
                pairs = zip(inner_reads, read, strict=True)
                between = _inner_price(space, pairs, dict(zip(inner_writes, written, strict=True)))
            if between is None:
                continue
            for reads, writes, one in ones:
                for more_reads, more_writes, two in twos:
                    outside = (reads + more_reads, writes + more_writes)
                    price = between + one.price + two.price
                    known = cheapest.get(outside)
                    if known is None or price < known[0]:
                        cheapest[outside] = price, one, two
    return Vertex(
        f"{first.name} + {second.name}",
        tuple(value for value in all_reads if value not in inner),
        tuple(value for value in all_writes if value not in inner),
        tuple(Choice(*outside, price, (*one.picks, *two.picks)) for outside, (price, one, two) in cheapest.items()),
    )


def _sides(vertex: Vertex, inner: set[str]) -> dict[_Ends, list[_Side]]:
    """The choices of a vertex by how inner values lie in them, each with how its other reads and writes lie."""
    reads, other_reads = _positions(vertex.reads, inner)
    writes, other_writes = _positions(vertex.writes, inner)
    sides: dict[_Ends, list[_Side]] = {}
    for choice in vertex.choices:
        inside = tuple([choice.reads[at] for at in reads]), tuple([choice.writes[at] for at in writes])
        outside = tuple([choice.reads[at] for at in other_reads]), tuple([choice.writes[at] for at in other_writes])
        sides.setdefault(inside, []).append((*outside, choice))
    return sides


def _positions(values: Sequence[str], inner: set[str]) -> tuple[list[int], list[int]]:
    """Positions of the inner values, and of the others."""
    return [at for at, v in enumerate(values) if v in inner], [at for at, v in enumerate(values) if v not in inner]


def _inner_price(space: Space, reads: Iterable[tuple[str, int]], written: Mapping[str, int]) -> float | None:
    """Units of the conversions of inner values, once per (value, target); None where one is illegal."""
    total = 0.0
    for value, target in dict.fromkeys(reads):
        price = space.conversion_price(value, written[value], target)
        if price is None:
            return None
        total += price
    return total
