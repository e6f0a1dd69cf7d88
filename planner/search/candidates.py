"""Candidates: mesh degrees, micro-batch, schedule, virtual stages and ZeRO groups; each with what they allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from cost_models.pipeline import actions_of, is_long
from cost_models.schedules import legal
from cost_models.spans import span_of
from hardware_profiles import Cluster
from planner.constraints import Combination, Constraints, Limit, Value
from planner.constraints_conflicts import smallest_conflict
from planner.evaluate import send_seconds
from planner.ir.counting import counted
from planner.ir.errors import PinError
from planner.ir.graph import ModelGraph
from planner.ir.plan import AXIS_ORDERS, SCHEDULES, SPLIT_BACKWARD, AxisOrder, Mesh, ScheduleName, TensorAxis
from planner.search.allowed import ONCE, Allowed, alternatives
from planner.search.request import Request
from planner.search.shape import Shape

USUAL_ORDERS: tuple[AxisOrder, ...] = ("pipeline-data-tensor", "data-pipeline-tensor")
"""In which tensor ranks are nearest each other."""
MUCH = 2**20
"""Bytes that are mostly rate, not latency."""
ALIKE = 0.9
"""Groups of ranks are alike that get so much of what the largest of them gets, of what is sharded over each."""
Group = tuple[int, int, TensorAxis, int, int, bool]
"""What decides the prices of blocks: (data, its stride, tensor axis, micro-batch, ZeRO group, whether there is a pipeline)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """``zero_groups``: over how many ranks ZeRO may shard, one number for the whole plan, with any stage; together those that
    are looked at as one first, because they are alike. ``once_groups``: others, where no block sends for every micro-batch."""

    mesh: Mesh
    micro: int
    accumulation: int
    schedule: ScheduleName
    virtual: int
    zero_groups: tuple[tuple[int, ...], ...]
    once_groups: tuple[int, ...] = ()

    @property
    def zero_group(self) -> int:
        """Of a candidate that has but one."""
        (group,) = self.groups
        return group

    @property
    def groups(self) -> tuple[int, ...]:
        """All of its ZeRO groups."""
        return (*itertools.chain.from_iterable(self.zero_groups), *self.once_groups)

    @property
    def first(self) -> Candidate:
        """The candidate of the first ZeRO group alone."""
        return self.with_groups((self.zero_groups[0][:1],)) if self.zero_groups else self.with_groups((), self.once_groups[:1])

    def with_groups(self, zero_groups: tuple[tuple[int, ...], ...], once_groups: tuple[int, ...] = ()) -> Candidate:
        """The same with these ZeRO groups."""
        if zero_groups is self.zero_groups and once_groups is self.once_groups:
            return self
        return Candidate(self.mesh, self.micro, self.accumulation, self.schedule, self.virtual, zero_groups, once_groups)

    @property
    def each(self) -> tuple[Candidate, ...]:
        """A candidate of each ZeRO group alone."""
        if len(self.groups) == 1:
            return (self,)
        return (
            *(self.with_groups(((group,),)) for group in itertools.chain.from_iterable(self.zero_groups)),
            *(self.with_groups((), (group,)) for group in self.once_groups),
        )

    @property
    def actions(self) -> int:
        """Of one step's schedule."""
        return actions_of(self.schedule, self.mesh.pipeline, self.virtual, self.accumulation)

    @property
    def long(self) -> bool:
        """Whether its schedule is known from shorter ones alone."""
        return is_long(self.schedule, self.mesh.pipeline, self.virtual, self.accumulation)

    @property
    def group(self) -> Group:
        mesh = self.mesh
        return mesh.data, mesh.data_stride, mesh.tensor_axis, self.micro, self.zero_group, mesh.pipeline > 1

    @property
    def decided(self) -> dict[str, Value]:
        """The decisions of the whole plan that a candidate fixes, by the names that constraints have for them."""
        mesh = self.mesh
        return {
            "pipeline": mesh.pipeline, "data": mesh.data, "context": mesh.context, "expert": mesh.expert, "tensor": mesh.tensor,
            "axis_order": mesh.order, "microbatch": self.micro, "virtual": self.virtual, "schedule": self.schedule,
            "zero_group": self.zero_group,
        }


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def enumerate_candidates(graph: ModelGraph, cluster: Cluster, request: Request) -> list[Candidate]:
    """Everything that constraints, batch and schedules allow. Raises PinError where they leave nothing."""
    _check_patterns(graph, request.constraints)
    _check_schedules(graph, request.constraints)
    found = list(_candidates(graph, cluster, request))
    if not found:
        _refuse(graph, cluster, request)
    return found


