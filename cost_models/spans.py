"""Spans: how the groups of an axis lie over the levels of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, gcd, lcm, prod

import numpy as np
from numpy.typing import NDArray

from hardware_profiles import Cluster, Level, Link

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reach:
    """What a group has at one level: ``members`` sub-groups of the level below (ranks at the innermost), by ``link``;
    ``fewest``: ranks in the smallest of these, which bounds the links that they lend a ring."""

    members: int
    link: Link
    fewest: int = 1


@dataclass(frozen=True)
class Span:
    """How a group of ``size`` ranks lies over the levels that it crosses, innermost first. ``even``: every domain of a
    level holds equally many of its ranks, so ``size`` is the product of the members. ``others``: how other groups of its axis
    lie, which wait for each other."""

    size: int
    reaches: tuple[Reach, ...]
    others: tuple[Span, ...] = ()

    @cached_property
    def even(self) -> bool:
        return prod(reach.members for reach in self.reaches) == self.size

    @cached_property
    def lap_s(self) -> float:
        """Latencies on a chunk's way once around the ring of all ranks."""
        hops, outside = 0.0, self.size
        for reach in self.reaches:
            domains = ceil(outside / reach.members)
            hops += (reach.members - 1 if reach.link.torus else outside - domains) * reach.link.latency_s
            outside = domains
        return hops

    @cached_property
    def start_s(self) -> float:
        return max(reach.link.start_s for reach in self.reaches)

    @cached_property
    def ring_rate(self) -> float:
        """Bytes/s of one ring through all ranks: a level lends it the links of all ranks in a domain, the smallest counts. The
        axes of a torus carry their parts at the same time."""
        rates = [reach.fewest * reach.link.rate(reach.members) for reach in self.reaches if not reach.link.torus]
        axes = [reach.link.rate(reach.members) for reach in self.reaches if reach.link.torus]
        return min([*rates, sum(axes)] if axes else rates)

    @cached_property
    def inside(self) -> Span:
        """Of the ranks in one domain of the innermost level that it crosses."""
        return Span(self.reaches[0].members, self.reaches[:1])

    @cached_property
    def across(self) -> Span:
        """Of one rank in each of those domains; every such group has its own links."""
        ranks = self.reaches[0].members
        return Span(self.size // ranks, tuple(
            Reach(reach.members, reach.link, max(1, reach.fewest // ranks)) for reach in self.reaches[1:]
        ))

    @property
    def crosses(self) -> int:
        """Levels whose links the group uses."""
        return len(self.reaches)


def span_of(cluster: Cluster, size: int, stride: int) -> Span:
    """The span of an axis: ``size`` ranks a group, ``stride`` apart. Ranks are numbered innermost level first. A group that
    does not fit raises ValueError.

    Where groups fill whole domains, or domains whole groups, all lie alike. Of groups of 6 in nodes of 8 one is inside a node
    and the next is not.
    """
    return span_among(cluster, range(size), size, stride)


def span_among(cluster: Cluster, members: range, axis: int, stride: int) -> Span:
    """The same of some members of an axis of ``axis`` ranks. Raises ValueError."""
    if not members or stride < 1 or members.start < 0 or members[-1] * stride >= cluster.devices:
        raise ValueError(f"{len(members)} ranks at stride {members.step * stride} do not fit in {cluster.devices} devices")
    return _span(cluster.levels, members, axis, stride)


@lru_cache(maxsize=65536)
def _span(levels: tuple[Level, ...], members: range, axis: int, stride: int) -> Span:
    size, apart = len(members), members.step * stride
    inner = [level.size for level in levels[:-1]]
    whole = len(members) == axis
    if size == 1 or (whole and all(_divides(domain, size * stride) and _divides(domain, stride) for domain in inner)):
        return _span_alike(levels, size, stride)
    return _spans_at(levels, size, apart, _starts(levels[-1].size, lcm(*inner), members, axis, stride))


def _divides(one: int, other: int) -> bool:
    return one % other == 0 or other % one == 0


def _span_alike(levels: tuple[Level, ...], size: int, stride: int) -> Span:
    """The span of every group, where all lie alike."""
    reaches: list[Reach] = []
    inside = 1
    for level in levels:
        here = min(size, ceil(level.size / stride))
        if here > inside:
            reaches.append(Reach(here // inside, level.link, inside))
            inside = here
    return Span(size, tuple(reaches))


def _starts(devices: int, period: int, members: range, axis: int, stride: int) -> Numbers:
    """First ranks of the groups, one of each that lies alike: levels repeat after ``period`` ranks."""
    block = axis * stride
    turns = np.arange(0, period // gcd(block, period) * block, block)
    firsts = members.start * stride + turns[:, None] + np.arange(min(stride, period))
    last = (members[-1] - members.start) * stride
    return np.unique(firsts[firsts + last < devices] % period)


def _spans_at(levels: tuple[Level, ...], size: int, stride: int, starts: Numbers) -> Span:
    """The distinct spans of groups with these first ranks; that of most levels first."""
    columns: list[tuple[Link, Numbers, Numbers]] = []
    below = 1
    for level in levels:
        fewest, _ = _ranks_in(starts, stride, size, below)
        if stride >= below:  # Each rank is in a sub-domain of its own.
            _, members = _ranks_in(starts, stride, size, level.size)
        else:
            first, last = starts // below, (starts + (size - 1) * stride) // below
            members = _most_of_run(first, last, -(-level.size // below))
        columns.append((level.link, members, fewest))
        below = level.size
    rows = np.unique(np.stack([part for _, members, fewest in columns for part in (members, fewest)], axis=1), axis=0)
    spans = [
        Span(size, tuple(
            Reach(int(members), link, int(fewest))
            for (link, _, _), members, fewest in zip(columns, row[::2], row[1::2], strict=True) if members > 1
        ))
        for row in rows
    ]
    one, *others = sorted(dict.fromkeys(spans), key=lambda span: (-span.crosses, span.reaches[-1].fewest))
    return Span(size, one.reaches, tuple(others))


def _ranks_in(starts: Numbers, stride: int, size: int, domain: int) -> tuple[Numbers, Numbers]:
    """Of groups of ``size`` ranks, ``stride`` apart: the fewest and the most ranks in any domain that holds one."""
    if stride >= domain:
        return np.ones_like(starts), np.ones_like(starts)
    first, last = starts // domain, (starts + (size - 1) * stride) // domain
    # Domains in between repeat, and so do those at either end of groups that are long.
    period = stride // gcd(stride, domain)
    fewest, most = np.full_like(starts, size), np.zeros_like(starts)
    for at in [*range(period + 2), -1]:
        domains = last if at < 0 else np.minimum(first + at, last)
        low = -((starts - domains * domain) // stride)
        high = -((starts - (domains + 1) * domain) // stride)
        ranks = np.clip(high, 0, size) - np.clip(low, 0, size)
        fewest, most = np.minimum(fewest, ranks), np.maximum(most, ranks)
    return fewest, most


def _most_of_run(first: Numbers, last: Numbers, whole: int) -> Numbers:
    """The most of the numbers from ``first`` to ``last`` in any of the domains of ``whole`` numbers each."""
    ahead, behind = whole - first % whole, last % whole + 1
    within = last - first + 1
    between = np.where(last // whole - first // whole > 1, whole, 0)
    apart = np.maximum(np.maximum(ahead, behind), between)
    return np.where(first // whole == last // whole, within, apart)
