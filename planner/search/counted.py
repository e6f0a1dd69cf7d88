"""The counted bound: a rank has whole blocks, so the ranks' largest counts by a given time must cover every run.

For each rank r and run i, ``seconds[r, n - 1]`` is a lower bound of the step of any plan in which r has n blocks of the run:
the first micro-batch comes through the stages before the rank's first one (and goes back, where backward passes are not split),
meanwhile or after that the rank does all micro-batches' work of its blocks, and once a step what they need. What n blocks
take at least within the bytes that are left is convex in the bytes (mixtures of choices allowed), so it is the lower convex
hull of one block's. The bound of a run of L blocks is then the L-th smallest number of the table: below it fewer than L
pairs (rank, block) are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.search.frames import Frame, frame_of
from planner.search.linear import Floats, Indices
from planner.search.places import can_lie
from planner.search.shape import Shape
from planner.search.stream import Stream
from planner.search.together import RankCosts, Together
from planner.search.works import Work

MOST_WHOLE = 20
"""Up to so many blocks of a rank, the choices of whole blocks are told apart."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a candidate. ``known``: :func:`works` of the stream, to share; ``among``: other shapes that were counted
    with this one, and its place there."""

    stream: Stream
    shape: Shape
    known: tuple[Work, ...]
    among: tuple[Together, int] | None = None

    @cached_property
    def _alone(self) -> Together:
        return Together(self.stream, (self.shape,), self.known)

    @cached_property
    def _frame(self) -> Frame:
        return frame_of(self.shape)

    @property
    def work_s(self) -> float:
        """No step is shorter, whatever the memory."""
        return float(self._alone.work_s[0])

    @cached_property
    def costs(self) -> RankCosts:
        """With parts of blocks under every choice."""
        together, place = self.among or (self._alone, 0)
        return together.costs(place)

    def sharper(self, limit_s: float) -> RankCosts:
        """With whole blocks under every choice, as far as plans quicker than the limit have them."""
        tables, possible = [], self._alone.places.possible
        for run, quick in enumerate(self.costs.seconds):
            table = quick.copy()
            most = int(min(self.costs.most(run, limit_s).max(), MOST_WHOLE))
            for count in range(1, most + 1) if self.stream.runs[run].count > 1 else ():
                seconds = self._whole(run, count) + self._alone.others_s(run)
                table[:, count - 1] = np.where(possible[run], np.maximum(table[:, count - 1], seconds), np.inf)
            tables.append(np.maximum.accumulate(table, axis=1))
        return self._alone.priced(0, tables)

    def _whole(self, run: int, count: int) -> Floats:
        """[ranks]: the least seconds a step of ``count`` whole blocks."""
        whole = self.known[run].whole(count, alone=self.shape.virtual == 1)
        transients = self._alone.transients[self._frame.moments.rank, None]
        lives, begun = self._least_lives(run, count)
        seconds = whole.seconds(self._alone.spared(run)[:, None] - whole.kept(lives), transients, begun)
        return np.asarray(self._frame.moments.worst(seconds).min(axis=1))

    def least_s(self, run: int, counts: Indices) -> Floats:
        """[..., ranks]: no step is shorter in which the ranks have so many blocks of a run, whatever the memory."""
        return np.asarray(self._alone.others_s(run) + counts * self.known[run].least_s)

    def laid_s(self, run: int, rank: int, ways: Indices) -> Floats:
        """[ways]: no step is shorter in which a rank's stages have ``ways`` [ways, virtual stages] blocks of a run; infinite
        where they do not fit."""
        frame, counts = self._frame, ways.sum(axis=1)
        rows, seconds = np.flatnonzero(frame.moments.rank == rank), np.full(len(ways), np.inf)
        spared, transients = self._alone.spared(run)[rows], self._alone.transients[rank : rank + 1, None]
        for count in np.unique(counts):
            whole, mine = self.known[run].whole(int(count), alone=self.shape.virtual == 1), np.flatnonzero(counts == count)
            worst = np.zeros((len(mine), len(whole.work_s)))
            for lives, begun, free in zip(frame.lives[rows], frame.begun[rows], spared, strict=True):
                order = np.argsort(lives, kind="stable")
                blocks = np.repeat(np.tile(lives[order], len(mine)), ways[mine][:, order].ravel()).reshape(len(mine), count)
                worst = np.maximum(worst, whole.seconds(free - whole.kept(blocks), transients, ways[mine] @ begun))
            seconds[mine] = worst.min(axis=1)
        return np.asarray(seconds + self._alone.others_s(run)[rank])

    def _least_lives(self, run: int, count: int) -> tuple[Floats, Indices]:
        """[constraints, blocks]: live micro-batches of the stages that so many blocks of a run lie on, growing, at least: one
        block is on every stage that can have no other run's, all others are on the emptiest stage. [constraints]: how many of
        the blocks have gradients, at least."""
        frame, can = self._frame, can_lie(self.stream.spans, self.shape.stages)
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
