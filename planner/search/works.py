"""What blocks of one run take at least: the seconds of a step by the bytes that they may have, in parts or whole."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.search.linear import Floats, Indices
from planner.search.stream import Stream
from planner.search.tables import AT_TIMES, FORWARD, ONCE, OPTIMIZER, PERSISTENT


@dataclass(frozen=True)
class Work:
    """What blocks of one run take at least, of a stream and a number of micro-batches. ``gradients``: whether parts of blocks
    have any."""

    stream: Stream
    run: int
    microbatches: int
    gradients: bool = True
    known: dict[tuple[int, bool], Whole] = field(default_factory=dict, compare=False)

    @cached_property
    def without_gradients(self) -> Work:
        """Parts of blocks whose backward passes have not begun."""
        return replace(self, gradients=False, known={})

    @cached_property
    def least_s(self) -> float:
        """Seconds a step of one block."""
        return float(self._recompute_s.min() + self._zero_s.min())

    @cached_property
    def least_bytes(self) -> float:
        """That one block occupies all the time, at least."""
        return float(self._persistent + self._zero[0][0])

    @cached_property
    def first_s(self) -> tuple[float, float]:
        """Seconds of one block for one micro-batch: forward, and all passes."""
        (compute, traffic), floor = self.stream.single[self.run], self.stream.gathers.floor
        forward_s = compute.sums[:, FORWARD].min() + floor * traffic.sums[:, FORWARD].min()
        return float(forward_s), float(compute.passes_s.min() + floor * traffic.passes_s.min())

    @cached_property
    def _persistent(self) -> float:
        return float(self.stream.single[self.run][0].sums[:, PERSISTENT].min())

    @cached_property
    def _held(self) -> Floats:
        """By ZeRO stage: bytes of one block."""
        sums = self.stream.single[self.run][1].sums
        return np.asarray(sums[:, PERSISTENT] + self.gradients * sums[:, AT_TIMES])

    @cached_property
    def _recompute(self) -> tuple[Floats, Floats]:
        """Corners: saved bytes of a micro-batch, seconds a step."""
        return _hull(self.stream.single[self.run][0].sums[:, AT_TIMES], self._recompute_s)

    @cached_property
    def _recompute_s(self) -> Floats:
        """By choice of recomputation: seconds a step."""
        return np.asarray(self.microbatches * self.stream.single[self.run][0].passes_s)

    @cached_property
    def _zero(self) -> tuple[Floats, Floats]:
        """Corners: persistent bytes, seconds a step."""
        return _hull(self._held, self._zero_s)

    @cached_property
    def _zero_s(self) -> Floats:
        """By ZeRO stage: seconds a step."""
        traffic, stream = self.stream.single[self.run][1], self.stream
        each_s = stream.gathers.floor * traffic.passes_s
        return np.asarray(
            self.microbatches * each_s + stream.gradients.floor * traffic.sums[:, ONCE] + traffic.sums[:, OPTIMIZER]
        )

    @cached_property
    def _edges(self) -> tuple[Floats, Floats, Floats]:
        """Between the corners of both hulls: saved bytes of a micro-batch; bytes; and seconds a step that each edge gains."""
        (saved, work), (held, traffic) = self._recompute, self._zero
        return np.diff(saved), np.diff(held), -np.concatenate([np.diff(work), np.diff(traffic)])

    def whole(self, count: int, *, alone: bool) -> Whole:
        """Mixtures of so many blocks; ``alone``: on one stage, so that the largest peak and the largest share gathered meet."""
        if (count, alone) not in self.known:
            self.known[count, alone] = self._mixed(count, alone)
        return self.known[count, alone]

    def _mixed(self, count: int, alone: bool) -> Whole:
        compute, traffic = self.stream.single[self.run]
        floor, stream = self.stream.gathers.floor, self.stream
        ways = _mixtures(count, len(compute.names))
        work = self.microbatches * (ways @ compute.passes_s)
        peak = np.where(ways > 0, compute.peaks, 0.0).max(axis=1)
        shared = _mixtures(count, len(traffic.names))
        held = shared @ traffic.sums[:, PERSISTENT] + count * self._persistent
        # Only where all blocks share one stage does the largest gathered share meet the largest peak; no blocks gather nothing.
        together = alone or not count
        gathered = np.where(shared > 0, traffic.peaks, 0.0).max(axis=1) if together else traffic.peaks.min()
        each_s = self.microbatches * floor * traffic.passes_s
        once_s = stream.gradients.floor * traffic.sums[:, ONCE] + traffic.sums[:, OPTIMIZER]
        seconds = shared @ (each_s + once_s)
        saved = compute.sums[:, AT_TIMES]
        order = np.argsort(-saved, kind="stable")
        upto = np.cumsum(ways[:, order], axis=1)
        gradients = _first_least(shared, traffic.sums[:, AT_TIMES])
        return Whole(saved[order], upto, peak, work, held, gradients, held + gathered, seconds)

    def seconds(self, lives: Floats, sizes: Floats) -> Floats:
        """[lives, sizes]: the least seconds a step of one block of ``sizes`` bytes while ``lives`` micro-batches of it live.

        From its smallest form a block gains most seconds a byte first: by the steepest edges of both hulls, in turn."""
        (saved, work), (held, traffic), (steps, shares, gains) = self._recompute, self._zero, self._edges
        widths = np.empty((len(lives), len(gains)))
        widths[:, : len(steps)], widths[:, len(steps) :] = lives[:, None] * steps, shares
        with np.errstate(divide="ignore"):
            order = np.argsort(-(gains / widths), axis=1, kind="stable")
        widths, gains = widths[np.arange(len(lives))[:, None], order], gains[order]
        least = self._persistent + lives * saved[0] + held[0]
        spare = sizes - least[:, None]
        begins, widths = np.cumsum(widths, axis=1) - widths, np.maximum(widths, 1e-9)
        result, part = np.full(sizes.shape, work[0] + traffic[0]), np.empty(sizes.shape)
        for edge in range(widths.shape[1]):
            np.subtract(spare, begins[:, edge, None], out=part)
            part /= widths[:, edge, None]
            np.clip(part, 0.0, 1.0, out=part)
            part *= gains[:, edge, None]
            result -= part
        result[spare < 0] = np.inf
        return result


@dataclass(frozen=True)
class Falling:
    """The least seconds within a size: ``sizes`` growing, ``least_s`` falling."""

    sizes: Floats
    least_s: Floats

    @staticmethod
    def of(sizes: Floats, seconds: Floats) -> Falling:
        """Of what takes these sizes and seconds."""
        order = np.argsort(sizes, kind="stable")
        return Falling(sizes[order], np.minimum.accumulate(seconds[order]))

    def seconds(self, size: Floats) -> Floats:
        """Infinite where nothing is so small."""
        at = np.searchsorted(self.sizes, size, side="right") - 1
        return np.where(at < 0, np.inf, self.least_s[np.maximum(at, 0)])


@dataclass(frozen=True)
class Whole:
    """Mixtures of whole blocks. Of recomputation: ``saved`` [choices], bytes of a micro-batch in a block, falling; ``upto``
    [mixtures, choices], blocks of each choice and those before it; ``peak`` [mixtures], the largest; ``work_s`` [mixtures], a
    step. Of ZeRO stages: ``held`` [shares], bytes without gradients; ``gradients`` [shares, blocks + 1], of so many blocks at
    least; ``gathered`` [shares], ``held`` and what is gathered; ``shared_s`` [shares], a step."""

    saved: Floats
    upto: NDArray[np.int64]
    peak: Floats
    work_s: Floats
    held: Floats
    gradients: Floats
    gathered: Floats
    shared_s: Floats
    known: dict[int, tuple[Falling, Falling]] = field(default_factory=dict, compare=False)

    def _falling(self, begun: int) -> tuple[Falling, Falling]:
        """Seconds of the shares by bytes, without and with what is gathered, where so many blocks have gradients."""
        if begun not in self.known:
            more = self.gradients[:, begun]
            self.known[begun] = Falling.of(self.held + more, self.shared_s), Falling.of(self.gathered + more, self.shared_s)
        return self.known[begun]

    def seconds(self, spare: Floats, transients: Floats, begun: Indices) -> Floats:
        """[constraints, mixtures]: a step, where so many bytes are left beside what is kept and the least ``transients`` (the
        blocks' own peak and gathered share may be larger than those), and ``begun`` [constraints] blocks have gradients."""
        result = np.empty(spare.shape)
        for count in np.unique(begun).tolist():
            mine = begun == count
            held, gathered = self._falling(count)
            own = np.broadcast_to(transients, (len(spare), 1))[mine] - self.peak
            result[mine] = np.maximum(held.seconds(spare[mine]), gathered.seconds(spare[mine] + own))
        return self.work_s + result

    def kept(self, lives: Floats) -> Floats:
        """[constraints, mixtures]: bytes that are kept where blocks lie on stages with so many live micro-batches, ``lives``
        [constraints, blocks], growing: at least, since the blocks that save most have the fewest."""
        return np.asarray(np.cumsum(lives, axis=1) @ self._of_first)

    @cached_property
    def _of_first(self) -> Floats:
        """[blocks, mixtures]: what a micro-batch keeps that is alive in each of the first so many blocks, in none after them:
        what the last of their choices saves more than the next one does."""
        found = np.zeros((int(self.upto[0, -1]) + 1, len(self.upto)))
        more = self.saved - np.append(self.saved[1:], 0.0)
        np.add.at(found, (self.upto, np.arange(len(self.upto))[:, None]), more)
        return found[1:]


def _mixtures(count: int, kinds: int) -> NDArray[np.int64]:
    """All ways to write ``count`` as an ordered sum of ``kinds`` numbers, [ways, kinds]."""
    if kinds == 1:
        return np.array([[count]], dtype=np.int64)
    parts = []
    for first in range(count, -1, -1):
        rest = _mixtures(count - first, kinds - 1)
        parts.append(np.column_stack([np.full(len(rest), first, dtype=np.int64), rest]))
    return np.concatenate(parts)


def _first_least(shared: NDArray[np.int64], sizes: Floats) -> Floats:
    """[shares, blocks + 1]: the sizes of the first so many of a share's blocks, the smallest first."""
    order = np.argsort(sizes, kind="stable")
    upto = np.cumsum(shared[:, order], axis=1)
    blocks = np.arange(int(upto[0, -1]) + 1)
    taken = np.minimum(upto[:, None, :], blocks[None, :, None])
    return np.asarray(np.diff(taken, axis=2, prepend=0) @ sizes[order])


def _hull(sizes: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Corners of the lower convex hull, sizes growing and seconds falling."""
    corners: list[tuple[float, float]] = []
    for x, y in sorted(zip(sizes.tolist(), seconds.tolist(), strict=True)):
        if corners and y >= corners[-1][1]:
            continue
        while len(corners) > 1 and _above(corners[-2], corners[-1], (x, y)):
            corners.pop()
        corners.append((x, y))
    return np.array([x for x, _ in corners]), np.array([y for _, y in corners])


def _above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def works(stream: Stream, microbatches: int) -> tuple[Work, ...]:
    """Of every run."""
    return tuple(Work(stream, run, microbatches) for run in range(len(stream.runs)))


def lower_hull(counts: Indices, seconds: Floats) -> list[tuple[float, float]]:
    """(slope, value at 0) of the edges of the lower convex hull of seconds over counts."""
    corners: list[tuple[float, float]] = []
    for x, y in zip(counts.tolist(), seconds.tolist(), strict=True):
        while len(corners) > 1 and _above(corners[-2], corners[-1], (x, y)):
            corners.pop()
        corners.append((x, y))
    if len(corners) == 1:
        return [(0.0, corners[0][1])]
    edges = [((d - b) / (c - a), b, a) for (a, b), (c, d) in pairwise(corners)]
    return [(slope, y - slope * x) for slope, y, x in edges]
