"""Which plans of a job are one plan: what only looks different, and what constraints pass over to find another."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from hardware_profiles import Cluster
from planner.constraints import Combination, Condition, Constraints
from planner.ir.plan import AXIS_ORDERS, AxisOrder, Mesh, Plan
from planner.search.candidates import zero_groups
from planner.search.meshes import axis_orders, divisors, links_of


def essence(plan: Plan, cluster: Cluster) -> Hashable:
    """What a program does: two plans with the same one run alike. With one micro-batch gpipe is 1f1b; where no parameter is
    sharded over data ranks, the ZeRO group is nothing; nor is the order of axes where it changes no link."""
    schedule, mesh = plan.schedule, plan.mesh
    if plan.batch.accumulation == 1 and schedule.name == "gpipe":
        schedule = replace(schedule, name="1f1b")
    mesh = replace(mesh, order=_joined_alike(mesh, cluster)[0])
    shards = any(decision.zero for stage in plan.stages for decision in stage.decisions)
    placed = tuple(sorted((name, placement) for name, placement in plan.placements.items()))
    return mesh, plan.batch, schedule, plan.zero_group if shards else 0, plan.stages, placed


def passed_over(plan: Plan, cluster: Cluster, constraints: Constraints) -> tuple[Combination, ...]:
    """Combinations that forbid all plans of a plan's candidate and leave all others that ``constraints`` admit, and no more:
    they mean the same when they are read again from a file.

    What all of its plans share with what only looks different is not named: the schedule where there is no pipeline, the
    order of axes where the mesh has but one, the ZeRO group where there is but one or nothing is sharded. Where a group is
    named constraints speak of it, and other groups of the mesh become candidates (docs/job.md): these are forbidden by
    themselves.
    """
    mesh, batch, schedule = plan.mesh, plan.batch, plan.schedule
    of_degrees = [Condition(name, "=", (getattr(mesh, name),)) for name in ("pipeline", "data", "tensor")]
    of_mesh = of_degrees
    if len(axis_orders(cluster, constraints, mesh)) > 1:
        same = _joined_alike(mesh, cluster)
        of_mesh = [*of_degrees, Condition("axis_order", "in" if len(same) > 1 else "=", same)]
    named = [*of_mesh, Condition("microbatch", "=", (batch.micro,)), Condition("virtual", "=", (schedule.virtual,))]
    if mesh.pipeline > 1:
        named.append(Condition("schedule", "=", (schedule.name,)))
    often, once = zero_groups(cluster, constraints, mesh)
    groups = [*(group for part in often for group in part), *once]
    if len(groups) == 1 or constraints.pinned("zero") == 0:
        return (Combination(tuple(named)),)
    named.append(Condition("zero_group", "=", (plan.zero_group,)))
    opened = tuple(group for group in divisors(mesh.data) if group not in groups and constraints.admits("zero_group", group))
    beside = [(opened, ()), (once, (Condition("zero", ">=", (2,)),))]
    return (
        Combination(tuple(named)),
        *(Combination((*of_mesh, Condition("zero_group", "in", some), *layers)) for some, layers in beside if some),
    )


def _joined_alike(mesh: Mesh, cluster: Cluster) -> tuple[AxisOrder, ...]:
    """The orders of the axes with the links of a mesh."""
    links = links_of(mesh, cluster)
    return tuple(order for order in AXIS_ORDERS if links_of(replace(mesh, order=order), cluster) == links)
