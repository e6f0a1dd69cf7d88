"""How far apart the ranks of a tensor axis may lie."""

from __future__ import annotations

from cost_models.spans import span_of
from hardware_profiles import Cluster
from planner.ir.graph import ModelGraph
from planner.ir.plan import TensorAxis


def strides_apart(graph: ModelGraph, cluster: Cluster, tensor: int) -> tuple[int, ...]:
    """Where its ranks are not nearest each other: in the meshes of the model and the cluster, one stride of those with the same
    links, none with the links of the nearest."""
    found, others = {span_of(cluster, tensor, 1): 1}, cluster.devices // tensor
    for pipeline in range(1, min(others, len(graph.blocks)) + 1):
        if others % pipeline == 0:
            for stride in (pipeline, others // pipeline, others):
                found.setdefault(span_of(cluster, tensor, stride), stride)
    return tuple(found.values())[1:]


def placed_as_nearest(cluster: Cluster, axis: TensorAxis) -> bool:
    """Whether a tensor axis has the placements of the nearest ranks: where it has their links, and where it has more ranks than
    a node, so that the nearest cross nodes too."""
    tensor, stride = axis
    return stride == 1 or tensor > cluster.devices_per_node or span_of(cluster, *axis) == span_of(cluster, tensor, 1)


def placed_over(graph: ModelGraph, cluster: Cluster, axis: TensorAxis) -> tuple[int, ...]:
    """The strides that a tensor axis is placed for: all other axes of a degree share their placements."""
    return (1,) if placed_as_nearest(cluster, axis) else strides_apart(graph, cluster, axis[0])
