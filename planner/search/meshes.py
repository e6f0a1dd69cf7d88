"""Meshes: degrees of the axes, and their order over the topology."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import replace

from cost_models.spans import span_of
from hardware_profiles import Cluster
from planner.constraints import Constraints
from planner.evaluate import send_seconds
from planner.ir.graph import ModelGraph
from planner.ir.plan import AXIS_ORDERS, AxisOrder, Mesh

MUCH = 2**20
"""Bytes that are mostly rate, not latency."""


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def meshes_of(graph: ModelGraph, cluster: Cluster, constraints: Constraints) -> Iterator[Mesh]:
    """Every mesh that constraints admit, in every order of its axes."""
    for pipeline in divisors(cluster.devices):
        if pipeline > len(graph.blocks) or not constraints.admits("pipeline", pipeline):
            continue
        for tensor in divisors(cluster.devices // pipeline):
            data = cluster.devices // pipeline // tensor
            if constraints.admits("tensor", tensor) and constraints.admits("data", data):
                mesh = Mesh(pipeline=pipeline, data=data, tensor=tensor)
                yield from (replace(mesh, order=order) for order in axis_orders(cluster, constraints, mesh))


def axis_orders(cluster: Cluster, constraints: Constraints, mesh: Mesh) -> tuple[AxisOrder, ...]:
    """Those that are admitted; of several with the same links, and to which the same is forbidden, the first."""
    admitted = [order for order in AXIS_ORDERS if constraints.admits("axis_order", order)]
    if len(admitted) < 2:
        return tuple(admitted)
    named = [each for combination in constraints.forbidden for each in combination.conditions if each.name == "axis_order"]
    found: dict[Hashable, AxisOrder] = {}
    for order in admitted:
        links = links_of(replace(mesh, order=order), cluster)
        found.setdefault((links, *(condition.admits(order) for condition in named)), order)
    return tuple(found.values())


def practised(cluster: Cluster, mesh: Mesh) -> int:
    """Grows with what practice prefers: tensor ranks among those that the fastest links join."""
    return mesh.tensor if mesh.tensor <= cluster.levels[0].size else -mesh.tensor


def links_of(mesh: Mesh, cluster: Cluster) -> Hashable:
    """How tensor ranks, data ranks and pipelines are joined, as far as the order of the axes decides it."""
    if len(cluster.levels) == 1:
        return None
    sent_s = send_seconds(cluster, mesh, 1), send_seconds(cluster, mesh, MUCH)
    return span_of(cluster, *mesh.tensor_axis), span_of(cluster, mesh.data, mesh.data_stride), sent_s
