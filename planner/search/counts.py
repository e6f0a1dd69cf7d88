"""How many blocks of each run every virtual stage has, and which choices they take: a candidate's program.

Variables    n[s, i], whole: blocks of run i on virtual stage s; x[s, i, a], y[s, i, z]: how many of them take recomputation a,
             and ZeRO stage z; t[s, k]: seconds of pass k of stage s for one micro-batch; T, the length of the pipeline; R, what
             the slowest rank does once a step; b[s, i] in {0, 1}: run i ends by stage s.
Constraints  sum over a of x = sum over z of y = n; every run is used up; every stage has a block; a run begins where the one
             before has ended (b); t is the evaluator's function of the stage's sums, a maximum of linear forms; for each rank
             and instant of the schedule, persistent bytes + live micro-batches x saved bytes + gradients, where there are any
             yet, + transients fit; R is at least each rank's once-a-step sum; T is at least the length of each known path of
             the schedule; and, as only plans quicker than a target matter, T + R is at most the target and no rank has more
             blocks of a run than its own work allows by then (:mod:`counted`).
Objective    T + R, least.

Every plan is a point of it, so its optimum is a bound. Three looks, each closer: all variables real (:data:`RELAXED`), n whole
(:data:`COUNTED`), and x and y whole with the transients of what they choose (:data:`EXACT`), where little is left out
(docs/search.md). (The first two take the least transient there is.) The schedule is a fixed graph of actions, so the length of
the pipeline is a maximum over paths, which are linear in the times: the solution is simulated, its critical path is added,
until the simulation agrees. Paths are valid for all times of a schedule, so candidates share them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from cost_models.pipeline import CriticalPath, StageTimes, longest_paths
from planner.ir.plan import StagePlan
from planner.search.counted import Ranks
from planner.search.covers import cover_rows
from planner.search.effort import AGREEMENT, Effort
from planner.search.keeps import kept_rows
from planner.search.linear import Corner, Floats, Indices, Outcome, Program, Row
from planner.search.mixtures import best_mixture, end_rows, ends, grains, mixing_seconds
from planner.search.paths import Paths, Pool, paths_of
from planner.search.rows import LENGTH, TAIL, Layout
from planner.search.shape import Shape
from planner.search.slowest import Slowest
from planner.search.splits import Split, Splits
from planner.search.stream import Stream
from planner.search.together import RankCosts

RELAXED, COUNTED, EXACT = range(3)
LOOSE = 0.3
"""Whole numbers are sought to this part of what is left to the target while paths are still added."""
UNTIL_MIXED = 3
"""After so many solutions with real variables the best mixture of paths is asked for."""
SHARP = 0.05
"""This part of the usual differences between simulation, solution and bound is tolerated where those leave the target open."""
PATHS = 6
"""Paths that one simulation adds at most."""
INWARD = 0.8
"""How far from a solution towards the best point so far paths are sought."""
MOST_PATHS, NEWEST_PATHS = 500, 250
"""So many paths a program of real variables has; then those that are not tight are left out, but for the newest."""
FINER = 0.3
"""Paths that change at more micro-batches raise a bound by this part of what simulation says more, seldom by more of it."""
KNOWN, RECALLED = 20, 3
"""So many of the known paths that are longer than a solution says are added to its program at once, and to one that has columns
for ends of actions: single paths say little beside these."""
PATIENCE, PROGRESS = 30, 0.05
"""Real variables are given up where so many paths raise the bound by less than this part of what is left to the target."""


@dataclass(frozen=True)
class Share:
    """A rank's blocks of a run: the row of their sum, behind which the row of the rank's own work follows; their columns."""

    row: int
    run: int
    rank: int
    columns: Indices


@dataclass
class Counts:
    """One candidate's program. ``bound``: of T + R; ``held``: whole numbers that are fixed; ``values``: the last solution,
    ``simulated_s``: its T + R when simulated; ``core_s``: that of the best mixture of solutions since :meth:`forget`;
    ``mixed_s``: T + R under the last mixture of paths; ``wide``: see :meth:`widen`. ``_stated``: the rows of known paths that
    are in the program; ``_tolerated``: see :meth:`sharpen`; ``_told``: for which numbers of blocks :meth:`_tell_whole` has said
    its rows."""

    ranks: Ranks
    pool: Pool
    exact: bool = False
    bound: float = 0.0
    held: Floats | None = None
    values: Floats | None = None
    simulated_s: float = math.inf
    _program: Program | None = None
    shares: list[Share] = field(default_factory=list)
    _last: int = 0
    _stated: dict[int, Row] = field(default_factory=dict)
    _seen: int = 0
    _tightened: bool = False
    _covered: bool = False
    _told: tuple[bytes, ...] = ()
    tightenings: int = 0
    _tolerated: float = 1.0
    core_s: float = math.inf
    _core: tuple[Floats, float] | None = None
    mixed_s: float = 0.0
    _guided: bool = False
    wide: bool = False
    _limit_s: float = math.inf
    _costs: RankCosts | None = None
    _most: list[Indices] = field(default_factory=list)
    _sides: tuple[Floats, Floats] = (np.zeros(0), np.zeros(0))

    @property
    def stream(self) -> Stream:
        return self.ranks.stream

    @property
    def shape(self) -> Shape:
        return self.ranks.shape

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.stream, self.shape, self.exact)

    @cached_property
    def _slowest(self) -> Slowest:
        return Slowest(self.layout)

    @cached_property
    def paths(self) -> Paths:
        """What is known of the schedule's paths."""
        return paths_of(self.pool, self.shape)

    @property
    def costs(self) -> RankCosts | None:
        """What blocks cost the ranks, as far as plans quicker than the last target have them."""
        return self._costs

    @property
    def counts(self) -> tuple[float, ...]:
        """Blocks of each virtual stage in the last solution."""
        return () if self.values is None else self.layout.blocks(self.values)

    def solve(self, effort: Effort, *, whole: bool, found: Callable[[], float] | None = None) -> bool:
        """Raise the bound until it passes the target, or the simulation agrees with a solution. ``found`` is told of each whole
        solution and answers with the target from then on. Returns whether time or paths ended it before."""
        target_s = effort.target_s
        program = self._model()
        bounds: list[float] = []
        loose = LOOSE if whole else 0.0
        for _ in range(effort.paths):
            if self.bound >= target_s or not self._restrict(target_s):
                self.bound = max(self.bound, target_s)
                return False
            left = effort.left_s(whole=whole)
            if left <= 0:
                return True
            # While paths are missing, a part of the way to the target is near enough.
            least_gap = self._tolerated * effort.gap
            gap = max(least_gap, loose * (1 - self.bound / target_s)) if math.isfinite(target_s) else least_gap
            # With real variables the limit would only make the program hard to solve: its optimum is above it or is not.
            program.bound_row(self._last, -math.inf, target_s if whole else math.inf)
            answer = program.solve(whole=True, time_limit_s=left, gap=gap, limit=target_s) if whole else self._real(
                replace(effort, target_s=target_s)
            )
            if not self._tightened:
                self.bound = max(self.bound, min(answer.bound, target_s))
            if answer.values is None:
                return self.bound < target_s and not answer.optimal
            self.values = answer.values
            length = self._lengthen(answer.values)
            if found is not None:
                target_s = min(target_s, found())
            if length <= answer.values[LENGTH] * (1 + self._tolerated * AGREEMENT):
                if gap <= least_gap or not answer.optimal:
                    return not answer.optimal
                loose = 0.0
            bounds.append(self.bound)
            if not whole and len(bounds) == UNTIL_MIXED and self.bound < target_s:
                self._cover()
                self.mix(effort)
            if not whole and len(bounds) > PATIENCE and _stuck(bounds, target_s):
                return False
        return True

    def tighten(self, excess_bytes: float) -> None:
        """The solver missed a row by its tolerance: ask for a little more room from now on, and prove nothing with it."""
        assert self._program is not None
        self._tightened = True
        self.tightenings += 1
        for index in self.layout.memory_rows:
            row = self._program.rows[index]
            self._program.bound_row(index, row.low, row.high - (excess_bytes + 1) / self.shape.capacity_bytes)

    def sharpen(self) -> bool:
        """Tolerate less from now on, where that was not said before and bounds still prove something; whether it is so."""
        if self._tolerated < 1 or self._tightened:
            return False
        self._tolerated = SHARP
        return True

    def hold(self, whole: Floats) -> None:
        """Fix the whole numbers of blocks and where runs end (:attr:`Layout.whole_at`); before anything is solved."""
        assert self._program is None
        layout, self.held = self.layout, np.rint(whole)
        blocks, ends = np.split(self.held, [len(layout.n_at)])
        layout.hold(blocks)
        program = self._model()
        program.low[layout.break_at] = program.high[layout.break_at] = ends

    def same(self, other: Counts) -> bool:
        """Whether both have the same whole numbers."""
        assert self.held is not None and other.held is not None
        return bool((self.held == other.held).all())

    def keep(self, share: Share, fewest: int = 0, largest: float = math.inf) -> None:
        """A rank has so many blocks of a run, and no more than it can have: then its own work takes at least so long."""
        assert self._program is not None and self._costs is not None
        cap = self.most(share)
        self._program.bound_row(share.row, float(fewest) if fewest else -math.inf, max(float(fewest), min(largest, cap)))
        own_s = self._costs.own_s(share.run, share.rank, fewest) if fewest else 0.0
        self._program.bound_row(share.row + 1, own_s / self.shape.microbatches, math.inf)

    def most(self, share: Share) -> float:
        """Blocks of a run that a rank can have, as far as plans quicker than the last target have them."""
        return float(self._most[share.run][share.rank])

    def sides(self, column: int) -> tuple[float, float]:
        """The bounds that a column had at first."""
        return float(self._sides[0][column]), float(self._sides[1][column])

    def look(self, effort: Effort) -> tuple[Outcome, bool]:
        """Solve with real variables, whatever bounds the columns have now, and add the paths that are longer than known. Says
        also whether none was. The bound is that of plans quicker than the target, of which there may be none."""
        answer = self._real(effort)
        if answer.values is None:
            return answer, True
        self.values = answer.values
        self._forget(answer.values)
        if self.wide:
            return answer, True
        length = self._lengthen(answer.values)
        return answer, length <= answer.values[LENGTH] * (1 + AGREEMENT)

    def _real(self, effort: Effort) -> Outcome:
        """Solve with real variables. An exact program is solved a few times only, and has those known paths that its solutions
        need; another is gone on with from branch to branch, and gets all that are new."""
        program = self._model()
        if not self.exact and not self.wide:
            self._state(range(self._seen, len(self.paths.known)))
            self._seen = len(self.paths.known)
        while True:
            answer = program.solve(whole=False, time_limit_s=max(0.0, effort.left_s(whole=False)), limit=effort.target_s)
            if not self.exact or answer.values is None or not self._state(self._known_longer(answer.values)):
                return answer

    def recall(self) -> bool:
        """Add the longest of the known paths that are longer than the last solution says; whether there are some."""
        assert self.values is not None
        return self._state(self._known_longer(self.values)[:RECALLED])

    def _known_longer(self, values: Floats) -> list[int]:
        """Known paths, the longest of those that are longer than a solution says."""
        seconds = self.paths.seconds(self.layout.times(values), self.layout.crossings.sends_s)
        return list(map(int, self.paths.longest(seconds, values[LENGTH] * (1 + self._tolerated * AGREEMENT / 2), KNOWN)))

    def _state(self, places: Sequence[int]) -> bool:
        """Add known paths to the program. Returns whether some were not there."""
        paths = self.paths.all
        fresh = {place: self.layout.path_row(paths[place]) for place in places if place not in self._stated}
        self._model().add(list(fresh.values()))
        self._stated |= fresh
        return bool(fresh)

    def _forget(self, values: Floats) -> None:
        """Leave out what is not needed of many paths."""
        gone = set(map(id, self._model().forget(values, MOST_PATHS, NEWEST_PATHS)))
        self._stated = {place: row for place, row in self._stated.items() if id(row) not in gone}

    def _lengthen(self, values: Floats) -> float:
        """Simulate a solution, and add paths that are longer than it says. Returns the simulated length."""
        length, fresh = self._longer(values)
        self._state(self.paths.add(fresh))
        return length

    def mix(self, effort: Effort) -> bool:
        """Add the best mixture of paths, where there is time to find it; whether there was. First of paths that change at
        few micro-batches, of more where those may tell more."""
        self._tell_whole()
        mixed = False
        for grain in grains(self.shape):
            if (mixed and self._settled(effort.target_s)) or not self._mixed(effort, grain):
                break
            mixed = True
        return mixed

    def widen(self) -> bool:
        """State all paths that change at few micro-batches of a turn from now on, where the schedule is not too long for that;
        whether it is so."""
        grain = grains(self.shape)[0]
        if not self.wide and self._short:
            self.wide = True
            self._tell_whole()
            program = self._model()
            program.add(end_rows(self.layout, program.widen(ends(self.shape, grain)), grain))
        return self.wide

    @property
    def _short(self) -> bool:
        """Whether the schedule is not too long for its actions to be columns."""
        return math.isfinite(mixing_seconds(self.shape, grains(self.shape)[0]))

    @property
    def corner(self) -> Corner | None:
        """Where the last solve with real variables ended."""
        return self._model().corner

    def begin(self, corner: Corner) -> None:
        """Have the next one begin there."""
        self._model().begin(corner)

    def _settled(self, target_s: float) -> bool:
        """Whether the last mixture passes the target, or hardly any can: a finer one gains a part of what its solution takes
        longer when simulated."""
        return not 0 < target_s - self.mixed_s <= FINER * (self.core_s - self.mixed_s)

    def _mixed(self, effort: Effort, grain: int) -> bool:
        """Add the best mixture of paths that change between ranks at so many micro-batches of a turn; whether it is there."""
        left = effort.deadline - time.perf_counter()
        if mixing_seconds(self.shape, grain) > left:
            return False
        program = self._model()
        rows = [row for row in program.rows if row.lasting]
        found = best_mixture(self.layout, rows, program.cost, program.low, program.high, left, grain)
        if found is None:
            return False
        self._state(self.paths.add([found.path]))
        times, tail_s = self.layout.times(found.values), float(found.values[TAIL])
        self._core, self._guided, self.mixed_s = (times, tail_s), True, float(found.values[[LENGTH, TAIL]].sum())
        self._simulate(times, tail_s, self._sends)
        return True

    def _tell_whole(self) -> None:
        """Say how slow the slowest stage of a rank is with whole blocks, and how many it can keep much of, where ranks can have
        other numbers of blocks than when that was said last."""
        most = tuple(caps.tobytes() for caps in self._most)
        if most != self._told:
            self._told = most
            self._model().add(self._slowest.rows(self._most))
            if self.held is None:
                self._model().add(kept_rows(self.layout, self._most))

    def _cover(self) -> None:
        """Where whole numbers of blocks are fixed, say what that means for their choices."""
        if self.held is not None and not self._covered:
            self._covered = True
            self._model().add(cover_rows(self.layout))

    def forget(self) -> None:
        """What follows is about another part of the solutions. The best mixture of paths for all of them is near it still."""
        self.core_s, self._core = math.inf, self._core if self._guided else None

    def restrict(self, target_s: float) -> bool:
        """Count with plans quicker than the target only. False where there is none."""
        self._model()
        return self._restrict(target_s)

    def split(self, splits: Splits, left_s: float) -> Split | None:
        """What it is best to part at; None where no stage can be on either side, or that would take too long to tell."""
        assert self.values is not None
        program = self._model()
        return None if not self._short else splits.best(self.layout, self.values, program.low, program.high, left_s)

    def bound_column(self, column: int, low: float, high: float) -> None:
        """A column between these sides and those that it had at first."""
        first, last = self._sides[0][column], self._sides[1][column]
        self._model().bound_column(column, max(first, low), min(last, high))

    def _model(self) -> Program:
        if self._program is None:
            self._program = self.layout.program()
            self._sides = (self._program.low.copy(), self._program.high.copy())
            for run in range(len(self.stream.runs)):
                for rank in range(self.shape.pipeline):
                    members = self.layout.members(run, rank)
                    if members.size and self.stream.runs[run].count > 1:
                        self.shares.append(Share(len(self._program.rows), run, rank, self.layout.n_at[members]))
                        self._program.add_sum(self.layout.n_at[members])
                        self._program.add([self.layout.work_row(run, rank, 0.0, 0.0)])
            self._last = len(self._program.rows)
            self._program.add_sum(np.array([LENGTH, LENGTH + 1]))
        return self._program

    def _restrict(self, target_s: float) -> bool:
        """Limit each rank's blocks to what a plan quicker than the target can have. False where that is none."""
        assert self._program is not None
        if self._costs is None or target_s < self._limit_s:
            self._costs, self._limit_s = self.ranks.sharper(target_s), target_s
            self.bound = max(self.bound, min(self._costs.bound, target_s))
            self._most = [self._costs.most(run, target_s) for run in range(len(self.stream.runs))]
            if any(int(caps.sum()) < run.count for caps, run in zip(self._most, self.stream.runs, strict=True)):
                return False
            for share in self.shares:
                self.keep(share)
            self._program.add(self.layout.work_rows(self._costs, self._most))
        return self.bound < target_s

    def _longer(self, values: Floats) -> tuple[float, list[CriticalPath]]:
        """The simulated length of the solution, and paths that are longer than it says. Also those of a point between it and
        the best mixture of solutions so far, or the solution that belongs to the last best mixture of paths: solutions jump
        from corner to corner, cuts are deepest near good points (in-out separation: Ben-Ameur and Neto 2007, "Acceleration of
        cutting-plane and column generation algorithms")."""
        sends = self._sends
        times, tail_s = self.layout.times(values), float(values[TAIL])
        length, found = self._simulate(times, tail_s, sends)
        self.simulated_s = length + tail_s
        if self._core is not None:
            core_times, core_tail_s = self._core
            inner = INWARD * core_times + (1 - INWARD) * times
            found = self._simulate(inner, INWARD * core_tail_s + (1 - INWARD) * tail_s, sends)[1] + found
        known = [StageTimes(*map(float, row)) for row in times]
        longer_s = values[LENGTH] * (1 + self._tolerated * AGREEMENT / 2)
        return length, [path for path in found if path.seconds(known, sends) > longer_s]

    @property
    def _sends(self) -> list[float]:
        """Seconds over each cut."""
        return list(map(float, self.layout.crossings.sends_s))

    def _simulate(self, times: Floats, tail_s: float, sends: list[float]) -> tuple[float, list[CriticalPath]]:
        shape, stages = self.shape, [StageTimes(*map(float, row)) for row in times]
        length, found = longest_paths(
            shape.schedule, shape.pipeline, shape.virtual, shape.microbatches, stages, sends, PATHS
        )
        if length + tail_s < self.core_s:
            self.core_s = length + tail_s
            self._core = self._core if self._guided else (times, tail_s)
        return length, found

    def stages(self) -> tuple[StagePlan, ...]:
        """The stages of an exact solution."""
        assert self.exact and self.values is not None
        return self.layout.stages(self.values)


def _stuck(bounds: list[float], target_s: float) -> bool:
    """Whether the last paths brought the target no nearer."""
    gained = bounds[-1] - bounds[-1 - PATIENCE]
    return gained < (PROGRESS * (target_s - bounds[-1]) if math.isfinite(target_s) else AGREEMENT * bounds[-1])
