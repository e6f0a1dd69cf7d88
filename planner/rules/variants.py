"""Variants: the shard placements that the values of a body may usefully have.

How a dim is cut is decided where it is structured (heads in an attention, the parts of a fused projection) but concerns
every value before and after: the weight of the projection must be cut along the same lines. So layouts are propagated
through the equations of all nodes, both ways, until nothing new appears. Each index begins with the plain split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

from planner.ir.body import Body, Node
from planner.ir.placement import Placement
from planner.ir.types import TensorType
from planner.rules.enumerate import equation_of, occurrences, operand_keys, output_key, plain_layout, site_of
from planner.rules.equation import Index
from planner.rules.layout import Layout, Part, canonical, join, put, take
from planner.rules.views import slice_bounds

LAYOUT_LIMIT = 12
"""Layouts of one dim: a body that knows more is structured beyond what a plan gains from."""

Place = tuple[str, int]
Table = dict[Place, set[Layout]]


def shard_variants(body: Body, degree: int) -> Mapping[str, tuple[Placement, ...]]:
    """Shard placements worth considering for each value of a body over ``degree`` ranks: inputs, parameters, buffers and
    nodes by name (an output of a node with several: :func:`~planner.rules.enumerate.output_key`)."""
    if degree == 1:
        return {}
    table: Table = defaultdict(set)
    readers: dict[str, list[tuple[Node, Index]]] = defaultdict(list)
    pending: dict[tuple[str, Index], tuple[Node, Index]] = {}
    for node in body.nodes:
        for index in equation_of(site_of(node, body.types)).indices:
            pending[node.name, index] = (node, index)
            for key, _ in occurrences(index, node):
                readers[key].append((node, index))
    _seed(body, degree, table)
    while pending:
        node, index = pending.pop(next(iter(pending)))
        for key in _spread(node, index, degree, table):
            pending |= {(other.name, item): (other, item) for other, item in readers[key]}
    return _placements(table)


def _seed(body: Body, degree: int, table: Table) -> None:
    """Plain splits of every dim, and the parts that slices of one value cut together."""
    types: dict[str, TensorType] = {value.name: value.type for value in (*body.inputs, *body.parameters, *body.buffers)}
    for node in body.nodes:
        types |= {output_key(node, at): type_ for at, type_ in enumerate(node.types)}
    for key, type_ in types.items():
        for dim, extent in enumerate(type_.shape):
            plain = canonical((extent,), 1, degree) if isinstance(extent, int) else None
            if plain:
                table[key, dim].add(plain)
    cuts: dict[Place, set[int]] = defaultdict(set)
    for node in body.nodes:
        if node.base in ("slice", "narrow"):
            site = site_of(node, body.types)
            dim = site.dim("dim", site.types[0].rank)
            extent = site.types[0].shape[dim]
            if isinstance(extent, int):
                cuts[operand_keys(node)[0], dim] |= {0, extent, *slice_bounds(site)[:2]}
    for place, points in cuts.items():
        ordered = sorted(points)
        layout = canonical([high - low for low, high in pairwise(ordered)], 1, degree)
        if layout:
            table[place].add(layout)


def _spread(node: Node, index: Index, degree: int, table: Table) -> Iterator[str]:
    """Carry the layouts of an index's places to all of them; the keys of the values that learned one."""
    places = list(occurrences(index, node))
    for layout in sorted(_known(index, places, degree, table)):
        carried = [(key, part, put(layout, part, degree)) for key, part in places]
        if any(here is None for _, _, here in carried):
            continue
        for key, part, here in carried:
            known = table[key, part.dim]
            if here is not None and here not in known and len(known) < LAYOUT_LIMIT:
                known.add(here)
                yield key


def _known(index: Index, places: list[tuple[str, Part]], degree: int, table: Table) -> set[Layout]:
    """Layouts of the index that one of its places has."""
    plain = plain_layout(index, degree)
    found = {plain} if plain else set()
    pieces: dict[tuple[int, int], set[Layout]] = defaultdict(set)
    for key, part in places:
        taken = {take(layout, part, degree) for layout in table[key, part.dim]} - {None}
        if part.piece is None:
            found |= {layout for layout in taken if layout}
        else:
            pieces[part.piece] |= {layout for layout in taken if layout}
    if pieces:
        found |= set(join(_tiles(index.extent, pieces, degree), degree))
    return found


def _tiles(extent: int, pieces: Mapping[tuple[int, int], set[Layout]], degree: int) -> list[list[Layout]]:
    """Layouts of consecutive pieces; what lies between them is one plain segment."""
    tiles, at = [], 0
    for (start, stop), layouts in sorted(pieces.items()):
        tiles += _gap(at, start, degree)
        tiles.append(sorted(layouts))
        at = stop
    return [*tiles, *_gap(at, extent, degree)]


def _gap(start: int, stop: int, degree: int) -> list[list[Layout]]:
    if start == stop:
        return []
    plain = canonical((stop - start,), 1, degree)
    return [[plain] if plain else []]


def _placements(table: Table) -> Mapping[str, tuple[Placement, ...]]:
    found: dict[str, list[Placement]] = defaultdict(list)
    for (key, dim), layouts in table.items():
        found[key] += [layout.placement(dim) for layout in layouts]
    return {key: tuple(sorted(placements)) for key, placements in found.items()}
