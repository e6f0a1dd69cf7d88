"""What a schedule decides of its ranks, whatever the chain: what is there at once, and receive buffers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from cost_models.live import BEGUN, LIVE, WAITING, interleaved_kept, interleaved_live, interleaved_waiting
from cost_models.schedules import turn_length
from planner.evaluate import receive_buffers
from planner.search.linear import Floats, Indices
from planner.search.shape import Shape, Timetable, shape_at

SAMPLED = 32
"""Live vectors of a round of an interleaved schedule that are averaged (any of them is a constraint, so their mean is one)."""


@dataclass(frozen=True)
class Moments:
    """Memory constraints, one a row, of the ranks of one shape, or of several, one shape after the other. [constraints] each:
    ``rank``; live micro-batches: ``least`` of the rank's emptiest stage, ``alive``, ``sent`` and ``received`` of all its
    stages, of those that send on, and of those that receive; ``waiting``: those of all its stages that wait for the weight part
    of their backward passes; ``late``: whether all its stages have gradients. ``ranks``: how many they are."""

    rank: Indices
    least: Floats
    alive: Floats
    sent: Floats
    received: Floats
    waiting: Floats
    late: NDArray[np.bool_]
    ranks: int

    @staticmethod
    def joined(parts: Sequence[Moments]) -> Moments:
        """Of all their shapes."""
        if len(parts) == 1:
            return parts[0]
        before = itertools.accumulate((part.ranks for part in parts), initial=0)
        columns = zip(
            *((part.least, part.alive, part.sent, part.received, part.waiting, part.late) for part in parts), strict=True
        )
        rank = [part.rank + first for part, first in zip(parts, before, strict=False)]
        least, alive, sent, received, waiting, late = map(np.concatenate, columns)
        ranks = sum(part.ranks for part in parts)
        return Moments(np.concatenate(rank), least, alive, sent, received, waiting, late, ranks)

    @cached_property
    def begins(self) -> Indices:
        """[ranks]: the first constraint of each."""
        return np.flatnonzero(np.append(True, np.diff(self.rank) > 0))

    def worst(self, seconds: Floats) -> Floats:
        """[ranks, ...]: of each rank's constraints, the one that costs most."""
        return np.asarray(np.maximum.reduceat(seconds, self.begins, axis=0))


@dataclass(frozen=True)
class Frame:
    """What only the schedule decides of one shape. ``moments``, and of each of them: ``stages`` [constraints, virtual stages]
    of its rank, ``lives``: live micro-batches of those, ``begun``: 1 where the stage has gradients."""

    moments: Moments
    stages: Indices
    lives: Floats
    begun: Indices


def frame_of(shape: Shape) -> Frame:
    """Of one shape."""
    return _frame(shape.timetable)


def moments_of(shapes: Sequence[Shape]) -> Moments:
    """Of several shapes."""
    return _moments(tuple(shape.timetable for shape in shapes))


@lru_cache(maxsize=64)
def _moments(timetables: tuple[Timetable, ...]) -> Moments:
    return Moments.joined([_frame(timetable).moments for timetable in timetables])


@lru_cache(maxsize=4096)
def _frame(timetable: Timetable) -> Frame:
    shape = shape_at(timetable)
    found = _constraints(shape)
    lives, begun, waiting = np.moveaxis(np.concatenate(found), 1, 0)[[LIVE, BEGUN, WAITING]]
    at = np.repeat(np.arange(shape.pipeline), list(map(len, found)))
    # The last stage sends nothing on; it is the last of its rank, but under zbv the rank's stages are listed likewise.
    ends = np.where(at == int(shape.ranks[-1]), lives[:, -1], 0.0)
    begins = np.where(at == 0, lives[:, 0], 0.0)
    alive = lives.sum(axis=1)
    late = np.asarray(begun.all(axis=1))
    moments = Moments(
        at, lives.min(axis=1), alive, alive - ends, alive - begins, waiting.sum(axis=1), late, shape.pipeline
    )
    stages = np.argsort(shape.ranks, kind="stable").reshape(shape.pipeline, shape.virtual)[at]
    return Frame(moments, stages, lives, begun.astype(np.int64))


def messages_of(shapes: Sequence[Shape]) -> Floats:
    """[ranks]: receive buffers, in messages, of the ranks of one shape after the other."""
    return np.concatenate([_messages(shape.timetable) for shape in shapes])


@lru_cache(maxsize=4096)
def _messages(timetable: Timetable) -> Floats:
    shape = shape_at(timetable)
    inputs, gradients = np.array(receive_buffers(*shape.timetable)).T
    messages = inputs * shape.crosses[:-1] + gradients * shape.crosses[1:]
    return np.asarray(np.bincount(shape.ranks, messages, shape.pipeline), dtype=float)


def _constraints(shape: Shape) -> list[Floats]:
    """Per rank, some constraints on what is there at once, [constraints, 3, virtual stages]: instants and a mean of them; where
    rounds of an interleaved schedule repeat, one when all stages have gradients, and the mean of all of these."""
    virtual, total = shape.virtual, shape.virtual * shape.microbatches
    turn = turn_length(shape.pipeline, shape.microbatches)
    kept = np.array(interleaved_kept(shape.schedule, shape.pipeline, virtual, shape.microbatches))[:, None]
    # From the second round on, at the latest, all stages have gradients: as soon as the first one's backward passes begin.
    first = np.minimum(virtual * turn, total - kept)
    if not shape.schedule.startswith("interleaved") or (first < (virtual - 1) * turn).any():
        return [_with_mean(shape.instants(rank).astype(float)) for rank in range(shape.pipeline)]
    last = np.minimum(first + virtual * turn - 1, total - kept)
    released = first + ((last - first) * np.linspace(0, 1, SAMPLED)).astype(np.int64)
    live = interleaved_live(kept + released, released, virtual, turn)
    waiting = interleaved_waiting(shape.schedule, np.arange(shape.pipeline), released, virtual, shape.microbatches, turn)
    there = np.stack([live, np.ones_like(live), waiting], axis=2).astype(float)
    return list(np.stack([there[:, 0], there.mean(axis=1)], axis=1))


def _with_mean(found: Floats) -> Floats:
    """The instants of a rank, and where several of them have gradients on all stages, the mean of those: its emptiest stage has
    more than theirs."""
    late = found[found[:, BEGUN].all(axis=1)]
    return np.concatenate([found, late.mean(axis=0, keepdims=True)]) if len(late) > 1 else found
