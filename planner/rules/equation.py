"""Equations: a sharding rule as data.

An equation names the indices of an operation, as einsum does, and says where each lies in every operand and output. To
shard an index over the ranks is legal by construction where the operation does the same work for each of its positions:

==================================  =======================  ===================================================
a tensor that                       is                       because
==================================  =======================  ===================================================
has the index                       ``shard``                value and gradient are local to the position
is an operand without it            ``shared``               each rank contributes its positions to the gradient
is an output without it             ``partial``              the operation adds up over the index (a contraction)
==================================  =======================  ===================================================

(An operand without gradient is ``replicate`` instead of ``shared``.) An output may also be declared ``replicate``: the
operation then completes its value with collectives of its own. Besides, an operation may be *linear* in some operands
together: their ``partial`` values give ``partial`` outputs; all others are as without the index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.ir.body import Node
from planner.ir.placement import PARTIAL, Placement, Transfer
from planner.ir.types import Argument, Extent, TensorType, references
from planner.rules.layout import Part

Letters = tuple[str, ...]
"""One name of an index for each dim of a tensor; empty where the dim cannot be sharded."""


@dataclass(frozen=True)
class Site:
    """A node as a rule sees it: with the types of its operands (of a ``getitem``: of what it picks)."""

    node: Node
    types: tuple[TensorType, ...]

    @cached_property
    def _positions(self) -> Mapping[str, tuple[int, ...]]:
        table, at = {}, 0
        for name, argument in self.node.arguments:
            count = len(references(argument))
            table[name] = tuple(range(at, at + count))
            at += count
        return table

    def positions(self, name: str) -> tuple[int, ...]:
        """Positions among the operands of the tensors in an argument (none: it is a literal or absent)."""
        return self._positions.get(name, ())

    def position(self, name: str) -> int | None:
        """Position of the argument's only tensor, or None."""
        found = self.positions(name)
        return found[0] if found else None

    def literal(self, name: str, default: Argument = None) -> Argument:
        """The argument as it stands, ``default`` where the schema has none of that name."""
        return dict(self.node.arguments).get(name, default)

    def integer(self, name: str, default: int = 0) -> int:
        value = self.literal(name, default)
        return value if isinstance(value, int) else default

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers; one integer is a list of one, None the empty list."""
        value = self.literal(name)
        items = value if isinstance(value, tuple) else (value,)
        return tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool))

    def dim(self, name: str, rank: int, default: int = 0) -> int:
        """A dim argument, counted from the front."""
        value = self.integer(name, default)
        return value + rank if value < 0 else value

    def dims(self, name: str, rank: int) -> tuple[int, ...]:
        return tuple(dim + rank if dim < 0 else dim for dim in self.integers(name))

    @property
    def outputs(self) -> tuple[TensorType, ...]:
        return self.node.types


@dataclass(frozen=True, slots=True)
class Index:
    """One index: ``operands``/``outputs`` align with the node's. ``forward``/``backward``: collectives inside."""

    name: str
    extent: int
    operands: tuple[Part | None, ...]
    outputs: tuple[Part | Placement, ...]
    forward: tuple[Transfer, ...] = ()
    backward: tuple[Transfer, ...] = ()


@dataclass(frozen=True, slots=True)
class Equation:
    """The rule of one node. ``linear``: sets of operand positions in which the operation is jointly linear."""

    indices: tuple[Index, ...] = ()
    linear: tuple[frozenset[int], ...] = ()


def linear(*sets: Sequence[int | None]) -> tuple[frozenset[int], ...]:
    """Sets of operand positions; one that mentions an absent operand is dropped."""
    return tuple(frozenset(at for at in group if at is not None) for group in sets if None not in group)


def make_index(
    site: Site, name: str, extent: Extent, operands: Mapping[int | None, Part], outputs: Mapping[int, Part],
    otherwise: Placement = PARTIAL,
) -> tuple[Index, ...]:
    """The index, or nothing where its extent depends on the batch. ``otherwise``: outputs that it does not appear in."""
    if not isinstance(extent, int) or extent < 2:
        return ()
    return (Index(
        name, extent,
        tuple(operands.get(at) for at in range(len(site.types))),
        tuple(outputs.get(at, otherwise) for at in range(len(site.outputs))),
    ),)


def spell(
    site: Site, operands: Sequence[Letters], outputs: Sequence[Letters], contracted: Sequence[str] = (),
) -> tuple[Index, ...]:
    """Indices of an equation in letters. A letter without an output is kept only if the operation adds up over it
    (``contracted``). Dims of extent 1 are taken to be broadcast: they lack the index."""
    spelled = (*zip(operands, site.types, strict=True), *zip(outputs, site.outputs, strict=True))
    if any(len(letters) != type_.rank for letters, type_ in spelled):
        return ()  # a form of the operation that the rule does not speak of
    indices: list[Index] = []
    for letter in dict.fromkeys(name for letters in (*operands, *outputs) for name in letters if name):
        if any(letters.count(letter) > 1 for letters in (*operands, *outputs)):
            continue  # a diagonal
        lies = [_lie(letter, letters, type_) for letters, type_ in zip(operands, site.types, strict=True)]
        ends = [_lie(letter, letters, type_) for letters, type_ in zip(outputs, site.outputs, strict=True)]
        extents = {extent for _, extent in filter(None, (*lies, *ends))}
        if len(extents) != 1 or (None in ends and letter not in contracted):
            continue
        extent = extents.pop()
        indices += make_index(
            site, letter, extent,
            {at: lie[0] for at, lie in enumerate(lies) if lie}, {at: end[0] for at, end in enumerate(ends) if end},
        )
    return tuple(indices)


def _lie(letter: str, letters: Letters, type_: TensorType) -> tuple[Part, Extent] | None:
    """Where a letter lies in a tensor, with its extent."""
    found = [dim for dim, name in enumerate(letters) if name == letter and type_.shape[dim] != 1]
    return (Part(found[0]), type_.shape[found[0]]) if found else None


def aligned(type_: TensorType, rank: int) -> Letters:
    """Letters of a tensor that broadcasts to ``rank`` dims."""
    return tuple(f"dim {dim + rank - type_.rank}" for dim in range(type_.rank))


def without(letters: Letters, dims: Sequence[int]) -> Letters:
    """The letters with those dims made unshardable."""
    return tuple("" if dim in dims else name for dim, name in enumerate(letters))


def dropped(letters: Letters, dims: Sequence[int]) -> Letters:
    """The letters with those dims taken out."""
    return tuple(name for dim, name in enumerate(letters) if dim not in dims)
