"""The same kind of cluster in another size: what `more nodes` and `fewer devices` mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from hardware_profiles import Cluster, ProfileFormatError, resolve_cluster
from hardware_profiles.levels import host_part, reached
from planner.ir.errors import ProfileError

Resize = Callable[[Cluster, int, int], Cluster]
"""The cluster in another size: nodes, devices of a node."""


def head_of(spec: str) -> str:
    """The profile or file that ``--cluster`` names, without its counts."""
    return spec.rpartition(":")[0] if re.search(r":[^/:]*$", spec) else spec


def resize_of(spec: str) -> Resize:
    """How to resize the cluster that ``--cluster`` names: the same profile or file in another size, where it can be read so."""
    head = head_of(spec)

    def resize(cluster: Cluster, nodes: int, per_node: int) -> Cluster:
        try:
            return resolve_cluster(f"{head}:{nodes}x{per_node}")
        except ProfileFormatError as error:
            raise ProfileError(error.where, error.wrong, error.right) from error

    return resize


def resized(cluster: Cluster, nodes: int, per_node: int) -> Cluster:
    """``nodes`` x ``per_node``, at most as many of a node as the cluster has, of its chips, by the levels of its network.
    Raises ProfileError for more than these join."""
    network = (*cluster.levels, *cluster.beyond)
    try:
        levels, beyond = reached(network, cluster.devices_per_node, nodes, per_node, cluster.name)
    except ProfileFormatError as error:
        raise ProfileError(error.where, error.wrong, error.right) from error
    return replace(
        cluster, nodes=nodes, devices_per_node=per_node, levels=levels, beyond=beyond,
        host_devices=host_part(cluster.host_devices, per_node),
    )


def sizes_up_to(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """(nodes, devices of a node), fewest devices first: every part of one node, then whole nodes."""
    per_node = cluster.devices_per_node
    yield from ((1, count) for count in range(1, per_node))
    yield from ((nodes, per_node) for nodes in range(1, cluster.nodes + 1))
