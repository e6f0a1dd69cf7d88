"""Whole numbers of blocks by branching, each branch bounded by its relaxation.

A step depends most on how many blocks of a run a *rank* has in all: its work is whole blocks, what does not fit is recomputed.
So the sum over a rank's virtual stages is made whole first (with the rank's least work of so many whole blocks as a row of its
own), then the stages' numbers, then where runs end. A branch without fractions is a *leaf*: its exact program, choices and
transients counted whole, has no numbers of blocks left to find. Where few ways to lay whole blocks on stages are left by
simulation (:mod:`patterns`), those are the leaves, and nothing is parted. Branches differ in bounds of rows and columns
only, so a solver goes on from the basis of the branch that they were parted off; paths that one branch needs hold for all. The
side of a split that is nearer comes next, then the branch of the lowest bound.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from planner.search.choices import Choices, Chosen, choices_of
from planner.search.counts import UNTIL_MIXED, Counts
from planner.search.effort import Effort
from planner.search.layings import layings_of
from planner.search.linear import Corner, Floats
from planner.search.patterns import Patterns
from planner.search.splits import Split, Splits
from planner.search.together import RankCosts

PATIENCE, PROGRESS = 20, 0.03
"""A branch is parted where so many solutions, each with longer paths than the last, raise its bound by less than this part of
what is left to the target."""
NEAR = 0.1
"""Likewise where a mixture of solutions is below the target, and as near to the bound as this part of what is left."""
LONGEST_S = 2.0
"""So long a chain is parted at a time: nothing is lost where it is gone on with later."""
MOST_LEAVES = 100
"""Where there are more ways to lay whole blocks, parting the chain is quicker than a program for each."""
SHORT = 500
"""Layings of a schedule of more actions are told apart before it is relaxed, those of others where real variables have not said
enough: these are quicker then."""
REPEATS = 4
"""So often a leaf's solution that does not fit after all is sought again with less memory."""
WHOLE = 1e-5
"""As near to a whole number counts as whole."""
Key = tuple[bool, int]
"""What is bounded: a rank's share (its index), or a column."""
Box = tuple[tuple[Key, tuple[float, float]], ...]
Found = Callable[[Counts], float]
"""Is told of a program that has a new solution; answers with the target from then on."""


@dataclass(frozen=True)
class Opened:
    """An open branch, for who goes on with it elsewhere. ``held``: of a leaf, its whole numbers."""

    bound: float
    box: Box
    held: tuple[float, ...] | None


@dataclass
class _Branch:
    """``leaf``: its exact program, where numbers of blocks are whole. ``mixed``: the best mixture of paths is known; ``real``:
    of a leaf, real variables have said what they can. ``looks`` at a leaf; ``choices``: where these are told apart rank by
    rank, for which a leaf is ``asked`` once. ``corner``: where the solver was before the branch was parted off, at which
    ``split`` and on which of its sides; ``tried``: a leaf within it of which real variables have said what they can."""

    box: Box
    leaf: Counts | None = None
    mixed: bool = False
    real: bool = False
    looks: int = 0
    asked: bool = False
    choices: Choices | None = None
    corner: Corner | None = None
    split: tuple[Split, int] | None = None
    tried: Counts | None = None

    @property
    def begun(self) -> bool:
        """Whether it has to be left where it is: a leaf that asks for more room, or whose choices are told apart."""
        return self.leaf is not None and (self.leaf.tightenings > 0 or self.choices is not None)


