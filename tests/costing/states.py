"""What some elements cost under a ZeRO stage, sharded evenly."""

from __future__ import annotations

from typing import Any

from hardware_profiles import Cluster
from planner.costing.states import Elements, Links, State
from planner.ir.costed import StateCost
from planner.ir.plan import Mesh, Precision


def cost_state(
    trained: int, zero: int, cluster: Cluster, mesh: Mesh, precision: Precision, zero_group: int, *, frozen: int = 0,
    accumulation: int = 2, **options: Any,
) -> StateCost:
    """Of so many ``trained`` and ``frozen`` elements of one rank."""
    group = min(zero_group, mesh.data) if zero else 1
    held = [Elements(whole, -(-whole // group)) for whole in (trained, frozen)]
    state = State(*held, group, cluster.chip, precision, mesh.data == 1, several=accumulation > 1, **options)
    return state.costs((zero,), Links(cluster, mesh, group))[zero]
