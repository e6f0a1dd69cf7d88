"""The candidates of a search by tensor axis: how each is placed, and bounds of its candidates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from planner.ir.plan import TensorAxis
from planner.search.candidates import Candidate, Candidates, Groups, Kind
from planner.search.prices import Placements, Prices, Unit, split_of


@dataclass(frozen=True)
class Bounded:
    """What is known of a kind. ``groups``: the ZeRO groups that no other beats; ``bounds``: of the step of each of its
    candidates that has those, in their order."""

    groups: tuple[Groups, ...]
    bounds: tuple[float, ...]

    @staticmethod
    def of(kind: Kind, prices: Prices) -> Bounded:
        """A kind's. The closed form knows one virtual stage from several, and no more of them."""
        first, *others = kind.virtuals
        least = replace(kind, virtuals=(first,))
        less = tuple((each.zero_groups, each.once_groups) for each in map(prices.without_beaten, least.candidates))
        bounds = [prices.bound(candidate) for candidate in replace(least, groups=less).candidates]
        if others:
            alike = replace(kind, virtuals=(others[0],), groups=less)
            bounds += [prices.bound(candidate) for candidate in alike.candidates] * len(others)
        return Bounded(less, tuple(bounds))

    def candidates(self, kind: Kind) -> Iterable[tuple[Candidate, float]]:
        """With the kind."""
        return zip(replace(kind, groups=self.groups).candidates, self.bounds, strict=True)


@dataclass(frozen=True)
class KnownAxis:
    """What is known of a tensor axis. ``placed``: by unit; ``bounds``: of each of its kinds, in their order; ``apart``: other
    axes of as many ranks that are not nearest each other, which are placed too, each with one bound."""

    axis: TensorAxis
    placed: Mapping[Unit, tuple[Placements, ...]]
    bounds: tuple[Bounded, ...]
    apart: Mapping[TensorAxis, float]


@dataclass(frozen=True)
class Apart:
    """Candidates over a tensor axis whose ranks are not nearest each other, with a ``bound`` of their step."""

    kinds: tuple[Kind, ...]
    bound: float

    def bounds(self, prices: Prices) -> dict[Candidate, float]:
        """Of each of them, less the ZeRO groups that another beats."""
        found = (pair for kind in self.kinds for pair in Bounded.of(kind, prices).candidates(kind))
        return {candidate: max(self.bound, bound) for candidate, bound in found}


class TensorAxes:
    """All of them. ``prices``: of the ``candidates``."""

    def __init__(self, prices: Prices, candidates: Candidates) -> None:
        self.prices = prices
        self.kinds = candidates.nearest
        self._of: dict[TensorAxis, list[Kind]] = {}
        for kind in self.kinds:
            self._of.setdefault(prices.axis(kind.mesh), []).append(kind)
        self._apart: dict[TensorAxis, list[Kind]] = {}
        for kind in candidates.apart:
            self._apart.setdefault(prices.axis(kind.mesh), []).append(kind)
        self._known: dict[TensorAxis, KnownAxis] = {}

    @property
    def each(self) -> list[TensorAxis]:
        """Those that are placed before the search begins, from one rank on."""
        return sorted(self._of)

    def find(self, axis: TensorAxis) -> KnownAxis:
        """Place and bound one, and those of as many ranks that are apart."""
        tensor, stride = axis
        bounds = tuple(Bounded.of(kind, self.prices) for kind in self._of[axis])
        apart = {other: self.prices.bound_over(other) for other in self._apart if other[0] == tensor and stride == 1}
        splits = {split_of(axis), *map(split_of, apart)}
        placed = {unit: self.prices.placed(unit) for split in splits for unit in self.prices.units(split)}
        self._known[axis] = KnownAxis(axis, placed, bounds, apart)
        return self._known[axis]

    def apart(self) -> Iterator[Apart]:
        """The others, as nodes of a search. Every axis of :attr:`each` must be known."""
        for axis, kinds in self._apart.items():
            yield Apart(tuple(kinds), self._known[axis[0], 1].apart[axis])

    def learn(self, known: KnownAxis) -> None:
        """What was found elsewhere."""
        for unit, placed in known.placed.items():
            self.prices.learn(unit, placed)
        self._known[known.axis] = known

    def bounds(self) -> dict[Candidate, float]:
        """Of all candidates, less the ZeRO groups that another beats, in their order. Every axis must be known."""
        of: dict[TensorAxis, Iterator[Bounded]] = {axis: iter(self._known[axis].bounds) for axis in self._of}
        known = ((kind, next(of[self.prices.axis(kind.mesh)])) for kind in self.kinds)
        return dict(pair for kind, bounded in known for pair in bounded.candidates(kind))
