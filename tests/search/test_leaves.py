"""How a leaf of the branches is looked at, look by look."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from planner.search import branches as branches_module
from planner.search.branches import Branches, _Branch
from planner.search.effort import Effort


@dataclass
class _Leaf:
    """An exact program; real variables come to an end if they are ``quick``, and prove nothing."""

    quick: bool
    bound: float = 1.0
    tightenings: int = 0
    costs: Any = field(default_factory=lambda: SimpleNamespace(before_s=np.zeros(1)))
    layout: Any = None
    paths: Any = None
    solved: list[bool] = field(default_factory=list)

    def solve(self, effort: Effort, *, whole: bool, found: Callable[[], float] | None = None) -> bool:
        self.solved.append(whole)
        return whole or not self.quick


@dataclass
class _Choices:
    """Choices of which none is quicker than the target."""

    least_s: float = math.inf
    too_many: bool = False

    def go(self, target_s: float, over: object, told: object) -> tuple[float, bool]:
        return target_s, True


@pytest.mark.parametrize(("quick", "solved"), [
    (True, [False, True]),  # Real variables said all they could, and whole numbers were sought.
    (False, [False]),  # They would go on.
])
def test_choices_are_told_apart_at_the_second_look(
    monkeypatch: pytest.MonkeyPatch, quick: bool, solved: list[bool]
) -> None:
    monkeypatch.setattr(branches_module, "choices_of", lambda *given: _Choices())
    leaf, effort = _Leaf(quick), Effort(2.0, math.inf)
    branches, branch = _empty(), _Branch((), cast(Any, leaf))
    for left in (True, False):
        assert branch.choices is None and not branch.asked
        branches._settle(cast(Any, leaf), branch, effort, lambda _: math.inf)
        assert bool(branches.heap) == left
        branches.heap.clear()
    assert branch.asked and leaf.bound == 2.0 and branches.finished_s == 2.0
    assert leaf.solved == solved


def test_where_choices_cannot_be_told_apart_it_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[object]()
    monkeypatch.setattr(branches_module, "choices_of", lambda *given: asked.append(given))
    leaf, branches = _Leaf(quick=False), _empty()
    branch = _Branch((), cast(Any, leaf))
    for _ in range(5):
        branches._settle(cast(Any, leaf), branch, Effort(2.0, math.inf), lambda _: math.inf)
    assert len(asked) == 1 and len(branches.heap) == 5 and leaf.solved.count(False) == 5


@pytest.mark.parametrize("proves", [True, False])
def test_what_tolerance_leaves_open_is_solved_more_exactly_once(proves: bool) -> None:
    """Solution and simulation agree within a tolerance; the bound may still be below the target by as much."""

    class Solved(_Leaf):
        sharp = False

        def solve(self, effort: Effort, *, whole: bool, found: Callable[[], float] | None = None) -> bool:
            self.bound = effort.target_s if self.sharp and proves else 1.9
            return False

        def sharpen(self) -> bool:
            before, self.sharp = self.sharp, True
            return not before

    leaf, branches = Solved(quick=True), _empty()
    branch = _Branch((), cast(Any, leaf), asked=True)
    for left in (1, 0):
        branches.heap.clear()
        branches._settle(cast(Any, leaf), branch, Effort(2.0, math.inf), lambda _: math.inf)
        assert len(branches.heap) == left
    assert branches.finished_s == (2.0 if proves else 1.9)


def _empty() -> Branches:
    branches = Branches.__new__(Branches)
    branches.heap, branches.finished_s, branches._order = [], math.inf, itertools.count()
    return branches
