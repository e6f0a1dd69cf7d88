"""Constraints: what a plan must, must not, or may at most decide.

A *condition* limits one decision: ``tensor=8``, ``pipeline<=4``, ``recompute in [none,selective]``. A condition on what
every layer decides for itself (recompute, zero) may name the layers it is about by a glob over block names:
``layers.*: zero=3``. A *combination* is forbidden as a whole: no plan may meet all its conditions; a plan meets a
condition about layers if one of the layers does. *Head-room* is memory of every device that no plan may use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Literal

from planner.ir.costed import RECOMPUTE_LEVELS
from planner.ir.plan import AXIS_ORDERS, SCHEDULES

Value = int | str | bool
Relation = Literal["=", "!=", "<=", ">=", "in", "not in"]
MESH_DEGREES = ("pipeline", "data", "context", "expert", "tensor")
DEGREES = (*MESH_DEGREES, "microbatch", "virtual", "zero_group")
"""Decisions that are positive numbers."""
LAYERED = ("recompute", "zero")
"""Decisions that every layer takes for itself."""
NAMES = (
    "pipeline", "data", "context", "expert", "tensor", "microbatch", "virtual", "schedule", "recompute", "zero", "zero_group",
    "sequence_parallel", "axis_order",
)
DOMAINS: dict[str, tuple[Value, ...]] = {
    "axis_order": AXIS_ORDERS, "schedule": SCHEDULES,
    "recompute": RECOMPUTE_LEVELS, "zero": (0, 1, 2, 3), "sequence_parallel": (False, True),
}
"""All values of the decisions that have finitely many."""


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Condition:
    """``name relation values``; one value but for ``in`` and ``not in``. ``layers``: a glob over block names, None: all.
    ``where``: the flag or the field that it was written in."""

    name: str
    relation: Relation
    values: tuple[Value, ...]
    layers: str | None = None
    where: str = field(default="--pin", compare=False)

    def admits(self, value: Value) -> bool:
        """Whether a decision may take this value."""
        match self.relation:
            case "=" | "in":
                return value in self.values
            case "!=" | "not in":
                return value not in self.values
        given, limit = int(value), int(self.values[0])
        return given <= limit if self.relation == "<=" else given >= limit

    @property
    def exact(self) -> Value | None:
        """The one value that is left, where the condition says just that."""
        return self.values[0] if self.relation == "=" or (self.relation == "in" and len(self.values) == 1) else None

    def covers(self, block: str) -> bool:
        """Whether a layer is meant: the glob fits its whole name, or what follows one of the name's dots."""
        if self.layers is None:
            return True
        parts = block.split(".")
        return any(fnmatchcase(".".join(parts[first:]), self.layers) for first in range(len(parts)))

    @property
    def field(self) -> str:
        """What an error names: ``--pin tensor``, ``job.yaml: constraints.tensor``."""
        return f"{self.where} {self.name}" if self.where.startswith("--") else self.where

    def __str__(self) -> str:
        values = ",".join(_text(value) for value in self.values)
        said = f"{self.name} {self.relation} [{values}]" if "in" in self.relation else f"{self.name}{self.relation}{values}"
        return said if self.layers is None else f"{self.layers}: {said}"


@dataclass(frozen=True, slots=True)
class Combination:
    """Conditions that no plan may meet together."""

    conditions: tuple[Condition, ...]
    where: str = field(default="--forbid", compare=False)

    def __str__(self) -> str:
        return ", ".join(map(str, self.conditions))


def _percent(part: float) -> str:
    """The fewest digits that mean this part."""
    tried = (f"{Decimal(part) * 100:.{digits}f}" for digits in range(25))
    return next((said for said in tried if float(said) / 100 == part), f"{Decimal(part) * 100:f}")