def _check_patterns(graph: ModelGraph, constraints: Constraints) -> None:
    """Raise PinError for a glob that names no layer."""
    names = [block.name for block in graph.blocks]
    for condition in constraints.patterns():
        if not any(map(condition.covers, names)):
            some = ", ".join(names[:3]) + (f", ... {names[-1]}" if len(names) > 3 else "")
            raise PinError(condition.field, f"{condition.layers!r} names no layer", f"the model's are {some}")


def _check_schedules(graph: ModelGraph, constraints: Constraints) -> None:
    """Raise PinError where the model has none of the schedules that constraints leave."""
    possible, asked = schedules_of(graph), [name for name in SCHEDULES if constraints.admits("schedule", name)]
    if asked and not set(possible) & set(asked):
        first, second = graph.strands[:2]
        raise PinError(
            next(condition.field for condition in constraints.on("schedule")),
            f"{' and '.join(asked)} would split backward passes by what leads to a stage's inputs, and gradients of this "
            f"model begin in two places, {first} and {second}", " or ".join(possible),
        )


def schedules_of(graph: ModelGraph) -> tuple[ScheduleName, ...]:
    """The schedules that can run the model (:attr:`ModelGraph.strands`)."""
    return tuple(name for name in SCHEDULES if name not in SPLIT_BACKWARD or len(graph.strands) < 2)


