"""Cluster: chips under nested levels of links. Ranks are numbered contiguously, innermost level first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from hardware_profiles.chip import Chip


@dataclass(frozen=True, slots=True)
class Link:
    """What one accelerator can send at a level, one way, while every other accelerator of the level sends too.

    ``efficiency``: share of ``bandwidth_bytes_s`` that large messages reach; ``start_s``: to start one call, whatever it
    sends; ``latency_s``: one step between two accelerators;
    ``peer_bytes_s``: what reaches any one peer (less than the whole where accelerators are wired pair by pair);
    ``reduce_scatter``: how the library makes it (gloo: an all-reduce of which each rank keeps its part);
    ``torus``: one axis of a torus, whose axes carry a collective at the same time; ``send``: what a send takes of the seconds
    that its bytes take as a part of a collective (of gloo's, which sum and copy on the host, a third).
    """

    name: str
    bandwidth_bytes_s: float
    latency_s: float
    efficiency: float
    start_s: float
    peer_bytes_s: float
    reduce_scatter: Literal["ring", "all_reduce"] = "ring"
    torus: bool = False
    send: float = 1.0

    def rate(self, members: int) -> float:
        """Bytes/s that one of ``members`` >= 2 accelerators reaches with large messages to the others."""
        return self.efficiency * min(self.bandwidth_bytes_s, (members - 1) * self.peer_bytes_s)


@dataclass(frozen=True, slots=True)
class Level:
    """A domain of ``size`` accelerators (cumulative: inner levels counted) that reach each other by ``link``. ``limit``: those
    that it holds in a cluster of more nodes (None: all)."""

    name: str
    size: int
    link: Link
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """``nodes`` x ``devices_per_node`` equal chips; ``levels`` innermost first, the last one holds every device.
    ``beyond``: levels that only a cluster of more nodes reaches, innermost first; no price or plan of this one follows them.
    ``host_devices``: of each of the hosts that make a node, which programs are started on (None: a node is one host);
    ``sources``: kind and source of each number, by its dotted path in the profile."""

    name: str
    chip: Chip
    levels: tuple[Level, ...]
    nodes: int
    devices_per_node: int
    host_devices: int | None = None
    beyond: tuple[Level, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def devices_per_host(self) -> int:
        return self.host_devices or self.devices_per_node

    @property
    def hosts(self) -> int:
        return self.devices // self.devices_per_host

    @property
    def fingerprint(self) -> str:
        """16 hex digits over every number that can change a prediction (hosts, sources, what runs there and what only a larger
        cluster reaches cannot)."""
        facts = asdict(self)
        del facts["host_devices"], facts["beyond"], facts["sources"], facts["chip"]["runs_torch"]
        for level in facts["levels"]:
            del level["limit"]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
