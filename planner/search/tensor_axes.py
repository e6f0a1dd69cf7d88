"""The candidates of a search by tensor axis: how each is placed, and bounds of its candidates."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from planner.ir.plan import TensorAxis
from planner.search.candidates import Candidate, Candidates, Groups, Kind
from planner.search.prices import Axes, Placements, Prices, Unit


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
    """What is known of a tensor axis. ``placed``: by unit; ``bounds``: of each of its kinds, in their order; ``apart_s``: of
    all other axes of as many ranks, which are not nearest each other."""

    axis: TensorAxis
    placed: Mapping[Unit, tuple[Placements, ...]]
    bounds: tuple[Bounded, ...]
    apart_s: float


@dataclass(frozen=True)
class Apart:
    """Candidates over tensor axes of one degree whose ranks are not nearest each other, by how far apart they are, with a
    ``bound`` of their step."""

    tensor: int
    kinds: Mapping[int, tuple[Kind, ...]]
    bound: float = 0.0

    @property
    def axes(self) -> Axes:
        """Theirs."""
        return self.tensor, tuple(self.kinds)

    def beside(self, others: Collection[Hashable]) -> Apart:
        """Less those that take the memory of others."""
        less = {stride: tuple(kind for kind in kinds if _memory_of(kind) not in others) for stride, kinds in self.kinds.items()}
        return replace(self, kinds={stride: kinds for stride, kinds in less.items() if kinds})

    def parts(self, prices: Prices) -> list[Apart]:
        """Each axis by itself."""
        of_each = {stride: prices.bound_over((self.tensor, (stride,))) for stride in self.kinds}
        return [Apart(self.tensor, {stride: self.kinds[stride]}, max(self.bound, bound)) for stride, bound in of_each.items()]

    def bounds(self, prices: Prices) -> dict[Candidate, float]:
        """Of each candidate, less the ZeRO groups that another beats."""
        every = (kind for kinds in self.kinds.values() for kind in kinds)
        found = (pair for kind in every for pair in Bounded.of(kind, prices).candidates(kind))
        return {candidate: max(self.bound, bound) for candidate, bound in found}


def _memory_of(kind: Kind) -> Hashable:
    """What decides the memory of a kind's plans beside the tensor degree: wherever ranks are, they are placed alike."""
    return kind.mesh.pipeline, kind.mesh.data, kind.micro, kind.schedule


def apart_of(kinds: Iterable[Kind], prices: Prices) -> list[Apart]:
    """Of each degree those whose tensor ranks are not nearest each other; with no bound yet."""
    found: dict[int, dict[int, list[Kind]]] = {}
    for kind in kinds:
        tensor, stride = prices.axis(kind.mesh)
        found.setdefault(tensor, {}).setdefault(stride, []).append(kind)
    return [Apart(tensor, {stride: tuple(some) for stride, some in of.items()}) for tensor, of in found.items()]


class TensorAxes:
    """All of them. ``prices``: of the ``candidates``."""

    def __init__(self, prices: Prices, candidates: Candidates) -> None:
        self.prices = prices
        self.kinds = candidates.nearest
        self._of: dict[TensorAxis, list[Kind]] = {}
        for kind in self.kinds:
            self._of.setdefault(prices.axis(kind.mesh), []).append(kind)
        self._apart = {apart.tensor: apart for apart in apart_of(candidates.apart, prices)}
        self._known: dict[TensorAxis, KnownAxis] = {}

    @property
    def each(self) -> list[TensorAxis]:
        """Those that are placed before the search begins, from one rank on."""
        return sorted(self._of)

    def find(self, axis: TensorAxis) -> KnownAxis:
        """Place and bound one, and bound those of as many ranks that are apart."""
        tensor, stride = axis
        bounds = tuple(Bounded.of(kind, self.prices) for kind in self._of[axis])
        apart = self._apart.get(tensor) if stride == 1 else None
        apart_s = math.inf if apart is None else self.prices.bound_over(apart.axes)
        placed = {unit: self.prices.placed(unit) for unit in self.prices.units(tensor)}
        self._known[axis] = KnownAxis(axis, placed, bounds, apart_s)
        return self._known[axis]

    def apart(self) -> Iterator[Apart]:
        """The others, as nodes of a search, less those whose nearest fit nowhere. Every axis of :attr:`each` must be known."""
        for tensor, apart in self._apart.items():
            nearest = self._known[tensor, 1]
            yield replace(apart.beside(self._too_large(nearest)), bound=nearest.apart_s)

    def _too_large(self, known: KnownAxis) -> set[Hashable]:
        """What takes the memory of a kind that fits nowhere; unless an order may leave other choices."""
        if self.prices.request.constraints.forbidden:
            return set()
        pairs = zip(self._of[known.axis], known.bounds, strict=True)
        return {_memory_of(kind) for kind, bounded in pairs if not any(map(math.isfinite, bounded.bounds))}

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
