"""Candidates: mesh degrees, micro-batch, schedule, virtual stages and ZeRO groups; each with what they allow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from cost_models.pipeline import actions_of, is_long
from cost_models.schedules import legal
from cost_models.spans import span_of
from hardware_profiles import Cluster
from planner.constraints import Combination, Constraints, Limit, Value
from planner.constraints_conflicts import smallest_conflict
from planner.ir.counting import counted
from planner.ir.errors import PinError
from planner.ir.graph import ModelGraph
from planner.ir.plan import SCHEDULES, SPLIT_BACKWARD, Mesh, ScheduleName, TensorAxis
from planner.search.allowed import ONCE, Allowed, alternatives
from planner.search.meshes import divisors, meshes_of
from planner.search.request import Request
from planner.search.shape import Shape

ALIKE = 0.9
"""Groups of ranks are alike that get so much of what the largest of them gets, of what is sharded over each."""
Groups = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""A candidate's ZeRO groups, and those in which no block sends for every micro-batch."""
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


@dataclass(frozen=True, slots=True)
class Kind:
    """Candidates that differ in virtual stages, and in ZeRO groups where constraints do not leave the same to all."""

    mesh: Mesh
    micro: int
    accumulation: int
    schedule: ScheduleName
    virtuals: tuple[int, ...]
    groups: tuple[Groups, ...]

    @property
    def candidates(self) -> Iterator[Candidate]:
        """All of them."""
        for virtual in self.virtuals:
            for groups in self.groups:
                yield Candidate(self.mesh, self.micro, self.accumulation, self.schedule, virtual, *groups)

    @property
    def count(self) -> int:
        """Candidates of one ZeRO group each."""
        return len(self.virtuals) * sum(len(once) + sum(map(len, often)) for often, once in self.groups)


@dataclass(frozen=True)
class Candidates:
    """All of a search. ``nearest``: those whose tensor ranks are nearest each other, or all over a tensor degree that has none
    such; ``apart``: the others."""

    nearest: tuple[Kind, ...]
    apart: tuple[Kind, ...]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """All."""
        return *self.nearest, *self.apart

    @property
    def count(self) -> int:
        """Of one ZeRO group each."""
        return sum(kind.count for kind in self.kinds)


def candidates_of(graph: ModelGraph, cluster: Cluster, request: Request) -> Candidates:
    """Everything that constraints, batch and schedules allow. Raises PinError where they leave nothing."""
    _check_patterns(graph, request.constraints)
    _check_schedules(graph, request.constraints)
    meshes = [(_is_near(mesh, cluster), mesh) for mesh in meshes_of(graph, cluster, request.constraints)]
    kinds = [
        (near, kind) for near, mesh in meshes for kind in _kinds(graph, cluster, request.constraints, request.batch, mesh)
    ]
    if not kinds:
        _refuse(graph, cluster, request)
    usual = {kind.mesh.tensor for near, kind in kinds if near}
    return Candidates(
        tuple(kind for near, kind in kinds if near or kind.mesh.tensor not in usual),
        tuple(kind for near, kind in kinds if not near and kind.mesh.tensor in usual),
    )


def _is_near(mesh: Mesh, cluster: Cluster) -> bool:
    """Whether tensor ranks have the links of the nearest."""
    tensor, stride = mesh.tensor_axis
    return stride == 1 or span_of(cluster, tensor, stride) == span_of(cluster, tensor, 1)


def enumerate_candidates(graph: ModelGraph, cluster: Cluster, request: Request) -> list[Candidate]:
    """Those whose tensor ranks are nearest each other, or all over a tensor degree that has none such. Raises PinError where
    there is no candidate at all."""
    return [candidate for kind in candidates_of(graph, cluster, request).nearest for candidate in kind.candidates]


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


def _every_kind(graph: ModelGraph, cluster: Cluster, request: Request) -> Iterator[Kind]:
    for mesh in meshes_of(graph, cluster, request.constraints):
        yield from _kinds(graph, cluster, request.constraints, request.batch, mesh)


def _kinds(graph: ModelGraph, cluster: Cluster, constraints: Constraints, batch: int, mesh: Mesh) -> Iterator[Kind]:
    """The candidates of a mesh."""
    samples, left = divmod(batch, mesh.data)
    if left or not any(groups := zero_groups(cluster, constraints, mesh)):
        return
    known: dict[ScheduleName, tuple[Groups, ...]] = {}
    limits, schedules = constraints.on("virtual"), _schedules(graph, constraints, mesh)
    for micro in divisors(samples):
        if not constraints.admits("microbatch", micro):
            continue
        for schedule in _distinct(schedules, constraints, mesh, micro):
            most, accumulation = len(graph.blocks) // mesh.pipeline, samples // micro
            legal_ones = _legal_virtual(schedule, mesh.pipeline, accumulation, most)
            virtuals = tuple(virtual for virtual in legal_ones if all(limit.admits(virtual) for limit in limits))
            # Conditions alone leave the same to all virtual stages and micro-batches.
            for some in [(virtual,) for virtual in virtuals] if constraints.forbidden else [virtuals] if virtuals else []:
                if schedule not in known or constraints.forbidden:
                    every = Candidate(mesh, micro, accumulation, schedule, some[0], *groups)
                    known[schedule] = tuple(
                        (each.zero_groups, each.once_groups) for each in _apart(every, cluster, constraints, graph)
                    )
                if known[schedule]:
                    yield Kind(mesh, micro, accumulation, schedule, some, known[schedule])


def _schedules(graph: ModelGraph, constraints: Constraints, mesh: Mesh) -> list[ScheduleName]:
    schedules = [name for name in schedules_of(graph) if constraints.admits("schedule", name)]
    return schedules if mesh.pipeline > 1 else sorted(name for name in schedules if name in ("1f1b", "gpipe"))


def _distinct(schedules: list[ScheduleName], constraints: Constraints, mesh: Mesh, micro: int) -> list[ScheduleName]:
    """One rank without a pipeline runs micro-batch after micro-batch: 1f1b says just that, and gpipe the same."""
    if mesh.pipeline > 1:
        return schedules
    asked = constraints.speak_of("schedule", {**mesh.degrees, "axis_order": mesh.order, "microbatch": micro})
    return schedules if asked else schedules[:1]


@lru_cache(maxsize=65536)
def _legal_virtual(schedule: ScheduleName, pipeline: int, accumulation: int, most: int) -> tuple[int, ...]:
    """How many virtual stages a rank may have."""
    return tuple(virtual for virtual in range(1, most + 1) if not legal(schedule, pipeline, virtual, accumulation))


def zero_groups(cluster: Cluster, constraints: Constraints, mesh: Mesh) -> Groups:
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
        return next(_every_kind(graph, cluster, replace(request, constraints=Constraints.of(limits))), None) is not None

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
    every = (candidate for kind in _every_kind(graph, cluster, others) for candidate in kind.candidates)
    found = (each.decided for candidate in every for each in candidate.each)
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
