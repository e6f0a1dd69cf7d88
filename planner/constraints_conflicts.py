"""Contradictions between constraints: two that can never hold together, and the smallest set that leaves no plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from planner.constraints import DEGREES, DOMAINS, Condition, Constraints, Limit, Value
from planner.ir.errors import PinError
from planner.ir.plan import SPLIT_BACKWARD

LARGEST_CONFLICT = 3
"""Sets of so many limits are all tried, smallest first; beyond, limits are dropped one by one."""
_FIRST_NUMBERS = range(1, 65)


def _schedule_virtual(schedule: Value, virtual: Value) -> tuple[str, str] | None:
    if schedule in ("gpipe", "1f1b") and virtual != 1:
        return f"schedule {schedule} has one stage a rank", "virtual=1 or interleaved-1f1b"
    if schedule == "zbv" and virtual != 2:
        return f"schedule zbv has two stages a rank, not {virtual}", "virtual=2"
    if schedule == "interleaved-1f1b" and virtual == 1:
        return "interleaved-1f1b needs at least two stages a rank", "virtual of 2 or more, or schedule=1f1b"
    return None


def _schedule_pipeline(schedule: Value, pipeline: Value) -> tuple[str, str] | None:
    if schedule not in ("gpipe", "1f1b") and pipeline == 1:
        return f"{schedule} needs at least 2 pipeline ranks", "pipeline of 2 or more, or schedule=1f1b"
    return None


def _schedule_zero(schedule: Value, zero: Value) -> tuple[str, str] | None:
    if schedule in SPLIT_BACKWARD and zero == 3:
        return f"torch loses gradients of ZeRO 3 under {schedule}", "zero=0, 1 or 2"
    return None


def _schedule_recompute(schedule: Value, level: Value) -> tuple[str, str] | None:
    if schedule in SPLIT_BACKWARD and level != "none":
        return f"{schedule} would recompute several times", "recompute=none"
    return None


def _pipeline_virtual(pipeline: Value, virtual: Value) -> tuple[str, str] | None:
    if pipeline == 1 and int(virtual) > 1:
        return "one pipeline rank has no virtual stages", "virtual=1 or pipeline of 2 or more"
    return None


def _tensor_parallel(tensor: Value, parallel: Value) -> tuple[str, str] | None:
    if tensor == 1 and parallel is True:
        return "one tensor rank has no sequence to share", "sequence_parallel=false or tensor of 2 or more"
    return None


_RULES: dict[tuple[str, str], Callable[[Value, Value], tuple[str, str] | None]] = {
    ("pipeline", "virtual"): _pipeline_virtual, ("schedule", "virtual"): _schedule_virtual,
    ("schedule", "pipeline"): _schedule_pipeline, ("schedule", "zero"): _schedule_zero,
    ("schedule", "recompute"): _schedule_recompute, ("tensor", "sequence_parallel"): _tensor_parallel,
}
"""Why two values cannot be together and what would be right; None where they can."""


def check_contradictions(constraints: Constraints) -> None:
    """Raise PinError for the first two conditions that no plan of any model can satisfy together."""
    for first, second in itertools.combinations(constraints.conditions, 2):
        if first.name == second.name:
            _check_same(first, second)
        elif (first.name, second.name) == ("data", "zero_group"):
            _check_group(first, second)
        elif (second.name, first.name) == ("data", "zero_group"):
            _check_group(second, first)
        elif (first.name, second.name) in _RULES:
            _check_pair(first, second)
        elif (second.name, first.name) in _RULES:
            _check_pair(second, first)


def _check_same(first: Condition, second: Condition) -> None:
    if None not in (first.layers, second.layers) and first.layers != second.layers:
        return  # Which layers both mean is known when the model is.
    if not any(first.admits(value) and second.admits(value) for value in _values(first, second)):
        wrong = f"is both {first.exact} and {second.exact}" if None not in (first.exact, second.exact) else (
            f"{second} contradicts {first}: no value satisfies both"
        )
        raise PinError(second.field, wrong, f"change one of them ({first} was given as {first.field})")


def _check_group(data: Condition, group: Condition) -> None:
    """Whether an admitted group divides the data ranks, where they are given; the search knows which degrees others allow."""
    if data.exact is None or any(group.admits(number) for number in _divisors(int(data.exact))):
        return
    given = "no such group divides" if group.exact is None else f"{group.exact} does not divide"
    raise PinError(group.field, f"{group} contradicts {data}: {given} data={data.exact}", "a divisor of data")


def _divisors(number: int) -> set[int]:
    return {each for low in range(1, math.isqrt(number) + 1) if number % low == 0 for each in (low, number // low)}


def _check_pair(first: Condition, second: Condition) -> None:
    """``first`` and ``second`` in the order of the rule."""
    rule, reason = _RULES[first.name, second.name], ("", "")
    for one in filter(first.admits, _values(first)):
        for other in filter(second.admits, _values(second)):
            against = rule(one, other)
            if against is None:
                return
            reason = reason if reason[0] else against
    if not reason[0]:
        return
    # The rule's advice is about its second decision.
    raise PinError(second.field, f"{second} contradicts {first}: {reason[0]}", reason[1])


def _values(*conditions: Condition) -> Sequence[Value]:
    """Values among which an answer exists if there is one at all."""
    name = conditions[0].name
    if name in DOMAINS:
        return DOMAINS[name]
    assert name in DEGREES
    said = {int(value) + step for condition in conditions for value in condition.values for step in (-1, 0, 1)}
    return sorted(said.union(_FIRST_NUMBERS) - {0})


def smallest_conflict(limits: Sequence[Limit], possible: Callable[[tuple[Limit, ...]], bool]) -> tuple[Limit, ...]:
    """A smallest set of ``limits`` that is not ``possible`` (asked of sets only, from small to large); of sets larger than
    LARGEST_CONFLICT, one from which no limit can be left out. All limits together must be impossible."""
    for size in range(min(LARGEST_CONFLICT, len(limits)) + 1):
        for subset in itertools.combinations(limits, size):
            if not possible(subset):
                return subset
    kept = tuple(limits)
    for limit in limits:
        fewer = tuple(other for other in kept if other is not limit)
        if not possible(fewer):
            kept = fewer
    return kept
