"""Levels: which links lie inside which, by the devices that each holds, and what a part of a cluster keeps of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from hardware_profiles.cluster import Level
from hardware_profiles.errors import ProfileFormatError
from hardware_profiles.schema import LinkDocument, ProfileDocument


def part_of(size: int, whole: int, used: int) -> int:
    """Devices of a level of ``size`` where ``used`` of each node's ``whole`` devices count: of a level inside a node no more
    than these, else those of as many nodes as before. 0 of one whose domains they do not fill: some would be joined by it, some
    not."""
    if size > whole:
        return size // whole * used
    return min(size, used) if size >= used or used % size == 0 else 0


def host_part(host_devices: int | None, used: int) -> int | None:
    """Devices that hosts of ``host_devices`` give each where ``used`` of a node count: as many as all of them can."""
    if host_devices is None:
        return None
    return next(count for count in range(min(host_devices, used), 0, -1) if used % count == 0)


def profile_of_part(content: Mapping[str, Any], used: object) -> dict[str, Any]:
    """A packaged profile where ``used`` devices of each node count, a number that nobody has looked at yet."""
    hosts = content.get("host_devices")
    if type(used) is int and used > 0:
        hosts = host_part(hosts, used)
    return {**content, "links": links_of_part(content["links"], content["devices_per_node"], used), "host_devices": hosts}


def links_of_part(links: Mapping[str, Any], whole: object, used: object) -> dict[str, Any]:
    """Packaged links where ``used`` of each node's ``whole`` devices count; without those that add no device to an inner one
    then."""
    if type(whole) is not int or type(used) is not int or used >= whole:
        return dict(links)
    found: dict[str, Any] = {}
    inside = 0
    for name, link in links.items():
        size = None if link["size"] is None else part_of(link["size"], whole, used)
        if size is None or size > inside:
            found[name], inside = {**link, "size": size}, size or inside
    return found


def reached(
    network: Iterable[Level], whole: int, nodes: int, used: int, name: str
) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """Levels of ``nodes`` x ``used`` devices, and those beyond that only more nodes reach; both innermost first, as ``network``
    is, whose limits count ``whole`` devices of a node. Levels that add no device to an inner one are left out. Raises
    ProfileFormatError where no level of the profile ``name`` holds all devices."""
    devices = nodes * used
    levels, beyond = list[Level](), list[Level]()
    size, most = 0, 0.0
    for level in network:
        limit = None if level.limit is None else part_of(level.limit, whole, used)
        if limit is not None and limit <= most:
            continue
        most = math.inf if limit is None else limit
        found = levels if size < devices else beyond
        size = devices if limit is None else min(limit, devices)
        found.append(Level(level.name, size, level.link, limit))
    if size < devices:
        raise ProfileFormatError(
            name, f"the links reach {size} of {devices} devices", "give fewer nodes, or links that join them all"
        )
    return tuple(levels), tuple(beyond)


def check_levels(document: ProfileDocument, where: str) -> None:
    """Refuse links that do not lie one inside the other and hosts that make no node, naming the field."""
    node = document.links.get("node")
    if node is not None and node.size is not None and node.size > document.devices_per_node:
        wrong = f"{node.size} is more than devices_per_node, {document.devices_per_node}"
        right = f"its link joins a node's devices: give devices_per_node: {node.size} and fewer nodes, and host_devices: "
        right += f"{document.devices_per_node} where hosts of so many make a node"
        raise ProfileFormatError(f"{where}: links.node.size", wrong, right)
    hosts = document.host_devices
    if hosts is not None and document.devices_per_node % hosts:
        wrong = f"{hosts} does not divide devices_per_node, {document.devices_per_node}"
        raise ProfileFormatError(f"{where}: host_devices", wrong, "give the devices of each of the hosts that make a node")
    for (inner, inside), (outer, outside) in pairwise(inwards_out(document.links)):
        if inside.size == outside.size:
            wrong = f"{_told(outside)}, as {inner}'s is"
            right = "give the one that lies inside the other its number of devices"
            raise ProfileFormatError(f"{where}: links.{outer}.size", wrong, right)
        if inside.size is not None:
            _check_whole(document, outer, inside.size, f"{inner}'s", where)
    for name, link in document.links.items():
        _check_whole(document, name, document.devices_per_node, "devices_per_node,", where)
        if link.size is not None and document.devices_per_node % min(link.size, document.devices_per_node):
            wrong = f"{link.size} does not divide devices_per_node, {document.devices_per_node}"
            right = "a level inside a node has equally many of its devices"
            raise ProfileFormatError(f"{where}: links.{name}.size", wrong, right)


def _check_whole(document: ProfileDocument, name: str, inner: int, told: str, where: str) -> None:
    """Refuse a level that holds a part of one of ``inner`` devices. All devices of a node or of the cluster may: there it ends
    where a cluster uses no more."""
    size, whole = document.links[name].size, document.devices_per_node
    ends = (whole, whole * document.nodes if document.nodes is not None else whole)
    if size is not None and size > inner and size % inner and size not in ends:
        right = f"a level holds whole ones of what lies inside it; give a multiple of {inner}"
        raise ProfileFormatError(f"{where}: links.{name}.size", f"{size} is no multiple of {told} {inner}", right)


def check_order(document: ProfileDocument, names: Iterable[str], base: str, where: str) -> None:
    """Refuse a size by which a level of the profile ``base`` changes places with another; ``names``: its levels, innermost
    first."""
    kept = [(name, document.links[name]) for name in names]
    for (inner, inside), (outer, outside) in pairwise(kept):
        if _reach(outside) < _reach(inside):
            wrong = f"{_told(outside)}, less than {inner}'s {_told(inside)}, which lies inside it in {base}"
            raise ProfileFormatError(f"{where}: links.{outer}.size", wrong, "sizes are numbers of devices, not of nodes")


def inwards_out(links: Mapping[str, LinkDocument]) -> list[tuple[str, LinkDocument]]:
    """A level lies inside those of more devices."""
    return sorted(links.items(), key=lambda item: _reach(item[1]))


def _reach(link: LinkDocument) -> float:
    return math.inf if link.size is None else link.size


def _told(link: LinkDocument) -> str:
    return "null (all devices)" if link.size is None else str(link.size)