@dataclass(frozen=True, slots=True)
class Headroom:
    """Memory of every device that is kept free: a ``part`` of it, or ``size_bytes``. Read again, what is written is as much."""

    part: float = 0.0
    size_bytes: int = 0
    where: str = field(default="--headroom", compare=False)

    def of(self, memory_bytes: int) -> int:
        """Bytes kept free of ``memory_bytes``."""
        return max(self.size_bytes, round(self.part * memory_bytes))

    def __str__(self) -> str:
        if self.part:
            return f"{_percent(self.part)}%"
        units = (("GiB", 2**30), ("MiB", 2**20), ("B", 1))
        return next(f"{self.size_bytes // factor} {unit}" for unit, factor in units if self.size_bytes % factor == 0)


Limit = Condition | Combination | Headroom


@dataclass(frozen=True, slots=True)
class Constraints:
    """All limits of a job; none of them: everything is allowed."""

    conditions: tuple[Condition, ...] = ()
    forbidden: tuple[Combination, ...] = ()
    headroom: Headroom | None = None

    def on(self, name: str) -> tuple[Condition, ...]:
        """The conditions on one decision."""
        return tuple(condition for condition in self.conditions if condition.name == name)

    def admits(self, name: str, value: Value) -> bool:
        """Whether the conditions leave a value to a decision that is one for the whole plan."""
        return all(condition.admits(value) for condition in self.conditions if condition.name == name)

    def speak_of(self, name: str, decided: Mapping[str, Value]) -> bool:
        """Whether a decision is limited for plans that have ``decided`` these others: by a condition, or in a combination whose
        conditions on the others they meet."""
        return any(condition.name == name for condition in self.conditions) or any(
            any(each.name == name for each in combination.conditions)
            and all(each.name not in decided or each.admits(decided[each.name]) for each in combination.conditions)
            for combination in self.forbidden
        )

    def pinned(self, name: str) -> Value | None:
        """The value that a decision of the whole plan is fixed to; None where it is not."""
        exact = [c.exact for c in self.conditions if c.name == name and c.layers is None and c.exact is not None]
        return exact[0] if exact else None

    def degree(self, name: str) -> int | None:
        """As :meth:`pinned`, of a number."""
        value = self.pinned(name)
        return None if value is None else int(value)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Every limit by itself."""
        return (*self.conditions, *self.forbidden, *(() if self.headroom is None else (self.headroom,)))

    @classmethod
    def of(cls, limits: tuple[Limit, ...]) -> Constraints:
        """The constraints that these limits make."""
        heads = [limit for limit in limits if isinstance(limit, Headroom)]
        return cls(
            tuple(limit for limit in limits if isinstance(limit, Condition)),
            tuple(limit for limit in limits if isinstance(limit, Combination)), heads[-1] if heads else None,
        )

    def without(self, *dropped: Limit) -> Constraints:
        """The same but for some limits."""
        return Constraints.of(tuple(limit for limit in self.limits if limit not in dropped))

    def with_(self, *added: Limit) -> Constraints:
        """More limits; head-room replaces what there was."""
        return Constraints.of((*self.limits, *added))

    def replacing(self, newer: Constraints) -> Constraints:
        """``newer`` over these: a decision that it limits (for the same layers) is limited by it alone."""
        said = {(condition.name, condition.layers) for condition in newer.conditions}
        kept = tuple(condition for condition in self.conditions if (condition.name, condition.layers) not in said)
        return replace(
            newer, conditions=kept + newer.conditions, forbidden=self.forbidden + newer.forbidden,
            headroom=newer.headroom or self.headroom,
        )

    @property
    def written(self) -> tuple[str, ...]:
        """Every limit as the command line writes it, flag and all (without a shell's quotes)."""
        return tuple(f"{flag_of(limit)} {limit}" for limit in self.limits)

    def patterns(self) -> Iterator[Condition]:
        """Every condition that names layers."""
        for condition in (*self.conditions, *(c for combination in self.forbidden for c in combination.conditions)):
            if condition.layers is not None:
                yield condition


def flag_of(limit: Limit) -> str:
    """The flag that a limit is written with."""
    if isinstance(limit, Condition):
        return "--pin"
    return "--forbid" if isinstance(limit, Combination) else "--headroom"
