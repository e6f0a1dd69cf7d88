"""ZeRO groups that matter: those that no other beats in all that parameters cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hardware_profiles import Engine
from planner.costing.state_prices import StateCosts
from planner.ir.costed import StateCost
from planner.search.candidates import Candidate
from planner.search.tables import Floats

Costs = tuple[float, ...]


def without_beaten(
    candidate: Candidate, priced: Sequence[Sequence[StateCosts]], stages: Sequence[int], costs_of: Callable[[StateCost], Costs]
) -> Candidate:
    """Less the ZeRO groups under which nothing costs less than under a larger one: their plans are no worse under that one.
    (Sums of tied gradients over stages move less, the larger the group.) ``priced``: for each of its groups, of every option;
    ``stages``: that blocks may have, of which stage 0 knows no groups. ``costs_of``: what matters of one."""
    kept: list[int] = []
    known: list[tuple[int, dict[int, Floats]]] = []
    for group, options in sorted(zip(candidate.groups, priced, strict=True), key=lambda pair: -pair[0]):
        distinct = {id(states): states for option in options for states in option.values()}.values()
        here = [zero for zero in stages if zero == 1 or (zero and group not in candidate.once_groups)]
        costs = {zero: np.array([costs_of(states[zero]) for states in distinct if zero in states]) for zero in here}
        if not any(all(zero in other and (other[zero] <= costs[zero]).all() for zero in here) for _, other in known):
            kept.append(group)
        known.append((group, costs))
    parts = (tuple(group for group in part if group in kept) for part in candidate.zero_groups)
    return candidate.with_groups(tuple(filter(None, parts)), tuple(g for g in candidate.once_groups if g in kept))


def with_copies(sharded: Sequence[StateCosts], copies: Sequence[StateCosts]) -> tuple[StateCosts, ...]:
    """The stages of ``sharded``, and stage 0, under which groups do not matter, of another group (``copies``). What options
    share is one object still."""
    both = {
        id(stages): {0: copies[at][name][0], **stages} for at, option in enumerate(sharded) for name, stages in option.items()
    }
    return tuple({name: both[id(stages)] for name, stages in option.items()} for option in sharded)


def seconds_and_bytes(engine: Engine, state: StateCost) -> Costs:
    """Where nothing hides gradients, they and the update are one time."""
    once_s = engine.gradients_floor * state.once_comm_s + state.optimizer_s
    once = (once_s,) if engine.gradients_hidden == 0 else (state.once_comm_s, state.optimizer_s)
    return *once, state.forward_comm_s, state.backward_comm_s, *bytes_alone(state)


def bytes_alone(state: StateCost) -> Costs:
    """All the time, once there are gradients, transient ones, and those of them that stay."""
    return state.parameters_bytes + state.optimizer_bytes, state.gradients_bytes, state.gather_bytes, state.lasting_bytes
