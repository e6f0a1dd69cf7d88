"""How slow the slowest stage of a rank is at least: what parts of blocks miss and whole ones meet.

In parts, 126 blocks are 1.125 on each of 112 stages; whole, some stage has two, and all micro-batches pass it one after the
other. By the memory of a rank two of its eight blocks may keep their activations; in parts each of them is recomputed to three
quarters, whole, some stage recomputes all that it has.

The first micro-batch goes forward through all stages and back to a stage s of a rank; the rank does all that its order has
between its first and its last backward pass of s; the last micro-batch goes back from there. No step is shorter than this
path, for any stage s of the rank, the slowest one too. Which one that is does not matter: of what the paths of a rank's stages
have beside the way through all stages, the common part counts as it is (``shared``), and the rest of the backward passes of s
(``own``) with what the slowest stage takes at least, by the number of blocks that the rank has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from cost_models.live import BEGUN, LIVE, WAITING
from cost_models.schedules import KINDS, Steps, all_steps
from planner.search.linear import Floats, Indices, Row
from planner.search.rows import LENGTH, MISSED_BYTES, Layout
from planner.search.shape import Timetable, shape_at
from planner.search.tables import AT_TIMES, AT_WAIT, INPUT_GRADIENT, PASSES, PERSISTENT, WEIGHT_GRADIENT, Table
from planner.search.works import lower_hull

MOST_BLOCKS = 12
"""Of a rank; with more of them the slowest stage is hardly slower than parts of blocks are."""
INSTANTS = 4
"""Instants of a rank that are looked at: those when most micro-batches are alive. (Each is a constraint.)"""
TRIED = 12
"""So many seconds at a time are looked at for each number of blocks."""
DOES = (("F",), ("I", "B"), ("W", "B"))
"""Kinds of actions that each pass is a part of."""
ALIKE = 1e-9
"""Seconds that differ by less than this part are one."""


@dataclass(frozen=True)
class Between:
    """What a rank does behind its first backward pass of a stage, up to its last one, whichever of its stages that is:
    ``shared`` [stages, 3]: each pass so often at least; ``own``: backward passes of that stage beside these."""

    shared: Indices
    own: int


@lru_cache(maxsize=64)
def between(timetable: Timetable) -> tuple[Between, ...]:
    """Of every rank."""
    shape, found = shape_at(timetable), []
    for rank, steps in enumerate(all_steps(*timetable)):
        owned = np.array(shape.owned(rank))
        counts = np.array([_counts(steps, stage, owned) for stage in owned.tolist()])
        at, shared = np.arange(len(owned)), counts.min(axis=0)
        everywhere = np.zeros((shape.stages, PASSES), dtype=np.int64)
        everywhere[owned] = shared
        found.append(Between(everywhere, int((counts[at, at, INPUT_GRADIENT] - shared[:, INPUT_GRADIENT]).min())))
    return tuple(found)


def _counts(steps: Steps, stage: int, owned: Indices) -> Indices:
    """[virtual stages, 3]: a rank's passes behind its first backward pass of a stage, up to its last one."""
    done = [np.isin(steps.kind, [KINDS.index(kind) for kind in kinds]) for kinds in DOES]
    mine = np.flatnonzero(done[INPUT_GRADIENT] & (steps.stage == stage))
    part = slice(int(mine[0]) + 1, int(mine[-1]) + 1)
    slot = np.searchsorted(owned, steps.stage[part])
    return np.stack([np.bincount(slot[each[part]], minlength=len(owned)) for each in done], axis=1)


