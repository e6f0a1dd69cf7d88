"""Columns: everything one virtual stage can be, as far as the master ILP can tell two of them apart.

A column is (virtual stage, where it starts and ends in the chain, how many blocks of each run, one mixture of choices).
Inside a run all positions look alike, so they share one node and a count says how much of the run is used: the stages'
columns cover the chain where they connect from node to node and use up every run.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models.pipeline import live_profiles
from planner.evaluate import receive_buffer_bytes
from planner.ir.plan import ScheduleName
from planner.search.chain import Chain, Key
from planner.search.tables import PERSISTENT, SAVED, TIMES, Floats, pareto

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """The fixed part of one candidate. ``capacity_bytes``: what one rank has, its reserve taken off."""

    schedule: ScheduleName
    pipeline: int
    virtual: int
    microbatches: int
    capacity_bytes: float

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual

    def rank_of(self, stage: int) -> int:
        if self.schedule == "zbv" and stage >= self.pipeline:
            return 2 * self.pipeline - 1 - stage
        return stage % self.pipeline

    @property
    def splits_backward(self) -> bool:
        return self.schedule in ("interleaved-zero-bubble", "zbv")

    def live(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Pareto-maximal live micro-batches of a rank's virtual stages, in order of the stages."""
        return live_profiles(self.schedule, self.pipeline, self.virtual, self.microbatches)[rank]


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns as arrays, one a row. ``vectors``: [rows, 6] as in :mod:`tables`, receive buffers counted as persistent;
    ``source`` and ``row`` lead back to the mixture: ``keys[source]``, and the rows of its two tables."""

    stage: Indices
    start: Indices
    end: Indices
    source: Indices
    row: Indices
    vectors: Floats
    transient: Floats
    keys: tuple[Key, ...]

    def __len__(self) -> int:
        return len(self.stage)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a stage may own: from node ``start`` to node ``end``, ``key`` blocks of each run."""

    start: int
    end: int
    key: Key


def pieces(counts: Sequence[int], stage: int, stages: int) -> Iterator[Piece]:
    """All pieces that a virtual stage can own. Node i is any cut inside or at the beginning of run i; the last node is
    the end of the chain."""
    runs, total = len(counts), sum(counts)
    before = list(itertools.accumulate(counts, initial=0))
    first, last = stage == 0, stage == stages - 1
    most = total - stages + 1
    for start in range(1 if first else runs):
        for end in [runs] if last else range(start, runs):
            taken = (counts[start],) if first else range(1, counts[start] + 1)
            inner = sum(counts[start + 1 : end])
            if end == start:
                amounts: Iterator[tuple[int, int]] = ((n, 0) for n in range(1, counts[start] + (0 if first or last else 1)))
            else:
                amounts = itertools.product(taken, range(counts[end]) if end < runs else (0,))
            for head, tail in amounts:
                if head + inner + tail > most or (end != start and before[end] + tail <= stage):
                    continue
                key = [0] * runs
                key[start] = head
                key[start + 1 : end] = counts[start + 1 : end]
                if end < runs and end != start:
                    key[end] = tail
                yield Piece(start, end, tuple(key))


class OutOfTime(Exception):
    """The deadline passed before all columns were there."""