@dataclass
class Branches:
    """The branches of a chain's program that are open: what was ``given`` by who looked at it before, or all of it. ``heap``:
    (bound, order, branch); between two looks nothing is ``_next``."""

    counts: Counts
    given: InitVar[Sequence[Opened] | None] = None
    heap: list[tuple[float, int, _Branch]] = field(default_factory=list)
    finished_s: float = math.inf
    _order: Iterator[int] = field(default_factory=itertools.count)
    _applied: dict[Key, tuple[float, float]] = field(default_factory=dict)
    _limit_s: float = math.inf
    _looked_apart: bool = False
    _splits: Splits = field(default_factory=Splits)
    _next: tuple[float, int, _Branch] | None = None

    def __post_init__(self, given: Sequence[Opened] | None) -> None:
        if given is None:
            self._push(self.counts.bound, _Branch(()))
            return
        self._looked_apart = True
        for each in given:
            leaf = None if each.held is None else self._leaf(each.bound, np.array(each.held))
            self._push(each.bound, _Branch(each.box, leaf))

    @property
    def opened(self) -> tuple[Opened, ...]:
        """What is open."""
        return tuple(_opened(bound, branch) for bound, _, branch in sorted(self.heap))

    def part(self, target_s: float) -> tuple[Opened, ...]:
        """Give away half of what is open below the target: every other branch by bound; nothing where there is but one."""
        mine, given = list[tuple[float, int, _Branch]](), list[Opened]()
        for bound, order, branch in sorted(self.heap):
            keeps = bound >= target_s or len(mine) == len(given) or branch.begun
            mine.extend([(bound, order, branch)] if keeps else [])
            given.extend([] if keeps else [_opened(bound, branch)])
        self.heap = mine
        return tuple(given)

    @property
    def movable(self) -> bool:
        """Whether what is open says all that is known."""
        known = self._looked_apart or all(branch.box for _, _, branch in self.heap)
        return known and not any(branch.begun for _, _, branch in self.heap)

    @property
    def bound(self) -> float:
        """Of T + R: of all branches, or what plans had to be quicker than to matter where they were left."""
        return min(self.heap[0][0] if self.heap else math.inf, self.finished_s)

    def _push(self, bound: float, branch: _Branch) -> None:
        heapq.heappush(self.heap, (bound, next(self._order), branch))

    def solve(self, effort: Effort, found: Found) -> bool:
        """Raise the bound until it passes the target. Returns whether time ended it before."""
        target_s = effort.target_s
        until = min(effort.deadline, time.perf_counter() + LONGEST_S) if self.counts.wide else effort.deadline
        while self._next is not None or (self.heap and self.heap[0][0] < target_s):
            bound, _, branch = self._next or heapq.heappop(self.heap)
            self._next = None
            if time.perf_counter() >= (until if branch.leaf is None else effort.deadline):
                self._push(bound, branch)
                return True
            now = replace(effort, target_s=target_s)
            if branch.leaf is None:
                target_s = min(target_s, self._open(bound, branch, now, found))
            else:
                target_s = min(target_s, self._settle(branch.leaf, branch, now, found))
        return False

    def _open(self, bound: float, branch: _Branch, effort: Effort, found: Found) -> float:
        """Bound a branch, and part it. Returns the target from then on."""
        counts, target_s = self.counts, effort.target_s
        if not counts.restrict(target_s):
            self.heap.clear()
            self.finished_s = min(self.finished_s, target_s)
            return target_s
        if self._limit_s != target_s:  # Rows of shares are as at first again.
            self._applied, self._limit_s = {key: sides for key, sides in self._applied.items() if not key[0]}, target_s
        if counts.shape.actions > SHORT and self._told_apart(bound, effort):
            return target_s
        self._apply(branch.box)
        counts.forget()
        if branch.box and counts.widen() and branch.corner is not None:
            counts.begin(branch.corner)
        bounds, agreed, mixed = [bound], False, branch.mixed
        while not agreed and not _stuck(bounds, target_s) and not _met(counts.core_s, bounds[-1], target_s):
            answer, agreed = counts.look(effort)
            bound = max(bound, min(answer.bound, target_s))
            bounds.append(bound)
            if (answer.values is None and not answer.optimal) or (time.perf_counter() > effort.deadline and bound < target_s):
                self._push(bound, branch)
                return target_s
            if branch.split is not None and len(bounds) == 2:
                self._splits.learn(*branch.split, bound - bounds[0])
            if bound >= target_s or answer.values is None:
                self.finished_s = min(self.finished_s, target_s)
                return target_s
            if len(bounds) > UNTIL_MIXED and not branch.box and self._told_apart(bound, effort):
                return target_s
            if mixed:  # Single paths say little beside their best mixture.
                break
            if len(bounds) > UNTIL_MIXED and not agreed:
                branch.mixed = mixed = counts.mix(effort)
        assert counts.values is not None
        parts = self._parts(counts.values)
        if parts is None:
            return min(target_s, self._all_whole(bound, branch, effort, found))
        return min(target_s, self._parted(bound, branch, parts, effort, found))

    def _all_whole(self, bound: float, branch: _Branch, effort: Effort, found: Found) -> float:
        """A branch's relaxation has whole numbers: they are a leaf, and what else the branch holds stays open. Returns the
        target from then on."""
        counts = self.counts
        assert counts.values is not None
        target_s = found(counts)
        again = replace(branch, corner=None, split=None)
        if counts.wide and counts.recall():
            self._go_on(bound, again)
            return target_s
        leaf = self._leaf(bound, counts.values[counts.layout.whole_at])
        if counts.wide and not (branch.tried and branch.tried.same(leaf)):
            # The paths that exclude it may exclude much else of the branch.
            leaf.solve(effort.longer, whole=False)
            self._go_on(bound, replace(again, tried=leaf))
            return target_s
        # Other whole numbers may have better choices: real variables only say that they are no better with parts of them.
        for box in self._beside(branch.box, counts.values):
            self._push(bound, _Branch(box))
        leaf = branch.tried or leaf
        self._push(leaf.bound, _Branch(branch.box, leaf))
        return target_s

    def _parted(
        self, bound: float, branch: _Branch, parts: tuple[Key, float], effort: Effort, found: Found
    ) -> float:
        """Part a branch at one of its fractions, and go on with the side that is nearer. Returns the target from then on."""
        counts, (key, below), split, target_s = self.counts, parts, None, math.inf
        assert counts.values is not None
        if not key[0]:
            target_s = found(counts)
            split = counts.split(self._splits, effort.target_s - bound) if key[1] in counts.layout.n_at else None
            key, below = parts if split is None else ((False, split.column), split.below)
        low, high = dict(branch.box).get(key, (0.0, math.inf))
        rest = tuple(item for item in branch.box if item[0] != key)
        corner = counts.corner if counts.wide else None
        sides = [
            _Branch((*rest, (key, ends)), corner=corner, split=None if split is None else (split, side))
            for side, ends in enumerate(((low, below), (below + 1.0, high)))
        ]
        nearer = not key[0] and bool(counts.values[key[1]] > below + 0.5)
        self._push(bound, sides[1 - nearer])
        self._go_on(bound, sides[nearer])
        return target_s

    def _go_on(self, bound: float, branch: _Branch) -> None:
        """Look at a branch next, whatever others there are: a solver is near it."""
        self._next = (bound, next(self._order), branch)

    def _leaf(self, bound: float, whole: Floats) -> Counts:
        """The exact program of these whole numbers."""
        leaf = Counts(self.counts.ranks, self.counts.pool, exact=True, bound=bound)
        leaf.hold(whole)
        return leaf

    def _told_apart(self, bound: float, effort: Effort) -> bool:
        """Whether few ways to lay whole blocks on the stages may be quicker than the target, and time is left to lay out their
        programs: then each is a leaf. It is tried once."""
        if self._looked_apart or not math.isfinite(effort.target_s):
            return False
        self._looked_apart = True
        patterns, costs = Patterns(self.counts.ranks), self.counts.costs
        if not patterns.possible or costs is None:
            return False
        found = patterns.find(costs, effort.target_s)
        if found is None or len(found.counts) > MOST_LEAVES:
            return False
        left = self._left_by_choices(patterns, costs, found.counts, effort)
        # What that took must not cost the layings that are known.
        return self._lay_out(patterns, list(found.counts[left]), np.maximum(found.seconds, bound)[left], effort.longer)

    def _left_by_choices(
        self, patterns: Patterns, costs: RankCosts, found: NDArray[np.int64], effort: Effort
    ) -> NDArray[np.bool_]:
        """[layings]: those that what ranks take in all leaves too, where that is soon found out."""
        every = np.ones(len(found), dtype=bool)
        layings = layings_of(patterns, costs, self.counts.paths, effort.target_s) if len(found) else None
        if layings is None:
            return every
        _, done = layings.go(effort.target_s, lambda: time.perf_counter() >= effort.deadline, _unheard)
        return np.array([tuple(each) in layings.found for each in found.tolist()], dtype=bool) if done else every

    def _lay_out(self, patterns: Patterns, found: Sequence[NDArray[np.int64]], bounds: Floats, effort: Effort) -> bool:
        """Make leaves of layings, by blocks of the run on each stage, none quicker than its bound; whether there was time."""
        leaves = []
        for counts, bound in zip(found, bounds.tolist(), strict=True):
            if time.perf_counter() >= effort.deadline:
                return False
            leaves.append(self._leaf(bound, self.counts.layout.laid(patterns.by_run(counts))))
        self.finished_s = min(self.finished_s, effort.target_s)
        for leaf in leaves:
            self._push(leaf.bound, _Branch((), leaf))
        return True

    def _settle(self, leaf: Counts, branch: _Branch, effort: Effort, found: Found) -> float:
        """Solve a leaf's exact program. Returns the target from then on."""
        targets = [effort.target_s]

        def told() -> float:
            targets.append(min(targets[-1], found(leaf)))
            return targets[-1]

        before = leaf.tightenings
        if branch.looks:  # What one look does not settle, it seldom would in several.
            _ask(leaf, branch, effort.target_s)
        if branch.choices is None:
            # Paths are cheaper to find with real variables.
            branch.real = branch.real or not leaf.solve(effort, whole=False)
        if branch.choices is not None:
            unfinished = self._decide(leaf, branch, effort, told)
        elif branch.real:
            unfinished = leaf.solve(effort, whole=True, found=told)
        else:
            unfinished = leaf.bound < effort.target_s
        branch.looks += 1
        if unfinished or (branch.choices is None and (
            before < leaf.tightenings <= REPEATS or (leaf.bound < targets[-1] and leaf.sharpen())
        )):
            self._push(leaf.bound, branch)
        else:
            self.finished_s = min(self.finished_s, leaf.bound)
        return targets[-1]

    def _decide(self, leaf: Counts, branch: _Branch, effort: Effort, told: Callable[[], float]) -> bool:
        """Tell a leaf's choices apart rank by rank; where there are too many, no more. Returns whether something is left."""
        choices = branch.choices
        assert choices is not None

        def chosen(found: Chosen) -> float:
            leaf.values, leaf.simulated_s = found.values(leaf.layout, choices.shares), found.step_s
            return told()

        target_s, done = choices.go(effort.target_s, lambda: time.perf_counter() >= effort.deadline, chosen)
        if done:
            leaf.bound = max(leaf.bound, min(target_s, choices.least_s))
        elif choices.too_many:
            branch.choices = None
        return not done

    def _apply(self, box: Box) -> None:
        """Bound rows and columns as the box says, all others as at first."""
        wanted = dict(box)
        for key in [key for key in self._applied if key not in wanted]:
            self._bound(key, 0.0, math.inf)
            del self._applied[key]
        for key, sides in wanted.items():
            if self._applied.get(key) != sides:
                self._bound(key, *sides)
                self._applied[key] = sides

    def _bound(self, key: Key, low: float, high: float) -> None:
        shared, index = key
        if shared:
            self.counts.keep(self.counts.shares[index], int(low), high)
        else:
            self.counts.bound_column(index, low, high)

    def _beside(self, box: Box, values: Floats) -> Iterator[Box]:
        """What a box has beside one point, in parts: a rank's sum is another; or it is the same, and a stage has less than
        here, those before it no less."""
        sides, counts, others = dict(box), self.counts, set(self.counts.layout.n_at.tolist())

        def apart(key: Key, *, more: bool) -> Iterator[Box]:
            """The parts where something is less than here, or more; from then on it is as here, or no less."""
            least, most = (0.0, counts.most(counts.shares[key[1]])) if key[0] else counts.sides(key[1])
            low, high = sides.get(key, (0.0, math.inf))
            low, high = max(low, least), min(high, most)
            here = float(round(values[counts.shares[key[1]].columns].sum() if key[0] else values[key[1]]))
            rest = tuple((each, ends) for each, ends in sides.items() if each != key)
            if low < here:
                yield (*rest, (key, (low, here - 1)))
            if more and here < high:
                yield (*rest, (key, (here + 1, high)))
            sides[key] = (here, here if more else high)

        for at, share in enumerate(counts.shares):
            yield from apart((True, at), more=True)
            for column in share.columns.tolist():  # Where the sum is the same, more is less elsewhere.
                yield from apart((False, column), more=False)
            sides |= {(False, column): (float(round(values[column])),) * 2 for column in share.columns.tolist()}
            others -= set(share.columns.tolist())
        # (Where runs end follows from these.)
        for column in sorted(others):
            yield from apart((False, column), more=True)

    def _parts(self, values: Floats) -> tuple[Key, float] | None:
        """What is farthest from whole, and its whole part: sums of ranks first, then stages, then ends of runs."""
        layout = self.counts.layout
        sums = np.array([values[share.columns].sum() for share in self.counts.shares])
        for shared, indices, amounts in (
            (True, np.arange(len(sums)), sums), (False, layout.n_at, values[layout.n_at]),
            (False, layout.break_at, values[layout.break_at]),
        ):
            away = np.abs(amounts - np.rint(amounts))
            if away.size and away.max() > WHOLE:
                at = int(away.argmax())
                return (shared, int(indices[at])), float(math.floor(amounts[at]))
        return None


def _unheard(_: Chosen) -> float:
    """What layings find is no plan yet."""
    raise AssertionError


def _ask(leaf: Counts, branch: _Branch, target_s: float) -> None:
    """Have a leaf's choices told apart, where that is possible; asked once."""
    if branch.asked or leaf.bound >= target_s or leaf.costs is None:
        return
    branch.asked, branch.choices = True, choices_of(leaf.layout, leaf.paths, leaf.costs.before_s, target_s)


def _opened(bound: float, branch: _Branch) -> Opened:
    held = None if branch.leaf is None else branch.leaf.held
    return Opened(bound, branch.box, None if held is None else tuple(held.tolist()))


def _met(core_s: float, bound: float, target_s: float) -> bool:
    """Whether real variables can raise the bound by little more."""
    return core_s < target_s and core_s - bound < NEAR * (target_s - bound)


def _stuck(bounds: list[float], target_s: float) -> bool:
    """Whether the last paths brought the target no nearer."""
    if len(bounds) <= PATIENCE:
        return False
    gained = bounds[-1] - bounds[-1 - PATIENCE]
    return gained < (PROGRESS * (target_s - bounds[-1]) if math.isfinite(target_s) else PROGRESS * bounds[-1])
