"""The same kind of cluster in another size: what `more nodes` and `fewer devices` mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from hardware_profiles import Cluster, Level, ProfileFormatError, profile_names, resolve_cluster
from hardware_profiles.levels import host_part, part_of
from planner.ir.errors import ProfileError

Resize = Callable[[Cluster, int, int], Cluster]
"""The cluster in another size: nodes, devices of a node."""


def resize_of(spec: str) -> Resize:
    """How to resize the cluster that ``--cluster`` names: the same profile or file in another size, where it can be read so."""
    head = spec.rpartition(":")[0] if re.search(r":[^/:]*$", spec) else spec

    def resize(cluster: Cluster, nodes: int, per_node: int) -> Cluster:
        try:
            return resolve_cluster(f"{head}:{nodes}x{per_node}")
        except ProfileFormatError as error:
            raise ProfileError(error.where, error.wrong, error.right) from error

    return resize


def resized(cluster: Cluster, nodes: int, per_node: int) -> Cluster:
    """``nodes`` x ``per_node`` of the cluster's chips.

    Where its links are those of the packaged profile of its name, that profile's in the new size; otherwise its levels, cut or
    (the outermost one) extended. Raises ProfileError for more than one node of a cluster that knows no link between nodes.
    """
    sized = replace(
        cluster, nodes=nodes, devices_per_node=per_node, host_devices=host_part(cluster.host_devices, per_node)
    )
    if cluster.name in profile_names():
        try:
            if resolve_cluster(f"{cluster.name}:{cluster.nodes}x{cluster.devices_per_node}").levels == cluster.levels:
                return replace(sized, levels=resolve_cluster(f"{cluster.name}:{nodes}x{per_node}").levels)
        except ProfileFormatError as error:
            raise ProfileError(error.where, error.wrong, error.right) from error
    devices = nodes * per_node
    if nodes > 1 and cluster.nodes == 1 and cluster.levels[-1].size <= cluster.devices_per_node:
        raise ProfileError(cluster.name, "has one node and no link between nodes", "give a profile that has its network")
    found: list[Level] = []
    for level in cluster.levels:
        size = min(part_of(level.size, cluster.devices_per_node, per_node), devices)
        if level is cluster.levels[-1]:
            size = devices
        if not found or size > found[-1].size:
            found.append(replace(level, size=size))
    return replace(sized, levels=tuple(found))


def sizes_up_to(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """(nodes, devices of a node), fewest devices first: every part of one node, then whole nodes."""
    per_node = cluster.devices_per_node
    yield from ((1, count) for count in range(1, per_node))
    yield from ((nodes, per_node) for nodes in range(1, cluster.nodes + 1))
