"""The counted bound of several shapes of a chain at once: most of their numbers are small, and what an operation on arrays
takes is mostly its beginning.

Arrays of [ranks] are of all ranks of all shapes, one shape after the other. Nothing of a shape depends on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.search.frames import Moments, messages_of, moments_of
from planner.search.linear import Floats, Indices
from planner.search.places import Places, places_of
from planner.search.shape import Shape
from planner.search.stream import Stream
from planner.search.transients import least_transients
from planner.search.works import Work

FEW = 2
"""Times an even share of a run's blocks: so many on a rank are looked at first."""


@dataclass(frozen=True)
class RankCosts:
    """``seconds[run]``: [ranks, count], growing along a row; infinite where that many do not fit. ``before_s`` [ranks]: the
    part of it that is spent before the rank's own work; ``idle_s[run]`` [ranks]: the rank's own work without blocks of the
    run. Of one shape."""

    seconds: tuple[Floats, ...]
    before_s: Floats
    idle_s: tuple[Floats, ...]

    @cached_property
    def bound(self) -> float:
        """No step is shorter."""
        return float(max(_least_steps(table, 1)[0] for table in self.seconds))

    def own_s(self, run: int, rank: int, count: int) -> float:
        """What a rank with so many blocks of a run does in a step, at least; infinite where they do not fit."""
        return float(self.idle_s[run][rank] if not count else self.seconds[run][rank, count - 1] - self.before_s[rank])

    def most(self, run: int, limit_s: float) -> Indices:
        """Blocks of a run that each rank has at most in a plan quicker than ``limit_s``."""
        return np.asarray((self.seconds[run] < limit_s).sum(axis=1))


def _least_steps(seconds: Floats, shapes: int, count: int | None = None) -> Floats:
    """[shapes]: no step is shorter: a run's ``count`` blocks (as many as ``seconds`` [ranks, count] has columns) have room on
    the ranks from then on only."""
    last = (seconds.shape[1] if count is None else count) - 1
    return np.asarray(np.partition(seconds.reshape(shapes, -1), last, axis=1)[:, last])


