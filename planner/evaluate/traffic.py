"""Seconds of what crosses pipeline cuts, and of the sums of single numbers."""

from __future__ import annotations

from cost_models.collectives import collective_s, point_to_point_s, span_of
from hardware_profiles import Cluster
from planner.ir.plan import (
    Mesh,
)


def sums_seconds(cluster: Cluster, mesh: Mesh) -> float:
    """The all-reduces of single numbers that a step makes whatever its plan: the loss' weight over the data axis, loss and
    gradient norm over the world (runtime/loop.py, ``gradients``)."""
    spans = [span_of(cluster, mesh.data, mesh.context * mesh.tensor), span_of(cluster, mesh.devices, 1)]
    return sum(collective_s("all_reduce", span, 16) for span in spans if span.size > 1)


def send_seconds(cluster: Cluster, mesh: Mesh, size_bytes: float) -> float:
    """Seconds to send ``size_bytes`` to the next pipeline rank: the slowest of all pairs of neighbours."""
    stride = mesh.data * mesh.context * mesh.tensor
    if mesh.pipeline == 1 or size_bytes <= 0:
        return 0.0
    ranks = {pipeline * stride for pipeline in range(mesh.pipeline - 1)}
    return max(point_to_point_s(cluster, stride, size_bytes, rank) for rank in ranks)
