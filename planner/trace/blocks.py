"""Pass 9: the chain of blocks, found by structure alone.

Siblings in the module tree whose operations repeat are a family, whatever they are called; each member is a block. Where
the module tree shows no repetition (parameters in a list, one module called many times) the sequence of operations is
searched for its period. What lies before, between and after the repeats forms sections of its own. Where nothing repeats at
all, the chain is cut into sections (:mod:`sections`).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.ir.body import Node
from planner.ir.types import Argument, Ref, exact
from planner.ops.families import RESHAPES
from planner.trace.flat import FlatGraph
from planner.trace.sections import module_of, sections

RESHAPINGS = RESHAPES | {"squeeze", "unsqueeze", "view", "view_as"}
"""A result that has the operand's elements, all of them and in their order."""
LEAST_NODES = 3  # a family of smaller modules (the linears of one layer) is no chain of blocks
LEAST_COVERAGE = 0.5  # of the nodes: below, the period of the operations is tried as well


@dataclass(frozen=True)
class Segment:
    """A run of nodes that becomes a block. ``path``: its module's path, empty where there is none."""

    path: str
    nodes: tuple[Node, ...]
    repeats: bool


@dataclass(frozen=True)
class _Span:
    path: str
    first: int
    last: int  # exclusive


def find_blocks(graph: FlatGraph) -> tuple[Segment, ...]:
    """Partition the nodes outside the context, in execution order."""
    nodes = tuple(node for node in graph.nodes if node.name not in graph.context)
    tokens = _tokens(graph, nodes)
    spans = _families(nodes, tokens)
    if _coverage(spans) < LEAST_COVERAGE * len(nodes):
        periodic = _periodic(graph, nodes, tokens)
        if _coverage(periodic) > _coverage(spans):
            spans = periodic
    segments = _partition(nodes, spans) if spans else _sections(graph, nodes)
    return _sunk(_with_batches(graph, segments))


def _coverage(spans: Sequence[_Span]) -> int:
    return sum(span.last - span.first for span in spans)


def _tokens(graph: FlatGraph, nodes: Sequence[Node]) -> list[int]:
    """A number for each node: equal for equal operations on equally typed operands."""
    numbers: dict[object, int] = {}
    types = {node.name: node.types for node in graph.nodes} | {name: (t,) for name, t in graph.inputs.items()}

    def shape(argument: Argument) -> object:
        if isinstance(argument, Ref):
            return (argument.name.startswith("parameter:"), types[argument.name])
        return tuple(map(shape, argument)) if isinstance(argument, tuple) else exact(argument)

    keys = ((n.op, tuple(shape(value) for _, value in n.arguments), n.types, n.differentiable) for n in nodes)
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _families(nodes: Sequence[Node], tokens: Sequence[int]) -> list[_Span]:
    """Members of the outermost families of repeating siblings, extended over the gaps that repeat with them. Those of a list
    repeat where their operations do, whatever their sizes and numbers (a dilation, a rate that grows)."""
    operations = [node.op for node in nodes]
    members: dict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        parts = node.module.split(".") if node.module else []
        for depth in range(1, len(parts) + 1):
            members[".".join(parts[:depth])].append(index)
    children: dict[str, list[str]] = defaultdict(list)
    for path in members:
        children[path.rpartition(".")[0]].append(path)
    chosen: list[_Span] = []
    for parent in sorted(children, key=lambda path: (path.count(".") + bool(path), path)):
        inside = any(parent == span.path or parent.startswith(f"{span.path}.") for span in chosen)
        extended = list[_Span]()
        if not inside:
            listed = [path for path in children[parent] if path.rpartition(".")[2].isdigit()]
            extended = _family(nodes, tokens, members, children[parent]) or _family(nodes, operations, members, listed)
        if not any(a.first < b.last and b.first < a.last for a in extended for b in chosen):
            chosen.extend(extended)
    return sorted(chosen, key=lambda span: span.first)


def _family(
    nodes: Sequence[Node], tokens: Sequence[Hashable], members: Mapping[str, list[int]], siblings: Sequence[str]
) -> list[_Span]:
    """Spans of the siblings that repeat, and of those between them that resemble them; none where they interleave. Extended
    over their surroundings."""
    kinds = {path: tuple(tokens[index] for index in members[path]) for path in siblings}
    counts = Counter(kinds.values())

    def substantial(path: str) -> bool:
        return len(members[path]) >= LEAST_NODES and any(
            name.startswith("parameter:") for index in members[path] for name in nodes[index].operands
        )

    repeating = [path for path in siblings if counts[kinds[path]] > 1 and substantial(path)]
    if not repeating:
        return []
    least = min(len(members[path]) for path in repeating) / 2
    similar = [
        path for path in siblings
        if path in repeating or (path.rpartition(".")[2].isdigit() and substantial(path) and len(members[path]) >= least)
    ]
    spans = sorted((_Span(path, members[path][0], members[path][-1] + 1) for path in similar), key=lambda s: s.first)
    if any(following.first < span.last for span, following in itertools.pairwise(spans)):
        return []
    return _extended(spans, tokens)


