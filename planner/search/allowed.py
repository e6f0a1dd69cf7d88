"""What constraints and schedule leave to the layers: sets of recomputation levels and ZeRO stages, block by block."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from planner.constraints import LAYERED, Condition, Constraints, Value
from planner.ir.costed import RECOMPUTE_LEVELS, Recompute
from planner.ir.plan import SPLIT_BACKWARD, ScheduleName

ONCE = (0, 1)
"""ZeRO stages that send once a step."""
Choice = tuple[tuple[Recompute, ...], tuple[int, ...]]
"""Recomputation levels and ZeRO stages that one block may have."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The choices that constraints and schedule leave. ``recompute`` and ``zero``: of any block; ``layers``: those of each
    block, where they differ. ``fixed_zero``: bodies of tied parameters, whose blocks share a stage. ``split``: the schedule
    parts backward passes."""

    recompute: tuple[Recompute, ...]
    zero: tuple[int, ...]
    fixed_zero: tuple[tuple[str, int], ...] = ()
    layers: tuple[Choice, ...] = ()
    split: bool = False

    @property
    def has_once(self) -> bool:
        """Whether every block has a ZeRO stage that sends once a step."""
        return any(zero in ONCE for zero in self.zero) and all(any(z in ONCE for z in stages) for _, stages in self.layers)

    @property
    def once(self) -> Allowed:
        """Without the ZeRO stages that send for every micro-batch."""
        layers = tuple((levels, tuple(zero for zero in stages if zero in ONCE)) for levels, stages in self.layers)
        return replace(self, zero=tuple(zero for zero in self.zero if zero in ONCE), layers=layers)

    def of_block(self, block: int) -> Choice:
        """What one block of the chain may choose from."""
        return self.layers[block] if self.layers else (self.recompute, self.zero)

    def stages_of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """The ZeRO stages that all of these blocks may have."""
        return tuple(zero for zero in self.zero if all(zero in self.of_block(block)[1] for block in blocks))


def alternatives(
    constraints: Constraints, schedule: ScheduleName, decided: Mapping[str, Value], blocks: tuple[str, ...]
) -> tuple[Allowed, ...]:
    """Product-form spaces that together hold every legal choice of the layers and no other.

    ``decided``: values of the whole plan's decisions; combinations about decisions that it does not name count as not met.
    A forbidden combination whose other conditions are met must fail in one of its conditions about layers, for all of the
    layers that this means: one space for each way to choose these.
    """
    rest = []
    for combination in constraints.forbidden:
        layered = tuple(condition for condition in combination.conditions if condition.name in LAYERED)
        others = [condition for condition in combination.conditions if condition.name not in LAYERED]
        if all(condition.name in decided and condition.admits(decided[condition.name]) for condition in others):
            if not layered:
                return ()
            rest.append(layered)
    asked = tuple(condition for condition in constraints.conditions if condition.name in LAYERED)
    named = any(c.layers is not None for c in itertools.chain(asked, *rest))
    return _spaces(asked, tuple(rest), schedule in SPLIT_BACKWARD, blocks if named else ())


@lru_cache(maxsize=4096)
def _spaces(
    asked: tuple[Condition, ...], combinations: tuple[tuple[Condition, ...], ...], split: bool, blocks: tuple[str, ...]
) -> tuple[Allowed, ...]:
    found: list[Allowed] = []
    for refused in itertools.product(*combinations):
        choices = tuple(_choice(asked, refused, split, block) for block in blocks or ("",))
        if all(levels and stages for levels, stages in choices):
            found.append(_widest(choices, split, layers=bool(blocks)))
    return tuple(
        space for at, space in enumerate(found)
        if not any(_within(space, other) and (at > i or not _within(other, space)) for i, other in enumerate(found) if i != at)
    )


def _choice(asked: Sequence[Condition], refused: Sequence[Condition], split: bool, block: str) -> Choice:
    """A block's levels and stages."""
    def open_to(name: str, value: Value) -> bool:
        return all(c.admits(value) for c in asked if c.name == name and (not block or c.covers(block))) and not any(
            c.admits(value) for c in refused if c.name == name and (not block or c.covers(block))
        )

    levels = tuple(level for level in RECOMPUTE_LEVELS if (level == "none" or not split) and open_to("recompute", level))
    stages = tuple(zero for zero in (0, 1, 2, 3) if not (split and zero == 3) and open_to("zero", zero))
    return levels, stages


def _widest(choices: Sequence[Choice], split: bool, *, layers: bool) -> Allowed:
    levels = tuple(level for level in RECOMPUTE_LEVELS if any(level in choice[0] for choice in choices))
    stages = tuple(zero for zero in (0, 1, 2, 3) if any(zero in choice[1] for choice in choices))
    differ = layers and any(choice != choices[0] for choice in choices)
    return Allowed(levels, stages, (), tuple(choices) if differ else (), split)


def _within(space: Allowed, other: Allowed) -> bool:
    """Whether every choice of ``space`` is one of ``other``."""
    count = max(len(space.layers), len(other.layers), 1)
    pairs = [(space.of_block(i), other.of_block(i)) for i in range(count)]
    return all(set(mine[0]) <= set(theirs[0]) and set(mine[1]) <= set(theirs[1]) for mine, theirs in pairs)


@lru_cache(maxsize=4096)
def union_of(spaces: tuple[Allowed, ...]) -> Allowed:
    """One space that holds them all (and perhaps more): what a bound may count with."""
    return Allowed(
        tuple(level for level in RECOMPUTE_LEVELS if any(level in space.recompute for space in spaces)),
        tuple(zero for zero in (0, 1, 2, 3) if any(zero in space.zero for space in spaces)),
        split=all(space.split for space in spaces),
    )