def build_columns(chain: Chain, shape: Shape, limit_s: float, deadline: float = math.inf) -> Columns | None:
    """All columns that a plan quicker than ``limit_s`` (which fits) may hold, or None where a stage has none. Raises
    OutOfTime at the ``deadline`` (time.perf_counter)."""
    counts = [run.count for run in chain.runs]
    keys: dict[Key, int] = {}
    parts: list[tuple[int, Piece, int, Indices, Floats, Floats]] = []
    products: dict[tuple[object, ...], tuple[Indices, Floats, Floats]] = {}
    for stage in range(shape.stages):
        found = False
        rank = shape.rank_of(stage)
        slot = [s for s in range(shape.stages) if shape.rank_of(s) == rank].index(stage)
        lives = tuple(sorted({vector[slot] for vector in shape.live(rank)}))
        for piece in pieces(counts, stage, shape.stages):
            if time.perf_counter() > deadline:
                raise OutOfTime
            if shape.microbatches * chain.least_work(piece.key) >= limit_s:
                continue
            buffers, kept = _buffer_bytes(chain, shape, stage, piece), _kept_bytes(chain, shape, stage, piece)
            cached = (piece.key, lives, buffers, kept)
            if cached not in products:
                products[cached] = _mixtures(chain, shape, piece.key, lives, buffers, kept)
            rows, vectors, transient = products[cached]
            if len(rows):
                found = True
                parts.append((stage, piece, keys.setdefault(piece.key, len(keys)), rows, vectors, transient))
        if not found:
            return None
    sizes = [len(part[3]) for part in parts]
    return Columns(
        np.repeat([part[0] for part in parts], sizes),
        np.repeat([part[1].start for part in parts], sizes),
        np.repeat([part[1].end for part in parts], sizes),
        np.repeat([part[2] for part in parts], sizes),
        np.concatenate([part[3] for part in parts]),
        np.concatenate([part[4] for part in parts]),
        np.concatenate([part[5] for part in parts]),
        tuple(keys),
    )


def _buffer_bytes(chain: Chain, shape: Shape, stage: int, piece: Piece) -> int:
    """Receive buffers of a stage, and with each rank's first stage its batch, as the evaluator counts them."""
    incoming = outgoing = 0
    if stage > 0 and shape.rank_of(stage - 1) != shape.rank_of(stage):
        incoming = chain.runs[piece.start].crossing_bytes
    if stage < shape.stages - 1 and shape.rank_of(stage + 1) != shape.rank_of(stage):
        outgoing = chain.runs[piece.end].crossing_bytes
    received = receive_buffer_bytes(shape.schedule, stage, shape.stages, shape.microbatches, incoming, outgoing)
    return received + (shape.microbatches * chain.costed.batch_bytes if stage < shape.pipeline else 0)


def _kept_bytes(chain: Chain, shape: Shape, stage: int, piece: Piece) -> int:
    """What a stage keeps of a micro-batch beside its blocks' activations, as the evaluator counts it."""
    sent = chain.runs[piece.end].crossing_bytes if stage < shape.stages - 1 else 0
    return chain.costed.context_bytes + sent


def _mixtures(
    chain: Chain, shape: Shape, key: Key, lives: tuple[int, ...], buffers: int, carried: int
) -> tuple[Indices, Floats, Floats]:
    """The unbeaten mixtures of a stage that fit on a rank: rows of the two tables, vectors, transients."""
    recompute, zero = chain.tables(key)
    rows = np.stack(
        np.meshgrid(np.arange(len(recompute.picks)), np.arange(len(zero.picks)), indexing="ij"), axis=-1
    ).reshape(-1, 2)
    vectors = recompute.sums[rows[:, 0]] + zero.sums[rows[:, 1]]
    vectors[:, 0] += chain.costed.context_s
    vectors[:, PERSISTENT] += buffers
    vectors[:, SAVED] += carried
    transient = recompute.transient[rows[:, 0]] + zero.transient[rows[:, 1]]
    fits = vectors[:, PERSISTENT] + lives[-1] * vectors[:, SAVED] + transient <= shape.capacity_bytes
    rows, vectors, transient = rows[fits], vectors[fits], transient[fits]
    if not len(rows):
        return rows, vectors, transient
    times = vectors[:, :TIMES]
    if not shape.splits_backward:
        times = np.column_stack([times[:, 0], times[:, 1] + times[:, 2], times[:, 3]])
    slack = chain.tolerance(key)
    slack = slack if shape.splits_backward else np.array([slack[0], slack[1] + slack[2], slack[3]])
    if shape.virtual > 1:
        times = np.column_stack([times, vectors[:, PERSISTENT:], transient])
        slack = np.concatenate([slack, np.zeros(3)])
    kept = pareto(times, slack)
    return rows[kept], vectors[kept], transient[kept]