@dataclass(frozen=True)
class Slowest:
    """What the slowest stages of a program's ranks take."""

    layout: Layout
    _fronts: dict[tuple[int, ...], list[tuple[Floats, Floats]]] = field(default_factory=dict)

    def rows(self, most: Sequence[Indices]) -> list[Row]:
        """For each run of several blocks and each rank, where it has ``most`` [runs][ranks] blocks of it."""
        layout, rows = self.layout, list[Row]()
        for run, caps in enumerate(most):
            several = layout.stream.runs[run].count > 1 and layout.shape.virtual > 1
            for rank in range(layout.shape.pipeline) if several else ():
                numbers = layout.numbers(run, rank, caps)
                if numbers.size and 0 < numbers[-1] <= MOST_BLOCKS:
                    lines = lower_hull(numbers, self.seconds(run, rank, int(numbers[-1]))[numbers])
                    rows += [self._row(run, rank, slope, least) for slope, least in lines]
        return rows

    def _row(self, run: int, rank: int, slope: float, least_s: float) -> Row:
        """T is at least the path of the rank's slowest stage, whose backward pass takes ``least_s`` and ``slope`` for each of
        the rank's blocks."""
        layout, shape = self.layout, self.layout.shape
        path = between(shape.timetable)[rank]
        ways = np.array([1, 1, 0]) + path.shared
        counts = (ways if layout.passes == PASSES else ways[:, :2]).astype(float)
        members = layout.n_at[layout.members(run, rank)]
        times = layout.time_at(0, 0) + np.arange(counts.size)
        columns = np.concatenate([times, members, [LENGTH]])
        values = np.concatenate([-counts.ravel(), np.full(len(members), -slope * path.own), [1.0]])
        return Row(layout.crossings.both_ways_s + path.own * least_s, math.inf, columns, values)

    def seconds(self, run: int, rank: int, most: int) -> Floats:
        """[most + 1]: by the number of a rank's blocks of a run, what the backward pass of its slowest stage takes at least; of
        numbers that do not fit, as much as can be."""
        layout = self.layout
        mine, owned = layout.members(run, rank), np.array(layout.shape.owned(rank))
        slots = np.searchsorted(owned, layout.pair_stage[mine])
        counts, room = self._instants(run, rank)
        fewest, largest = (np.minimum(each[mine], most).astype(int) for each in (layout.fewest, layout.most))
        fronts = [[self._front(run, tuple(one[:, slot].tolist()), most) for slot in slots] for one in counts]
        marks = np.unique(np.concatenate([seconds for each in fronts for front in each for seconds, _ in front]))
        marks = marks[np.append(True, np.diff(marks) > ALIKE * marks[1:])]
        low, high = np.full(most + 1, -1), np.full(most + 1, len(marks) - 1)
        while (high - low > 1).any():  # The more seconds, the fewer bytes: the first mark that fits is behind low, up to high.
            steps = np.linspace(low, high, TRIED + 2, axis=1).astype(int)
            tried = np.unique(steps[(steps > low[:, None]) & (steps < high[:, None])])
            held = _held(fronts, fewest, largest, marks[tried])
            fits = np.asarray((held <= room[:, None, None] + MISSED_BYTES).all(axis=0))
            first = np.where(fits.any(axis=1), fits.argmax(axis=1), len(tried))
            low = np.maximum(low, np.append(-1, tried)[first])
            high = np.minimum(high, np.append(tried, len(marks) - 1)[first])
        return np.asarray(marks[high])

    def _instants(self, run: int, rank: int) -> tuple[Indices, Floats]:
        """Of the instants that are looked at, [instants, 3, virtual stages], and bytes for the run's blocks, [instants]."""
        layout, shape = self.layout, self.layout.shape
        counts = shape.instants(rank)
        chosen = np.argsort(-counts[:, LIVE].sum(axis=1), kind="stable")[:INSTANTS]
        return counts[chosen], layout.room_of(run, rank)[chosen]

    def _front(self, run: int, there: tuple[int, ...], most: int) -> list[tuple[Floats, Floats]]:
        """Of 0 to ``most`` blocks of a run on a stage at an instant: seconds of the backward pass, growing, and bytes that are
        no more than those of anything quicker. ``there``: what the instant says of the stage."""
        key = run, *there
        if key not in self._fronts:
            self._fronts[key] = [(np.zeros(1), np.zeros(1))]
        known, (recompute, zero) = self._fronts[key], self.layout.stream.single[run]
        live, begun, waiting = (there[what] for what in (LIVE, BEGUN, WAITING))
        saved = recompute.sums[:, AT_TIMES]
        one = _best(*_sums(
            (self._recompute_s(recompute), recompute.sums[:, PERSISTENT] + live * saved + waiting * recompute.sums[:, AT_WAIT]),
            (self._zero_s(zero), zero.sums[:, PERSISTENT] + begun * zero.sums[:, AT_TIMES]),
        ))
        while len(known) <= most:
            known.append(_best(*_sums(known[-1], one)))
        return known[: most + 1]

    def _recompute_s(self, table: Table) -> Floats:
        whole = table.sums[:, INPUT_GRADIENT] + (0.0 if self.layout.shape.splits_backward else table.sums[:, WEIGHT_GRADIENT])
        return np.asarray(whole)

    def _zero_s(self, table: Table) -> Floats:
        return np.asarray(self.layout.stream.gathers.floor * table.sums[:, INPUT_GRADIENT])


def _sums(one: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Seconds and bytes of one of these and one of those."""
    seconds, held = (np.add.outer(*pair).ravel() for pair in zip(one, other, strict=True))
    return seconds, held


def _best(seconds: Floats, held: Floats) -> tuple[Floats, Floats]:
    """Less what takes as long as another and holds as much."""
    order = np.lexsort((held, seconds))
    seconds, held = seconds[order], held[order]
    kept = np.append(True, held[1:] < np.minimum.accumulate(held)[:-1])
    return seconds[kept], held[kept]


def _held(
    fronts: Sequence[Sequence[Sequence[tuple[Floats, Floats]]]], fewest: Indices, largest: Indices, marks: Floats
) -> Floats:
    """[instants, blocks, marks]: the fewest bytes of so many blocks whose stages all are as quick as the mark; ``fewest`` and
    ``largest`` [stages]: blocks of each stage; ``fronts`` [instants][stages][blocks]."""
    held = np.full((len(fronts), len(fronts[0][0]), len(marks)), np.inf)
    held[:, 0] = 0.0
    of_front: dict[int, Floats] = {}  # Instants and stages have many in common.
    for at in range(len(fewest)):
        wider = np.full_like(held, np.inf)
        for number in range(fewest[at], largest[at] + 1):
            mine = [each[at][number] for each in fronts]
            of_front |= {id(front): _bytes(*front, marks) for front in mine if id(front) not in of_front}
            own = np.array([of_front[id(front)] for front in mine])
            wider[:, number:] = np.minimum(wider[:, number:], held[:, : held.shape[1] - number] + own[:, None])
        held = wider
    return held


def _bytes(seconds: Floats, held: Floats, marks: Floats) -> Floats:
    """[marks]: the fewest bytes that take no longer than a mark; without end where nothing does."""
    at = np.searchsorted(seconds, marks * (1 + ALIKE), side="right")
    return np.append(np.inf, held)[at]