def _candidates(graph: ModelGraph, cluster: Cluster, request: Request) -> Iterator[Candidate]:
    for mesh in _meshes(graph, cluster, request.constraints):
        if request.batch % mesh.data == 0:
            samples = request.batch // mesh.data
            for micro in divisors(samples):
                if request.constraints.admits("microbatch", micro):
                    yield from _scheduled(graph, cluster, request.constraints, mesh, micro, samples // micro)


def _meshes(graph: ModelGraph, cluster: Cluster, constraints: Constraints) -> Iterator[Mesh]:
    for pipeline in divisors(cluster.devices):
        if pipeline > len(graph.blocks) or not constraints.admits("pipeline", pipeline):
            continue
        for tensor in divisors(cluster.devices // pipeline):
            data = cluster.devices // pipeline // tensor
            if constraints.admits("tensor", tensor) and constraints.admits("data", data):
                mesh = Mesh(pipeline=pipeline, data=data, tensor=tensor)
                yield from (replace(mesh, order=order) for order in axis_orders(cluster, constraints, mesh))


def axis_orders(cluster: Cluster, constraints: Constraints, mesh: Mesh) -> tuple[AxisOrder, ...]:
    """Those that are admitted; of several with the same links, and to which the same is forbidden, the first. Tensor ranks are
    nearest each other, and all pipelines lie alike over the topology, unless constraints speak of orders."""
    asked = constraints.speak_of("axis_order", mesh.degrees)
    admitted = [
        order for order in (AXIS_ORDERS if asked else USUAL_ORDERS) if constraints.admits("axis_order", order)
        and (asked or order == USUAL_ORDERS[0] or _alike(replace(mesh, order=order), cluster))
    ]
    if len(admitted) < 2:
        return tuple(admitted)
    named = [each for combination in constraints.forbidden for each in combination.conditions if each.name == "axis_order"]
    found: dict[Hashable, AxisOrder] = {}
    for order in admitted:
        links = links_of(replace(mesh, order=order), cluster)
        found.setdefault((links, *(condition.admits(order) for condition in named)), order)
    return tuple(found.values())


def _alike(mesh: Mesh, cluster: Cluster) -> bool:
    """Whether all pipelines lie alike over the topology."""
    ranks = mesh.pipeline * mesh.pipeline_stride
    return all(level.size % ranks == 0 or ranks % level.size == 0 for level in cluster.levels)


def links_of(mesh: Mesh, cluster: Cluster) -> Hashable:
    """How tensor ranks, data ranks and pipelines are joined, as far as the order of the axes decides it."""
    return (
        span_of(cluster, *mesh.tensor_axis), span_of(cluster, mesh.data, mesh.data_stride), send_seconds(cluster, mesh, 1),
        send_seconds(cluster, mesh, MUCH),
    )


def _scheduled(
    graph: ModelGraph, cluster: Cluster, constraints: Constraints, mesh: Mesh, micro: int, accumulation: int
) -> Iterator[Candidate]:
    schedules: Sequence[ScheduleName] = [name for name in schedules_of(graph) if constraints.admits("schedule", name)]
    if mesh.pipeline == 1:
        # One rank without a pipeline runs micro-batch after micro-batch: 1f1b says just that, and gpipe the same.
        schedules = sorted(name for name in schedules if name in ("1f1b", "gpipe"))
        asked = constraints.speak_of("schedule", {**mesh.degrees, "axis_order": mesh.order, "microbatch": micro})
        schedules = schedules if asked else schedules[:1]
    groups = zero_groups(cluster, constraints, mesh)
    if not any(groups):
        return
    for schedule in schedules:
        left: list[Candidate] | None = None
        for virtual in range(1, len(graph.blocks) // mesh.pipeline + 1):
            if legal(schedule, mesh.pipeline, virtual, accumulation):
                continue
            if not constraints.admits("virtual", virtual):
                continue
            every = Candidate(mesh, micro, accumulation, schedule, virtual, *groups)
            if left is None or constraints.forbidden:  # Conditions alone leave the same to all virtual stages.
                left = list(_apart(every, cluster, constraints, graph))
            yield from (every.with_groups(each.zero_groups, each.once_groups) for each in left)


def zero_groups(cluster: Cluster, constraints: Constraints, mesh: Mesh) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Every divisor of the data axis that is admitted. Under a pipeline those that are like the whole axis or its part inside a
    node, then others, which send once a step; unless constraints speak of groups, or leave nothing that sends once."""
    asked = constraints.speak_of("zero_group", {**mesh.degrees, "axis_order": mesh.order})
    if constraints.pinned("zero") == 0 and not asked:
        return ((mesh.data,),), ()
    admitted = tuple(group for group in reversed(divisors(mesh.data)) if constraints.admits("zero_group", group))
    parts = _like(admitted, cluster, mesh)
    if mesh.pipeline == 1 or asked or not any(constraints.admits("zero", zero) for zero in ONCE):
        return parts, ()
    inside = next((part for part in parts if not _crosses(part[0], cluster, mesh)), parts[0])
    kept = tuple(dict.fromkeys((parts[0], inside)))
    return kept, tuple(group for part in parts if part not in kept for group in part if group > 1)


def _like(groups: tuple[int, ...], cluster: Cluster, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Those that are alike together: across nodes or inside one, and each rank gets nearly as much from the others (all but
    one in a group of what is sharded)."""
    found = list[list[int]]()
    for group in groups:
        first = found[-1][0] if found else 0
        alike = first and _crosses(group, cluster, mesh) == _crosses(first, cluster, mesh)
        if alike and 1 - 1 / group >= ALIKE * (1 - 1 / first):
            found[-1].append(group)
        else:
            found.append([group])
    return tuple(map(tuple, found))


def _crosses(group: int, cluster: Cluster, mesh: Mesh) -> bool:
    """Whether some ZeRO group of so many data ranks lies in several nodes."""
    return group > 1 and cluster.devices_per_node % (group * mesh.data_stride) != 0


def _apart(every: Candidate, cluster: Cluster, constraints: Constraints, graph: ModelGraph) -> Iterator[Candidate]:
    """A candidate's ZeRO groups that leave the blocks a choice; apart where they do not leave the same."""
    if not any(condition.name == "zero_group" for each in constraints.forbidden for condition in each.conditions):
        left = allowed_choices(every.first, constraints, graph)
        if left:
            yield every if any(space.has_once for space in left) else every.with_groups(every.zero_groups)
        return
    alike: dict[object, list[int]] = {}
    for group in every.groups:
        alone = every.with_groups(((group,),))
        spaces = tuple(allowed_choices(alone, constraints, graph, parallel) for parallel in (None, False, True))
        if any(space.has_once or group not in every.once_groups for space in spaces[0]):
            alike.setdefault(spaces, []).append(group)
    for found in alike.values():
        often = tuple(group for group in found if group not in every.once_groups)
        yield every.with_groups(_like(often, cluster, every.mesh), tuple(group for group in found if group not in often))


def _refuse(graph: ModelGraph, cluster: Cluster, request: Request) -> None:
    """Raise PinError about the smallest set of constraints that leaves no candidate."""
    def possible(limits: tuple[Limit, ...]) -> bool:
        return next(_candidates(graph, cluster, replace(request, constraints=Constraints.of(limits))), None) is not None

    conflict = smallest_conflict(request.constraints.limits, possible)
    devices = f"{counted(cluster.devices, 'device')}, a batch of {request.batch} and {counted(len(graph.blocks), 'block')}"
    if not conflict:
        raise PinError("--batch", f"no mesh and schedule fits {devices}", "another batch or number of devices")
    said = " and ".join(f"not ({limit})" if isinstance(limit, Combination) else str(limit) for limit in conflict)
    wrong = f"{said} leave{'s' if len(conflict) == 1 else ''} no candidate on {devices}"
    raise PinError(_field(conflict[-1]), wrong, _open_values(graph, cluster, request, conflict))


def _field(limit: Limit) -> str:
    return getattr(limit, "field", None) or limit.where


def _open_values(graph: ModelGraph, cluster: Cluster, request: Request, conflict: tuple[Limit, ...]) -> str:
    """The values that the last limit's decision may have under all other constraints."""
    others = replace(request, constraints=request.constraints.without(conflict[-1]))
    name = getattr(conflict[-1], "name", "")
    found = (each.decided for candidate in _candidates(graph, cluster, others) for each in candidate.each)
    values = {decided[name] for decided in found if name in decided}
    if not values:
        return "leave one of them out" if len(conflict) > 1 else "leave it out"
    return f"{name} in [{', '.join(str(value) for value in sorted(values, key=lambda v: (str(type(v)), v)))}]"


def allowed_choices(
    candidate: Candidate, constraints: Constraints, graph: ModelGraph, sequence_parallel: bool | None = None
) -> tuple[Allowed, ...]:
    """The spaces of ZeRO stages and recomputation that constraints and schedule leave to a candidate of one ZeRO group (see
    :func:`alternatives`). ``sequence_parallel``: None where that is not known yet."""
    decided = candidate.decided if constraints.forbidden else {}  # Of no use to conditions alone.
    if sequence_parallel is not None:
        decided["sequence_parallel"] = sequence_parallel
    names = tuple(block.name for block in graph.blocks) if next(constraints.patterns(), None) else ()
    spaces = alternatives(constraints, candidate.schedule, decided, names)
    if not candidate.once_groups:
        return spaces
    return tuple(space.once for space in spaces if space.has_once)


def shape_of(candidate: Candidate, cluster: Cluster) -> Shape:
    capacity = cluster.chip.memory_bytes - cluster.chip.reserve_bytes
    return Shape(candidate.schedule, candidate.mesh.pipeline, candidate.virtual, candidate.accumulation, capacity)