def _extended(spans: list[_Span], tokens: Sequence[Hashable]) -> list[_Span]:
    """Give each member what its parent does around it (a norm before, a residual sum after), where all do the same.

    The nodes between two members are an epilogue of the one, as far as the nodes after the last member are alike, and
    a prologue of the next, if the nodes before the first member are alike.
    """
    gaps = {tuple(tokens[span.last:following.first]) for span, following in itertools.pairwise(spans)}
    if len(gaps) == 1:
        gap = gaps.pop()
        after = tokens[spans[-1].last:spans[-1].last + len(gap)]
        epilogue = next((i for i, (a, b) in enumerate(zip(gap, after)) if a != b), min(len(gap), len(after)))
        prologue = len(gap) - epilogue
        before = tokens[max(spans[0].first - prologue, 0):spans[0].first]
        if tuple(before) == gap[epilogue:]:
            return [_Span(span.path, span.first - prologue, span.last + epilogue) for span in spans]
    extended = [_Span(span.path, span.first, following.first) for span, following in itertools.pairwise(spans)]
    return [*extended, spans[-1]]


def _periodic(graph: FlatGraph, nodes: Sequence[Node], tokens: Sequence[int]) -> list[_Span]:
    """Spans of the longest periodic run of operations, cut where the fewest bytes cross."""
    best: tuple[int, int, int, int] = (0, 0, 0, 0)  # covered, -period, first, matched
    for period in range(1, len(tokens) // 2 + 1):
        run = 0
        for index in range(len(tokens) - period + 1):
            if index + period < len(tokens) and tokens[index] == tokens[index + period]:
                run += 1
                continue
            repeats = run // period + 1
            if repeats > 1:
                best = max(best, (repeats * period, -period, index - run, run))
            run = 0
    covered, negative, first, matched = best
    period = -negative
    if covered == 0 or not any(n.startswith("parameter:") for node in nodes[first:first + period] for n in node.operands):
        return []
    live = _crossing_bytes(graph, nodes)
    spare = (matched + period) % period
    offset = min(range(spare + 1), key=lambda shift: (live[first + shift + period], shift))
    start = first + offset
    count = (first + matched + period - start) // period
    return [_Span("", start + index * period, start + (index + 1) * period) for index in range(count)]


def _crossing_bytes(graph: FlatGraph, nodes: Sequence[Node]) -> list[int]:
    """Bytes of the values alive before each node."""
    last = {name: index for index, node in enumerate(nodes) for name in node.operands}
    change = [0] * (len(nodes) + 2)
    for index, node in enumerate(nodes):
        size = sum(type_.size_bytes() for type_ in node.types)
        change[index + 1] += size
        change[max(last.get(node.name, index), index) + 1] -= size
    totals, alive = [], 0
    for delta in change:
        alive += delta
        totals.append(alive)
    return totals


def _sunk(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Reshapes of what a later segment reads anyway are made there, where they are read: one value crosses instead of two that
    have the same elements."""
    order = [list(segment.nodes) for segment in segments]
    readers: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for at, nodes in enumerate(order):
        for node in nodes:
            for name in node.operands:
                readers[name].add((at, node.name))
    for at, nodes in enumerate(order):
        for node in [node for node in nodes if node.base in RESHAPINGS]:
            first = min((where for where, _ in readers[node.name]), default=at)
            source = node.operands[0]
            if first > at and any(where >= first and name != node.name for where, name in readers[source]):
                nodes.remove(node)
                target = order[first]
                target.insert(next(i for i, other in enumerate(target) if node.name in other.operands), node)
                readers[source] = (readers[source] - {(at, node.name)}) | {(first, node.name)}
    return tuple(replace(segment, nodes=tuple(nodes)) for segment, nodes in zip(segments, order, strict=True) if nodes)


def _with_batches(graph: FlatGraph, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """What is made for every sample of parameters alone (queries that a decoder begins with) belongs to the segment after it:
    nothing that it reads says how many samples there are."""
    found: list[Segment] = []
    waiting: tuple[Node, ...] = ()
    for at, segment in enumerate(segments):
        own = {node.name for node in segment.nodes}
        reads = {name for node in segment.nodes for name in node.operands} - own
        needs = any(type_.batched for node in segment.nodes for type_ in node.types)
        if needs and at + 1 < len(segments) and not any(graph.type_of(name).batched for name in reads):
            waiting += segment.nodes
        else:
            found.append(replace(segment, nodes=waiting + segment.nodes))
            waiting = ()
    return tuple(found)


def _sections(graph: FlatGraph, nodes: Sequence[Node]) -> tuple[Segment, ...]:
    *before, last = sections(graph, nodes)
    found = []
    for piece in before:
        own = {node.name for node in piece}
        found.append(Segment(module_of(piece, [node for node in nodes if node.name not in own]), piece, False))
    return (*found, Segment("", last, False))


def _partition(nodes: Sequence[Node], spans: Sequence[_Span]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    position = 0
    for span in spans:
        if position < span.first:
            segments.append(Segment("", tuple(nodes[position:span.first]), False))
        segments.append(Segment(span.path, tuple(nodes[span.first:span.last]), True))
        position = span.last
    if position < len(nodes):
        segments.append(Segment("", tuple(nodes[position:]), False))
    return tuple(segments)
