"""Exact reductions of a space: same optimum, fewer and smaller vertices.

``prune`` drops choices that no choice of a neighbour can meet (arc consistency). ``contract`` merges two vertices
joined by a value that nothing else reads; of the pairs of choices that look the same from outside, the cheapest stays
(one step of bucket elimination: Dechter 1999). A view or a unary operation follows its producer one to one, so it
disappears without leaving a trace in the solver's problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from planner.ir.placement import Placement
from planner.placement.space import Choice, Space, Vertex

# A merged vertex may have as many choices as the larger of the two, or so many. Larger ones make the solver slower
# than the two vertices apart.
MOST_CHOICES = 24


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
    reads, writes = (*first.reads, *second.reads), (*first.writes, *second.writes)
    outer_reads = [slot for slot, value in enumerate(reads) if value not in inner]
    outer_writes = [at for at, value in enumerate(writes) if value not in inner]
    cheapest: dict[tuple[tuple[Placement, ...], tuple[Placement, ...]], Choice] = {}
    for one in first.choices:
        for two in second.choices:
            placed, written = (*one.reads, *two.reads), (*one.writes, *two.writes)
            inside = zip(reads, placed, strict=True), dict(zip(writes, written, strict=True))
            price = _inner_price(space, inner, *inside)
            if price is None:
                continue
            price += one.price + two.price
            outside = tuple(placed[slot] for slot in outer_reads), tuple(written[at] for at in outer_writes)
            if outside not in cheapest or price < cheapest[outside].price:
                cheapest[outside] = Choice(*outside, price, (*one.picks, *two.picks))
    return Vertex(
        f"{first.name} + {second.name}",
        tuple(reads[slot] for slot in outer_reads),
        tuple(writes[at] for at in outer_writes),
        tuple(cheapest.values()),
    )


def _inner_price(
    space: Space, inner: set[str], reads: Iterable[tuple[str, Placement]], written: Mapping[str, Placement]
) -> float | None:
    """Units of the conversions of inner values, once per (value, target); None where one is illegal."""
    total = 0.0
    for value, target in dict.fromkeys(read for read in reads if read[0] in inner):
        price = space.conversion_price(value, written[value], target)
        if price is None:
            return None
        total += price
    return total
