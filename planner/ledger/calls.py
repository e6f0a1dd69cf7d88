"""Calls of a step, counted; and the rank that makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from planner.ir.plan import Mesh, Plan

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")
WORLD = "world"


@dataclass(frozen=True, slots=True, order=True)
class Call:
    """One call: ``size_bytes`` of the tensor that a rank gives (of a ``recv``: takes), in a group of ``group`` ranks that
    lie along ``axis`` (``world``: they differ along several axes)."""

    kind: str
    axis: str
    group: int
    size_bytes: int


Calls = Counter[Call]


@dataclass(frozen=True)
class RankLedger:
    """What one rank does in a step: calls with their counts, and bytes by category at its peak. ``streams_bytes``: the most
    that each stream's storages take, each at its own moment, added up; ``reserved_bytes``: of torch's caching allocator,
    where it was followed, and ``flushes``: how often it gives memory back."""

    rank: int
    stage: int
    calls: Mapping[Call, int]
    memory_bytes: Mapping[str, int]
    streams_bytes: int
    reserved_bytes: int | None = None
    flushes: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's coordinates."""

    pipeline: int
    data: int
    tensor: int

    @classmethod
    def of(cls, rank: int, mesh: Mesh) -> Place:
        """The coordinates of a rank of the world."""
        return cls(*mesh.place(rank))

    def rank(self, mesh: Mesh) -> int:
        """The rank at these coordinates."""
        return mesh.rank(self.pipeline, self.data, self.tensor)


def call(kind: str, axis: str, group: int, size_bytes: int, count: int = 1) -> Calls:
    """``count`` calls; none in a group of one rank, which moves nothing."""
    return Counter({Call(kind, axis, group, size_bytes): count}) if group > 1 and count else Counter()


def world_axis(mesh: Mesh) -> str:
    """The axis that all ranks together lie along."""
    degrees = {"pipeline": mesh.pipeline, "data": mesh.data, "tensor": mesh.tensor}
    along = [axis for axis, degree in degrees.items() if degree > 1]
    return along[0] if len(along) == 1 else WORLD


def shard_group(plan: Plan) -> int:
    """Data ranks that share a ZeRO shard group."""
    return min(plan.zero_group, plan.mesh.data)
