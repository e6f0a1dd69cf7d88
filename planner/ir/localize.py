"""The literals of a node as one tensor rank needs them: sizes, bounds and counts of what it holds.

A literal changes only where the strategy shards the dim that it speaks of. Where ranks hold different amounts (six heads
over four ranks) it differs between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from planner.ir.body import Node
from planner.ir.placement import OpStrategy, Placement, local_extent, shard
from planner.ir.types import Extent, LocalArgument, RankSize

_Changes: TypeAlias = dict[str, LocalArgument]

_SHAPES = {
    "reshape": "shape", "view": "size", "_unsafe_view": "size", "expand": "size", "broadcast_to": "size",
    "full": "size", "zeros": "size", "ones": "size", "empty": "size",
    "new_full": "size", "new_zeros": "size", "new_ones": "size", "new_empty": "size",
}
"""The argument that holds the shape of the output."""

_COUNTS = {
    "conv1d": "groups", "conv2d": "groups", "conv3d": "groups", "convolution": "groups", "group_norm": "num_groups",
}
"""The argument that counts groups of channels (dim 1)."""


@dataclass(frozen=True, slots=True)
class _Ranks:
    """One rank of an axis, or all of them (``rank`` None)."""

    degree: int
    rank: int | None

    def size(self, extent: Extent, placement: Placement) -> Extent | RankSize:
        """The local extent of a placed dim."""
        sizes = [local_extent(extent, placement, self.degree, rank) for rank in range(self.degree)]
        if self.rank is None and len(set(sizes)) > 1 and isinstance(extent, int):
            return RankSize(extent, placement.unit, placement.segments)
        return sizes[self.rank or 0]


def localize(
    node: Node, strategy: OpStrategy, degree: int, rank: int | None = None
) -> tuple[tuple[str, LocalArgument], ...]:
    """A node's arguments on one rank of a tensor axis of ``degree`` ranks.

    ``rank`` None: for all ranks at once; what differs between them is a :class:`RankSize`. No shape may hold -1 on two
    dims; one that is inferred stays inferred.
    """
    changes = _changes(node, strategy, _Ranks(degree, rank)) if degree > 1 else {}
    return tuple((name, changes.get(name, argument)) for name, argument in node.arguments)


def _changes(node: Node, strategy: OpStrategy, ranks: _Ranks) -> _Changes:
    base, out = node.base, strategy.outputs[0]
    source = strategy.operands[0] if strategy.operands else out
    along = _along(node)
    if base in ("slice", "narrow") and source.state == "shard" and source.dim == along:
        return _slice(node, source, ranks)
    if out.state != "shard":
        return {}
    if base in _SHAPES and node.op != "view.dtype":
        return _shape(node, _SHAPES[base], 0, out, ranks)
    if base == "unflatten":
        return _unflatten(node, out, ranks)
    if base in ("split", "split_with_sizes") and out.dim == along:
        return _split(node, strategy, ranks)
    if base in _COUNTS and out.dim == 1:
        return _groups(node, out, ranks)
    if base == "repeat_interleave" and out.dim == along and node.argument("output_size") is not None:
        return {"output_size": ranks.size(node.type.shape[along], out)}
    return {}


def _along(node: Node) -> int:
    """The node's dim argument, counted from the front (-1: it has none)."""
    dim = dict(node.arguments).get("dim")
    return dim % node.type.rank if isinstance(dim, int) and node.type.rank else -1


def _shape(node: Node, name: str, first: int, out: Placement, ranks: _Ranks) -> _Changes:
    """A shape argument whose entries are the output's dims from ``first`` on."""
    shape = node.argument(name)
    at = out.dim - first
    if not isinstance(shape, tuple) or not 0 <= at < len(shape) or shape[at] == -1:
        return {}
    return {name: (*shape[:at], ranks.size(node.type.shape[out.dim], out), *shape[at + 1:])}


def _unflatten(node: Node, out: Placement, ranks: _Ranks) -> _Changes:
    """The sizes that a dim is parted into; the dim counts in the input, which has fewer dims."""
    sizes, dim = node.argument("sizes"), node.argument("dim")
    if not isinstance(sizes, tuple) or not isinstance(dim, int):
        return {}
    return _shape(node, "sizes", dim % (node.type.rank - len(sizes) + 1), out, ranks)


def _split(node: Node, strategy: OpStrategy, ranks: _Ranks) -> _Changes:
    """Local sizes of the outputs of a split. One size for all is the first's: only the last output may be smaller, and
    then it is so on every rank."""
    sizes = tuple(
        ranks.size(type_.shape[out.dim], out) for type_, out in zip(node.types, strategy.outputs, strict=True)
    )
    name = "split_sizes" if node.base == "split_with_sizes" else "split_size"
    return {name: sizes if isinstance(node.argument(name), tuple) else sizes[0]}


def _slice(node: Node, source: Placement, ranks: _Ranks) -> _Changes:
    """Local bounds of a slice that takes whole segments. One that takes the whole dim stays as it is: its end may lie beyond
    what a rank holds. A ``narrow`` says a length, which may not."""
    if not source.segments:
        return {"start": 0, "length": ranks.size(node.type.shape[source.dim], source)} if node.base == "narrow" else {}
    extent = sum(source.segments)
    if node.base == "narrow":
        start, length = _integer(node, "start") % extent, _integer(node, "length")
        return {
            "start": _between(0, start, source, ranks), "length": _between(start, start + length, source, ranks),
        }
    first, last = (bound if isinstance(bound, int) else None for bound in (node.argument("start"), node.argument("end")))
    start, end, _ = slice(first, last).indices(extent)
    return {"start": _between(0, start, source, ranks), "end": _between(0, end, source, ranks)}


def _between(start: int, stop: int, source: Placement, ranks: _Ranks) -> LocalArgument:
    """Local elements of the segments between two positions."""
    inside, at = [], 0
    for segment in source.segments:
        if start <= at < stop:
            inside.append(segment)
        at += segment
    return ranks.size(stop - start, shard(source.dim, tuple(inside), source.unit)) if inside else 0


def _groups(node: Node, out: Placement, ranks: _Ranks) -> _Changes:
    """The local number of groups of channels; one group in all means that the channels themselves are split."""
    name = _COUNTS[node.base]
    groups, channels = _integer(node, name), node.type.shape[1]
    if groups == 1 or not isinstance(channels, int):
        return {}
    inner = channels // groups
    segments = tuple(segment // inner for segment in out.segments)
    return {name: ranks.size(groups, shard(1, segments, max(out.unit // inner, 1)))}


def _integer(node: Node, name: str) -> int:
    value = node.argument(name)
    assert isinstance(value, int)
    return value