@dataclass(frozen=True)
class Together:
    """The ranks of shapes that have as many ranks, micro-batches and bytes. ``known``: :func:`works` of the stream."""

    stream: Stream
    shapes: tuple[Shape, ...]
    known: tuple[Work, ...]

    @cached_property
    def places(self) -> Places:
        return places_of(self.stream.spans, self.shapes)

    @cached_property
    def moments(self) -> Moments:
        return moments_of(self.shapes)

    @property
    def _pipeline(self) -> int:
        return self.shapes[0].pipeline

    def _each(self, numbers: Sequence[float]) -> Floats:
        """[ranks]: a number of each shape."""
        return np.repeat(np.array(numbers), self._pipeline)

    @cached_property
    def before_s(self) -> Floats:
        """[ranks]: the least that the first micro-batch takes through the stages before a rank's first one."""
        stream, places = self.stream, self.places
        backward = [0 if shape.splits_backward else 1 for shape in self.shapes]
        seconds = np.array([work.first_s for work in self.known])[:, np.repeat(backward, self._pipeline)]
        least = np.where(places.begun, seconds, np.inf).min(axis=0)
        certain = (places.alone * seconds).sum(axis=0)
        sends_s = self._each([(1 + each) * stream.send.behind_s for each in backward])
        through = np.where(certain > 0, certain, least) + stream.context_s + sends_s
        before = np.zeros((len(self.shapes), self._pipeline))
        np.cumsum(through.reshape(before.shape)[:, :-1], axis=1, out=before[:, 1:])
        return before.ravel()

    @cached_property
    def own_s(self) -> Floats:
        """[ranks]: what a rank does whatever it has beside the forced blocks."""
        known = sum(forced * work.least_s for forced, work in zip(self.places.forced, self.known, strict=True))
        contexts_s = [shape.microbatches * shape.virtual * self.stream.context_s for shape in self.shapes]
        return np.asarray(self._each(contexts_s) + known)

    @cached_property
    def work_s(self) -> Floats:
        """[shapes]: no step is shorter, whatever the memory: the mean over the ranks of what they wait for and do."""
        contexts_s = np.array([shape.microbatches * shape.stages * self.stream.context_s for shape in self.shapes])
        blocks_s = sum(run.count * work.least_s for run, work in zip(self.stream.runs, self.known, strict=True))
        waits_s = self.before_s.reshape(-1, self._pipeline).sum(axis=1)
        return np.asarray((waits_s + contexts_s + blocks_s) / self._pipeline)

    @cached_property
    def transients(self) -> Floats:
        """[ranks]: bytes that are held transiently, at least."""
        return least_transients(self.stream, self.places)

    @cached_property
    def _all_late(self) -> bool:
        return bool(self.moments.late.all())

    @cached_property
    def _least_bytes(self) -> Floats:
        """[runs, constraints]: what one block occupies all the time, at least."""
        late = np.array([work.least_bytes for work in self.known])[:, None]
        if self._all_late:
            return np.broadcast_to(late, (len(self.known), len(self.moments.late)))
        early = np.array([work.without_gradients.least_bytes for work in self.known])[:, None]
        return np.where(self.moments.late, late, early)

    @cached_property
    def _room(self) -> Floats:
        """[constraints]: bytes for the blocks that are not forced."""
        stream, shape, moments = self.stream, self.shapes[0], self.moments
        held = (self.places.forced[:, moments.rank] * self._least_bytes).sum(axis=0)
        free = shape.capacity_bytes - shape.microbatches * stream.batch_bytes - self._buffers
        room = (free - self.transients)[moments.rank] - held
        beside = stream.crossing_bytes * moments.sent - stream.received_bytes * moments.received
        return np.asarray(room - stream.context_bytes * moments.alive - beside - stream.waiting_bytes * moments.waiting)

    @property
    def _buffers(self) -> Floats | float:
        """[ranks]: bytes of receive buffers, at least."""
        return self.stream.crossing_bytes * messages_of(self.shapes) if self.stream.crossing_bytes else 0.0

    def spared(self, run: int) -> Floats:
        """[constraints]: bytes for the blocks of a run."""
        return np.asarray(self._room + self.places.forced[run][self.moments.rank] * self._least_bytes[run])

    def others_s(self, run: int) -> Floats:
        """[ranks]: what passes before a rank's own work, and that work without blocks of a run, at least."""
        return np.asarray(self.before_s + self.own_s - self.places.forced[run] * self.known[run].least_s)

    @cached_property
    def seconds(self) -> tuple[Floats, ...]:
        """By run, [ranks, count], as in :class:`RankCosts`: with parts of blocks under every choice."""
        return tuple(self._table(run, its.count) for run, its in enumerate(self.stream.runs))

    def _table(self, run: int, columns: int) -> Floats:
        stream, moments = self.stream, self.moments
        table = np.full((moments.ranks, columns), np.inf)
        # Every stage of another rank has a block.
        most = [stream.blocks - shape.stages + shape.virtual for shape in self.shapes]
        counts = np.arange(1, min(table.shape[1], max(most)) + 1)
        least = counts * self._least_s(run, self.spared(run)[:, None] / counts)
        seconds = moments.worst(least) + self.others_s(run)[:, None]
        table[:, : len(counts)] = np.where(counts <= self._each(most)[:, None], seconds, np.inf)
        return table

    def _least_s(self, run: int, sizes: Floats) -> Floats:
        """[constraints, sizes]: the least seconds a step of one block of the run within so many bytes; infinite on ranks that
        can have none."""
        moments, least = self.moments, np.full(sizes.shape, np.inf)
        able = self.places.possible[run][moments.rank]
        for late, work in ((True, self.known[run]), (False, self.known[run].without_gradients)):
            mine = able & (moments.late == late)
            if mine.all():
                return work.seconds(moments.least, sizes)
            if mine.any():
                least[mine] = work.seconds(moments.least[mine], sizes[mine])
        return least

    def bounds(self, target_s: float) -> Floats:
        """[shapes]: no step is shorter, by the blocks that ranks can have: those of the longest run first, and those of others
        where some step may be quicker than the target."""
        bounds = np.zeros(len(self.shapes))
        for run in sorted(range(len(self.known)), key=lambda run: -self.stream.runs[run].count):
            if (bounds < target_s).any():
                bounds = np.maximum(bounds, self._least_steps(run))
        return bounds

    def _least_steps(self, run: int) -> Floats:
        """[shapes]: as far as one run's blocks say. Ranks share them about evenly: what more blocks on a rank take matters only
        where some rank can have all of the few that are looked at first."""
        count, shapes = self.stream.runs[run].count, len(self.shapes)
        few = FEW * -(-count // self._pipeline)
        if few < count:
            table = self._table(run, few)
            steps = _least_steps(table, shapes, count)
            if (table[:, -1].reshape(shapes, -1).min(axis=1) >= steps).all():
                return steps
        return _least_steps(self._table(run, count), shapes)

    def costs(self, shape: int) -> RankCosts:
        """Of one of the shapes."""
        return self.priced(shape, [table[self._of(shape)].copy() for table in self.seconds])

    def priced(self, shape: int, tables: Sequence[Floats]) -> RankCosts:
        """Of one of the shapes, with these seconds."""
        mine = self._of(shape)
        idle_s = tuple((self.others_s(run) - self.before_s)[mine] for run in range(len(tables)))
        return RankCosts(tuple(tables), self.before_s[mine], idle_s)

    def _of(self, shape: int) -> slice:
        return slice(shape * self._pipeline, (shape + 1) * self._pipeline)
