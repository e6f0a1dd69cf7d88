"""Meshes: degrees of the axes, and their order over the topology."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from cost_models.spans import span_of
from hardware_profiles import Cluster
from planner.constraints import Constraints
from planner.evaluate import send_seconds
from planner.ir.graph import ModelGraph
from planner.ir.plan import AXIS_ORDERS, AxisOrder, Mesh

NEAR: AxisOrder = "data-pipeline-tensor"
"""Pipelines of neighbouring ranks, or of such groups of tensor ranks."""
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
    """Those that are admitted; of several with the same links, and to which the same is forbidden, the first.

    Unless constraints speak of orders, pipelines of neighbouring ranks all lie alike over the topology; more tensor ranks than
    a node has are nearest each other; and of orders in which tensor and data ranks have the same links only those are left
    between whose pipeline ranks no other sends faster."""
    admitted = [order for order in AXIS_ORDERS if constraints.admits("axis_order", order)]
    asked = constraints.speak_of("axis_order", mesh.degrees)
    if not asked:
        near, apart = _alike(replace(mesh, order=NEAR), cluster), mesh.tensor <= cluster.devices_per_node
        admitted = [order for order in admitted if (near if order == NEAR else apart or order.endswith("tensor"))]
    if len(admitted) < 2:
        return tuple(admitted)
    named = [each for combination in constraints.forbidden for each in combination.conditions if each.name == "axis_order"]
    alike: dict[Hashable, dict[tuple[float, ...], AxisOrder]] = {}
    for order in admitted:
        beside, sent_s = links_of(replace(mesh, order=order), cluster)
        alike.setdefault((beside, *(condition.admits(order) for condition in named)), {}).setdefault(sent_s, order)
    left = (each if asked else _quickest(each) for each in alike.values())
    return tuple(sorted((order for each in left for order in each.values()), key=AXIS_ORDERS.index))


def _quickest(orders: Mapping[tuple[float, ...], AxisOrder]) -> Mapping[tuple[float, ...], AxisOrder]:
    """By seconds to send so much: those that no other beats at every size."""
    return {
        sent_s: order for sent_s, order in orders.items()
        if not any(other != sent_s and all(map(float.__le__, other, sent_s)) for other in orders)
    }


def _alike(mesh: Mesh, cluster: Cluster) -> bool:
    """Whether all pipelines lie alike over the topology."""
    ranks = mesh.pipeline * mesh.pipeline_stride
    return all(level.size % ranks == 0 or ranks % level.size == 0 for level in cluster.levels)


def links_of(mesh: Mesh, cluster: Cluster) -> tuple[Hashable, tuple[float, ...]]:
    """As far as the order of the axes decides it: how tensor ranks and data ranks are joined, and seconds to send little and
    much between pipeline ranks."""
    if len(cluster.levels) == 1:
        return None, ()
    beside = span_of(cluster, *mesh.tensor_axis), span_of(cluster, mesh.data, mesh.data_stride)
    return beside, (send_seconds(cluster, mesh, 1), send_seconds(cluster, mesh, MUCH))
