"""The counted bound: a rank has whole blocks, so the ranks' largest counts by a given time must cover every run.

For each rank r and run i, ``seconds[r, n - 1]`` is a lower bound of the step of any plan in which r has n blocks of the run:
the first micro-batch comes through the stages before the rank's first one (and goes back, where backward passes are not split),
meanwhile or after that the rank does all micro-batches' work of its blocks, and once a step what they need. What n blocks
take at least within the bytes that are left is convex in the bytes (mixtures of choices allowed), so it is the lower convex
hull of one block's. The bound of a run of L blocks is then the L-th smallest number of the table: below it fewer than L
pairs (rank, block) are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from cost_models.live import interleaved_kept, interleaved_live
from cost_models.schedules import turn_length
from planner.evaluate import receive_buffer_bytes
from planner.search.linear import Floats, Indices
from planner.search.shape import Shape
from planner.search.stream import Stream
from planner.search.transients import forced_blocks, least_transients, possible_ranks
from planner.search.works import Work

SAMPLED = 32
"""Live vectors of a round of an interleaved schedule that are averaged (any of them is a constraint, so their mean is one)."""


MOST_WHOLE = 20
"""Up to so many blocks of a rank, the choices of whole blocks are told apart."""


@dataclass(frozen=True)
class RankCosts:
    """``seconds[run]``: [ranks, count], growing along a row; infinite where that many do not fit. ``before_s`` [ranks]: the
    part of it that is spent before the rank's own work; ``idle_s[run]`` [ranks]: the rank's own work without blocks of the
    run."""

    seconds: tuple[Floats, ...]
    before_s: Floats
    idle_s: tuple[Floats, ...]

    @cached_property
    def bound(self) -> float:
        """No step is shorter."""
        return max(float(np.partition(table, table.shape[1] - 1, axis=None)[table.shape[1] - 1]) for table in self.seconds)

    def own_s(self, run: int, rank: int, count: int) -> float:
        """What a rank with so many blocks of a run does in a step, at least; infinite where they do not fit."""
        return float(self.idle_s[run][rank] if not count else self.seconds[run][rank, count - 1] - self.before_s[rank])

    def most(self, run: int, limit_s: float) -> Indices:
        """Blocks of a run that each rank has at most in a plan quicker than ``limit_s``."""
        return np.asarray((self.seconds[run] < limit_s).sum(axis=1))


@dataclass(frozen=True)
class _Frame:
    """What only the schedule decides. ``rank_of`` [stages]. Memory constraints, one a row: ``rank``; ``lives`` [constraints,
    virtual stages]: live micro-batches of the rank's ``stages``; ``least``: of its emptiest stage; ``alive``, ``sent``,
    ``received``: of all its stages, of those that send on, and of those that receive. ``messages`` [ranks]: receive buffers, in
    messages. ``begun`` [constraints, virtual stages]: 1 where the stage has gradients."""

    rank_of: Indices
    rank: Indices
    stages: Indices
    lives: Floats
    least: Floats
    alive: Floats
    sent: Floats
    received: Floats
    messages: Floats
    begun: Indices


@lru_cache(maxsize=4096)
def _frame(shape_key: tuple[str, int, int, int]) -> _Frame:
    name, pipeline, virtual, microbatches = shape_key
    shape = Shape(name, pipeline, virtual, microbatches, 0.0)  # type: ignore[arg-type]
    rank_of, crosses = shape.ranks, shape.crosses
    last = int(rank_of[-1])
    messages = np.zeros(pipeline)
    for stage in range(shape.stages):
        messages[rank_of[stage]] += receive_buffer_bytes(
            shape.schedule, stage, shape.stages, microbatches, int(crosses[stage]), int(crosses[stage + 1]), virtual
        )
    found = _constraints(shape)
    lives, begun = np.moveaxis(np.concatenate(found), 1, 0)
    at = np.repeat(np.arange(pipeline), list(map(len, found)))
    # The last stage sends nothing on; it is the last of its rank, but under zbv the rank's stages are listed likewise.
    ends = np.where(at == last, lives[:, -1], 0.0)
    begins = np.where(at == 0, lives[:, 0], 0.0)
    alive = lives.sum(axis=1)
    stages = np.array([shape.owned(rank) for rank in range(pipeline)])[at]
    return _Frame(
        rank_of, at, stages, lives, lives.min(axis=1), alive, alive - ends, alive - begins, messages, begun.astype(np.int64)
    )


def _constraints(shape: Shape) -> list[Floats]:
    """Per rank, some constraints on what is there at once, [constraints, 2, virtual stages]: instants; where rounds of an
    interleaved schedule repeat, one when all stages have gradients, and the mean of all of these."""
    virtual, total = shape.virtual, shape.virtual * shape.microbatches
    turn = turn_length(shape.pipeline, shape.microbatches)
    kept = np.array(interleaved_kept(shape.schedule, shape.pipeline, virtual, shape.microbatches))[:, None]
    # From the second round on, at the latest, all stages have gradients: as soon as the first one's backward passes begin.
    first = np.minimum(virtual * turn, total - kept)
    if not shape.schedule.startswith("interleaved") or (first < (virtual - 1) * turn).any():
        return [shape.instants(rank).astype(float) for rank in range(shape.pipeline)]
    last = np.minimum(first + virtual * turn - 1, total - kept)
    released = first + ((last - first) * np.linspace(0, 1, SAMPLED)).astype(np.int64)
    live = interleaved_live(kept + released, released, virtual, turn).astype(float)
    some = np.stack([live[:, 0], live.mean(axis=1)], axis=1)
    return list(np.stack([some, np.ones_like(some)], axis=2))


@dataclass(frozen=True)
class Ranks:
    """The ranks of a candidate. ``known``: :func:`works` of the stream, to share."""

    stream: Stream
    shape: Shape
    known: tuple[Work, ...]

    @cached_property
    def _frame(self) -> _Frame:
        return _frame((self.shape.schedule, self.shape.pipeline, self.shape.virtual, self.shape.microbatches))

    @cached_property
    def _edges(self) -> tuple[list[int], list[int]]:
        """Of each run, the first and the last stage that can have it."""
        runs, stages = range(len(self.stream.runs)), self.shape.stages
        return [self.stream.first_stage(run, stages) for run in runs], [self.stream.last_stage(run, stages) for run in runs]

    @cached_property
    def possible(self) -> NDArray[np.bool_]:
        """[runs, ranks]: whether a rank can have blocks of a run."""
        return possible_ranks(self.stream, self.shape)

    @cached_property
    def forced(self) -> Indices:
        """[runs, ranks]: blocks of a run that must lie on a rank."""
        return forced_blocks(self.stream, self.possible)

    @cached_property
    def before_s(self) -> Floats:
        """[ranks]: the least that the first micro-batch takes through the stages before a rank's first one."""
        return _before(self.stream, self.shape, self.known, *self._edges)

    @cached_property
    def own_s(self) -> Floats:
        """[ranks]: what a rank does whatever it has beside the forced blocks."""
        known = sum(forced * work.least_s for forced, work in zip(self.forced, self.known, strict=True))
        return np.asarray(self.shape.microbatches * self.shape.virtual * self.stream.context_s + known)

    @cached_property
    def work_s(self) -> float:
        """No step is shorter, whatever the memory: the mean over the ranks of what they wait for and do."""
        contexts_s = self.shape.microbatches * self.shape.stages * self.stream.context_s
        blocks_s = sum(run.count * work.least_s for run, work in zip(self.stream.runs, self.known, strict=True))
        return float(self.before_s.sum() + contexts_s + blocks_s) / self.shape.pipeline

    @cached_property
    def transients(self) -> Floats:
        """[ranks]: bytes that are held transiently, at least."""
        return least_transients(self.stream, self.possible)

    @cached_property
    def _late(self) -> NDArray[np.bool_]:
        """[constraints]: whether all stages have gradients."""
        return np.asarray(self._frame.begun.all(axis=1))

    @cached_property
    def _least_bytes(self) -> Floats:
        """[runs, constraints]: what one block occupies all the time, at least."""
        sizes = [(work.without_gradients.least_bytes, work.least_bytes) for work in self.known]
        return np.array([np.where(self._late, late, early) for early, late in sizes])

    @cached_property
    def room(self) -> Floats:
        """[constraints]: bytes for the blocks that are not forced."""
        stream, shape, frame = self.stream, self.shape, self._frame
        held = (self.forced[:, frame.rank] * self._least_bytes).sum(axis=0)
        free = shape.capacity_bytes - shape.microbatches * stream.batch_bytes - stream.crossing_bytes * frame.messages
        room = (free - self.transients)[frame.rank] - held
        beside = stream.crossing_bytes * frame.sent - stream.received_bytes * frame.received
        return np.asarray(room - stream.context_bytes * frame.alive - beside)

    @cached_property
    def costs(self) -> RankCosts:
        """With parts of blocks under every choice."""
        return self._priced([self._table(run) for run in range(len(self.stream.runs))])

    def sharper(self, limit_s: float) -> RankCosts:
        """With whole blocks under every choice, as far as plans quicker than the limit have them."""
        tables = []
        for run, quick in enumerate(self.costs.seconds):
            table = quick.copy()
            most = int(min(self.costs.most(run, limit_s).max(), MOST_WHOLE))
            for count in range(1, most + 1) if self.stream.runs[run].count > 1 else ():
                seconds = self._whole(run, count) + self._others(run)
                table[:, count - 1] = np.where(self.possible[run], np.maximum(table[:, count - 1], seconds), np.inf)
            tables.append(np.maximum.accumulate(table, axis=1))
        return self._priced(tables)

    def _priced(self, tables: Sequence[Floats]) -> RankCosts:
        idle_s = tuple(self._others(run) - self.before_s for run in range(len(tables)))
        return RankCosts(tuple(tables), self.before_s, idle_s)

    def _others(self, run: int) -> Floats:
        return np.asarray(self.before_s + self.own_s - self.forced[run] * self.known[run].least_s)

    def _spared(self, run: int) -> Floats:
        """[constraints]: bytes for the blocks of a run."""
        return np.asarray(self.room + self.forced[run][self._frame.rank] * self._least_bytes[run])

    def _worst(self, seconds: Floats) -> Floats:
        """Of each rank's constraints, the one that costs most."""
        return np.asarray(np.maximum.reduceat(seconds, np.flatnonzero(np.append(True, np.diff(self._frame.rank) > 0)), axis=0))

    def _table(self, run: int) -> Floats:
        stream, shape = self.stream, self.shape
        table = np.full((shape.pipeline, stream.runs[run].count), np.inf)
        # Every stage of another rank has a block.
        counts = np.arange(1, min(table.shape[1], stream.blocks - shape.stages + shape.virtual) + 1)
        least = np.empty((len(self._late), len(counts)))
        for late, work in ((True, self.known[run]), (False, self.known[run].without_gradients)):
            mine = self._late == late
            if mine.any():
                least[mine] = counts * work.seconds(self._frame.least[mine], self._spared(run)[mine, None] / counts)
        seconds = self._worst(least) + self._others(run)[:, None]
        table[:, : len(counts)] = np.where(self.possible[run][:, None], seconds, np.inf)
        return table

    def _whole(self, run: int, count: int) -> Floats:
        """[ranks]: the least seconds a step of ``count`` whole blocks."""
        whole = self.known[run].whole(count, alone=self.shape.virtual == 1)
        transients = self.transients[self._frame.rank, None]
        lives, begun = self._least_lives(run, count)
        seconds = whole.seconds(self._spared(run)[:, None] - whole.kept(lives), transients, begun)
        return np.asarray(self._worst(seconds).min(axis=1))

    def least_s(self, run: int, counts: Indices) -> Floats:
        """[..., ranks]: no step is shorter in which the ranks have so many blocks of a run, whatever the memory."""
        return np.asarray(self._others(run) + counts * self.known[run].least_s)

    def laid_s(self, run: int, rank: int, ways: Indices) -> Floats:
        """[ways]: no step is shorter in which a rank's stages have ``ways`` [ways, virtual stages] blocks of a run; infinite
        where they do not fit."""
        frame, counts = self._frame, ways.sum(axis=1)
        rows, seconds = np.flatnonzero(frame.rank == rank), np.full(len(ways), np.inf)
        spared, transients = self._spared(run)[rows], self.transients[rank : rank + 1, None]
        for count in np.unique(counts):
            whole, mine = self.known[run].whole(int(count), alone=self.shape.virtual == 1), np.flatnonzero(counts == count)
            worst = np.zeros((len(mine), len(whole.work_s)))
            for lives, begun, free in zip(frame.lives[rows], frame.begun[rows], spared, strict=True):
                order = np.argsort(lives, kind="stable")
                blocks = np.repeat(np.tile(lives[order], len(mine)), ways[mine][:, order].ravel()).reshape(len(mine), count)
                worst = np.maximum(worst, whole.seconds(free - whole.kept(blocks), transients, ways[mine] @ begun))
            seconds[mine] = worst.min(axis=1)
        return np.asarray(seconds + self._others(run)[rank])

    def _least_lives(self, run: int, count: int) -> tuple[Floats, Indices]:
        """[constraints, blocks]: live micro-batches of the stages that so many blocks of a run lie on, growing, at least: one
        block is on every stage that can have no other run's, all others are on the emptiest stage. [constraints]: how many of
        the blocks have gradients, at least."""
        frame, stages = self._frame, np.arange(self.shape.stages)
        can = np.array([(first <= stages) & (stages <= last) for first, last in zip(*self._edges, strict=True)])
        must = can[run] & (can.sum(axis=0) == 1)
        on = np.where(must[frame.stages], frame.lives, np.inf)
        free = np.where(can[run][frame.stages], frame.lives, np.inf).min(axis=1)
        certain = np.isfinite(on).sum(axis=1)
        others = np.arange(count) < count - certain[:, None]
        slots = np.sort(np.concatenate([on, np.where(others, free[:, None], np.inf)], axis=1), axis=1)[:, :count]
        # A rank that cannot have the run is left out by who asks.
        some = np.where(can[run][frame.stages], frame.begun, 1).min(axis=1) * np.maximum(count - certain, 0)
        begun = np.minimum((must[frame.stages] * frame.begun).sum(axis=1) + some, count)
        return np.where(np.isfinite(slots), slots, 0.0), begun


def _before(
    stream: Stream, shape: Shape, of_run: tuple[Work, ...], first: list[int], last: list[int]
) -> Floats:
    """[ranks]: the least that the first micro-batch takes through the stages before a rank's first one."""
    backward = 0 if shape.splits_backward else 1
    stages = np.arange(shape.pipeline)
    least, certain = np.full(shape.pipeline, np.inf), np.zeros(shape.pipeline)
    for run, work in enumerate(of_run):
        here = (first[run] <= stages) & (stages <= last[run])
        seconds = work.first_s[backward]
        least[here] = np.minimum(least[here], seconds)
        if first[run] == last[run]:
            certain[here] += stream.runs[run].count * seconds
    through = np.where(certain > 0, certain, least) + stream.context_s + (1 + backward) * stream.send_s
    return np.append(0.0, np.cumsum(through)[:-1])
