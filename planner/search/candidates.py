"""Candidates: mesh degrees, micro-batch, schedule, virtual stages and ZeRO group; each with what they allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cost_models.schedules import legal
from hardware_profiles import Cluster
from planner.ir.costed import RECOMPUTE_LEVELS
from planner.ir.errors import PinError
from planner.ir.graph import ModelGraph
from planner.ir.plan import SCHEDULES, SPLIT_BACKWARD, Mesh, ScheduleName
from planner.search.chain import Allowed
from planner.search.columns import Shape
from planner.search.pins import Pins
from planner.search.request import Request

MOST_VIRTUAL = 8
Group = tuple[int, int, int, int, bool]
"""What decides the prices of blocks: (data, tensor, micro-batch, ZeRO group, whether there is a pipeline)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    mesh: Mesh
    micro: int
    accumulation: int
    schedule: ScheduleName
    virtual: int
    zero_group: int

    @property
    def group(self) -> Group:
        return self.mesh.data, self.mesh.tensor, self.micro, self.zero_group, self.mesh.pipeline > 1


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def enumerate_candidates(graph: ModelGraph, cluster: Cluster, request: Request) -> list[Candidate]:
    """Everything that pins, batch and schedules allow. Raises PinError where the pins leave nothing."""
    pins = request.pins
    found = [
        candidate
        for mesh in _meshes(graph, cluster, pins)
        if request.batch % mesh.data == 0
        for micro in divisors(request.batch // mesh.data)
        if pins.microbatch in (None, micro)
        for candidate in _scheduled(graph, cluster, pins, mesh, micro, request.batch // mesh.data // micro)
    ]
    if not found:
        _refuse(graph, cluster, request)
    return found


def _meshes(graph: ModelGraph, cluster: Cluster, pins: Pins) -> Iterator[Mesh]:
    """Tensor parallelism stays inside the fastest domain, unless it is pinned."""
    for pipeline in divisors(cluster.devices):
        if pipeline > len(graph.blocks) or pins.pipeline not in (None, pipeline):
            continue
        for tensor in divisors(cluster.devices // pipeline):
            data = cluster.devices // pipeline // tensor
            if pins.tensor is None and tensor > cluster.levels[0].size:
                continue
            if pins.tensor in (None, tensor) and pins.data in (None, data):
                yield Mesh(pipeline=pipeline, data=data, tensor=tensor)


def _scheduled(
    graph: ModelGraph, cluster: Cluster, pins: Pins, mesh: Mesh, micro: int, accumulation: int
) -> Iterator[Candidate]:
    for schedule in SCHEDULES:
        if pins.schedule not in (None, schedule) or (schedule in SPLIT_BACKWARD and not _split_allowed(pins)):
            continue
        # One rank without a pipeline runs micro-batch after micro-batch: 1f1b says just that.
        if mesh.pipeline == 1 and schedule != (pins.schedule or "1f1b"):
            continue
        for virtual in range(1, MOST_VIRTUAL + 1) if pins.virtual is None else (pins.virtual,):
            if virtual * mesh.pipeline > len(graph.blocks) or legal(schedule, mesh.pipeline, virtual, accumulation):
                continue
            for zero_group in _zero_groups(cluster, pins, mesh):
                yield Candidate(mesh, micro, accumulation, schedule, virtual, zero_group)


def _split_allowed(pins: Pins) -> bool:
    return pins.zero != 3 and pins.recompute in (None, "none")


def _zero_groups(cluster: Cluster, pins: Pins, mesh: Mesh) -> tuple[int, ...]:
    """The whole data axis, or the part of it inside a node."""
    if pins.zero_group is not None:
        return (pins.zero_group,) if mesh.data % pins.zero_group == 0 else ()
    if mesh.data == 1 or pins.zero == 0:
        return (mesh.data,)
    inside = cluster.devices_per_node // mesh.tensor
    return (mesh.data, inside) if 1 < inside < mesh.data and mesh.data % inside == 0 else (mesh.data,)


def _refuse(graph: ModelGraph, cluster: Cluster, request: Request) -> None:
    pins, devices = request.pins, cluster.devices
    for name in ("pipeline", "data", "tensor"):
        degree = getattr(pins, name)
        if degree is not None and devices % degree:
            raise PinError(f"--pin {name}", f"{degree} does not divide {devices} devices", f"one of {divisors(devices)}")
    if pins.pipeline is not None and pins.pipeline * (pins.virtual or 1) > len(graph.blocks):
        raise PinError("--pin pipeline", f"the model has {len(graph.blocks)} blocks, fewer than stages", "fewer stages")
    if pins.data is not None and request.batch % pins.data:
        wrong = f"{pins.data} does not divide the batch of {request.batch}"
        raise PinError("--pin data", wrong, f"one of {divisors(request.batch)}")
    if pins.pipeline and pins.data and pins.tensor and pins.pipeline * pins.data * pins.tensor != devices:
        product = pins.pipeline * pins.data * pins.tensor
        raise PinError("--pin", f"pipeline x data x tensor = {product}, not the {devices} devices", "a product that matches")
    if pins.schedule is not None:
        reasons = [
            reason
            for mesh in _meshes(graph, cluster, pins) if request.batch % mesh.data == 0
            for reason in [legal(pins.schedule, mesh.pipeline, pins.virtual or (1 if pins.schedule in ("gpipe", "1f1b") else 2),
                                 request.batch // mesh.data // (pins.microbatch or 1))]
            if reason
        ]
        if reasons:
            raise PinError("--pin schedule", reasons[-1], "another schedule, or fewer pins")
    wrong = f"no mesh of {devices} devices, batch {request.batch} and schedule satisfies all pins"
    raise PinError("--pin", wrong, "fewer pins")


def allowed_choices(candidate: Candidate, pins: Pins) -> Allowed:
    """ZeRO stages and recomputation that pins and schedule leave. Without data parallelism only ZeRO 0 has a meaning."""
    split = candidate.schedule in SPLIT_BACKWARD
    levels = tuple(level for level in RECOMPUTE_LEVELS if pins.recompute in (None, level) and (level == "none" or not split))
    # Sharding over one rank is no sharding; a pinned stage is kept as the user wrote it.
    stages = (0, 1, 2, 3) if candidate.zero_group > 1 else (0,)
    zero = (pins.zero,) if pins.zero is not None else tuple(z for z in stages if not (split and z == 3))
    return Allowed(levels, zero)


def shape_of(candidate: Candidate, cluster: Cluster) -> Shape:
    capacity = cluster.chip.memory_bytes - cluster.chip.reserve_bytes
    return Shape(candidate.schedule, candidate.mesh.pipeline, candidate.virtual, candidate.accumulation, capacity)
