"""What parameters cost on one rank, of every body under every option: which of its tensors are shared by which ranks, and under
which ZeRO stages and groups. What candidates have in common is found once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, reduce
from math import prod

from cost_models.memory import shard_elements
from hardware_profiles import DEFAULT_ENGINE, Cluster, Engine
from planner.costing.engine_states import flat_state, gathered_one_by_one
from planner.costing.exchanges import expert_parameters
from planner.costing.states import Elements, Links, State
from planner.ir.body import Body, BodyValue
from planner.ir.costed import StateCost
from planner.ir.graph import ModelGraph
from planner.ir.placement import BodyPlacement, Placement, local_type
from planner.ir.plan import Mesh, Precision

ZERO_STAGES = (0, 1, 2, 3)
Placements = Mapping[str, BodyPlacement]
"""By body."""
StateCosts = Mapping[str, Mapping[int, StateCost]]
"""By body and ZeRO stage."""
_Held = Sequence[tuple[BodyValue, Placement]]
_Local = tuple[tuple[tuple[int, ...], bool, bool], ...]
"""Of parameters: sizes of one rank's part, whether it is trained, and whether its gradient is summed over the tensor axis."""
_Case = tuple[int, bool, bool, bool]
"""What states of the same parameters differ in: ZeRO group, whether no other rank of the data axis has them, whether a step has
several micro-batches, whether gradients come to the block's outputs."""


@dataclass(frozen=True, slots=True)
class _Shards:
    """Elements of one rank, of which it keeps a ``shard`` over ``group`` ranks: of ``tensors`` trained parameters, and of
    others (``frozen``). ``largest``: elements of the largest of all; ``partial``: of the trained shard, those that sum their
    gradients over the tensor axis."""

    group: int
    elements: int
    tensors: int
    shard: int
    frozen: int
    frozen_shard: int
    largest: int
    partial: int


@dataclass(frozen=True, eq=False)
class _Part:
    """Parameters of a body that the same ranks hold copies of. ``expert``: they are those of experts; ``resident``: see
    :class:`State`."""

    local: _Local
    expert: bool
    resident: bool
    states: dict[_Case, tuple[State, _Shards]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Lying:
    """Parameters of a body that lie so under some options. ``parts``: by whether there is a pipeline, and expert ranks."""

    body: Body
    placements: tuple[Placement, ...]
    degree: int
    parts: dict[tuple[bool, bool], tuple[_Part, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class StatePrices:
    """Of one graph on one cluster."""

    graph: ModelGraph
    cluster: Cluster
    precision: Precision
    engine: Engine = DEFAULT_ENGINE
    _known: dict[int, tuple[Sequence[Placements], list[dict[str, _Lying]]]] = field(default_factory=dict)

    def by_group(
        self, options: Sequence[Placements], mesh: Mesh, zero_groups: Sequence[int], accumulation: int = 2,
        stages: Sequence[int] = ZERO_STAGES,
    ) -> list[tuple[StateCosts, ...]]:
        """For each ZeRO group, the state of every body under every ZeRO stage that is asked for, for each option. Without a
        pipeline a parameter that several blocks share is held once, by the first of them."""
        lying, reached = self._lying(options, mesh.tensor), self.graph.gradients.reached_bodies(mesh.pipeline)
        distinct = {id(each): each for option in lying for each in option.values()}
        found = list[tuple[StateCosts, ...]]()
        for zero_group in zero_groups:
            links = {expert: self._links(zero_group, mesh, expert=expert) for expert in {False, mesh.expert > 1}}
            costs = {
                key: reduce(_added, (
                    self._costs(part, links[part.expert], stages, several=accumulation > 1, reached=each.body.name in reached)
                    for part in self._parts(each, mesh)
                ))
                for key, each in distinct.items()
            }
            found.append(tuple({name: costs[id(each)] for name, each in option.items()} for option in lying))
        return found

    def _links(self, zero_group: int, mesh: Mesh, *, expert: bool) -> tuple[Links, Links]:
        """Of the ranks that hold copies of experts, or of what every rank of the data and context axes has: alone, and in ZeRO
        groups."""
        axes, apart = (_experts(mesh), mesh.expert) if expert else (_dense(mesh), 1)
        group = min(_group(zero_group, mesh, apart), axes.data)
        return Links(self.cluster, axes, 1), Links(self.cluster, axes, group)

    def _lying(self, options: Sequence[Placements], degree: int) -> list[dict[str, _Lying]]:
        """By option and body. Options differ in some of the bodies, and not all of these in their parameters."""
        known = self._known.get(id(options))
        if known is not None:
            return known[1]
        distinct: dict[tuple[str, tuple[Placement, ...]], _Lying] = {}
        for body in self.graph.bodies:
            for placed in dict.fromkeys(option[body.name].parameters for option in options):
                distinct[body.name, placed] = _Lying(body, placed, degree)
        found = [
            {body.name: distinct[body.name, option[body.name].parameters] for body in self.graph.bodies} for option in options
        ]
        self._known[id(options)] = options, found
        return found

    def _parts(self, lying: _Lying, mesh: Mesh) -> tuple[_Part, ...]:
        """Parameters by the ranks that hold copies of them: context ranks hold what data ranks hold, and sum gradients with
        them; an expert is held by one in ``expert`` of those."""
        key = mesh.pipeline > 1, mesh.expert > 1
        if key not in lying.parts:
            body = lying.body
            shares = mesh.pipeline == 1 and body.name in self._sharing
            held = self._first_uses[body.name] if shares else {value.name for value in body.parameters}
            apart = expert_parameters(body) if mesh.expert > 1 else frozenset()
            mine = [pair for pair in zip(body.parameters, lying.placements, strict=True) if pair[0].name in held]
            dense, experts = ([pair for pair in mine if (pair[0].name in apart) == expert] for expert in (False, True))
            flat = self.engine.keeps == "fused"
            lying.parts[key] = tuple(
                _Part(_local(pairs, lying.degree, flat=flat), expert, shares)
                for pairs, expert in ((dense, False), (experts, True)) if pairs or not expert
            )
        return lying.parts[key]

    @cached_property
    def _sharing(self) -> frozenset[str]:
        """The bodies of blocks that share a parameter with others."""
        tied = {parameter.fqn for parameter, _ in self.graph.tied}
        return frozenset(block.body for block in self.graph.blocks if any(fqn in tied for _, fqn in block.parameters))

    @cached_property
    def _first_uses(self) -> Mapping[str, frozenset[str]]:
        """By body, the parameters that some block of it is the first to use."""
        seen, names = set[str](), dict[str, set[str]]()
        for block in self.graph.blocks:
            fresh = {name for name, fqn in block.parameters if fqn not in seen}
            names.setdefault(block.body, set()).update(fresh)
            seen.update(fqn for _, fqn in block.parameters)
        return {body: frozenset(found) for body, found in names.items()}

    def _costs(
        self, part: _Part, links: tuple[Links, Links], stages: Sequence[int], *, several: bool, reached: bool
    ) -> dict[int, StateCost]:
        """By ZeRO stage; 0 shards over no group. ``several``, ``reached``: as :class:`State` has them."""
        found: dict[int, StateCost] = {}
        alone, sharded = links
        for each, some in ((alone, [zero for zero in stages if not zero]), (sharded, [zero for zero in stages if zero])):
            if some:
                state, held = self._state(part, (each.group, each.mesh.data == 1, several, reached))
                costs = state.costs(some, each)
                found.update((zero, self._as_engine(cost, held, zero)) for zero, cost in costs.items())
        return found

    def _state(self, part: _Part, case: _Case) -> tuple[State, _Shards]:
        if case not in part.states:
            group, alone, several, reached = case
            held = _sharded(part.local, group)
            trained, frozen = Elements(held.elements, held.shard), Elements(held.frozen, held.frozen_shard)
            part.states[case] = State(
                trained, frozen, group, self.cluster.chip, self.precision, alone, held.partial, held.tensors,
                several, part.resident, reached, self.engine,
            ), held
        return part.states[case]

    def _as_engine(self, state: StateCost, held: _Shards, zero: int) -> StateCost:
        if self.engine.gathers == "parameters":
            return gathered_one_by_one(state, held.largest, zero, self.precision)
        if self.engine.keeps == "fused":
            return flat_state(state, held.elements, held.group, zero, self.precision, self.engine)
        return state


def state_costs(
    graph: ModelGraph, options: Sequence[Placements], cluster: Cluster, mesh: Mesh, precision: Precision, zero_group: int,
    accumulation: int = 2, stages: Sequence[int] = ZERO_STAGES, engine: Engine = DEFAULT_ENGINE,
) -> tuple[StateCosts, ...]:
    """The state of every body under every ZeRO stage that is asked for, for each option, in one ZeRO group."""
    return StatePrices(graph, cluster, precision, engine).by_group(options, mesh, (zero_group,), accumulation, stages)[0]


def _dense(mesh: Mesh) -> Mesh:
    """As the ranks see it that hold copies of what every rank of the data and context axes has."""
    return mesh if mesh.context == 1 else replace(mesh, data=mesh.data * mesh.context, context=1)


def _experts(mesh: Mesh) -> Mesh:
    """The same of experts. Their copies lie ``expert`` apart: neighbours of the tensor axis do not matter to what follows."""
    if mesh.expert == 1:
        return mesh
    ranks = mesh.data * mesh.context
    return replace(mesh, data=ranks // mesh.expert, context=1, expert=1, tensor=mesh.tensor * mesh.expert)


def _group(zero_group: int, mesh: Mesh, apart: int) -> int:
    """The ZeRO group of parameters whose copies are so far apart."""
    ranks = mesh.data * mesh.context
    return max(1, (ranks if zero_group == mesh.data else min(zero_group, ranks)) // apart)


def _added(first: Mapping[int, StateCost], second: Mapping[int, StateCost]) -> dict[int, StateCost]:
    """Two parts of a block's state together."""
    return {zero: add_states(cost, second[zero]) for zero, cost in first.items()}


def add_states(first: StateCost, second: StateCost) -> StateCost:
    """Two parts of a block's state together."""
    return StateCost(*(getattr(first, f.name) + getattr(second, f.name) for f in fields(StateCost)))


def _local(parameters: _Held, degree: int, *, flat: bool) -> _Local:
    """``degree``: of the tensor axis that the placements divide over; ``flat``: ranks share a buffer of all elements in a row
    (Megatron's, DeepSpeed's), not the rows of each parameter."""
    def sizes(value: BodyValue, placed: Placement) -> tuple[int, ...]:
        local = local_type(value.type, placed, degree).sizes(1)
        return (prod(local),) if flat else local

    return tuple((sizes(value, placed), value.differentiable, placed.state == "shared") for value, placed in parameters)


@lru_cache(maxsize=4096)
def _sharded(parameters: _Local, group: int) -> _Shards:
    """FSDP2 pads every parameter's first dim to whole shards; the sum over the tensor axis is of shards."""
    counts = [(prod(sizes), shard_elements(sizes, group), trained, shared) for sizes, trained, shared in parameters]
    mine = [(whole, shard, shared) for whole, shard, trained, shared in counts if trained]
    others = [(whole, shard) for whole, shard, trained, _ in counts if not trained]
    return _Shards(
        group, elements=sum(whole for whole, _, _ in mine), tensors=len(mine), shard=sum(shard for _, shard, _ in mine),
        frozen=sum(whole for whole, _ in others), frozen_shard=sum(shard for _, shard in others),
        largest=max((whole for whole, *_ in counts), default=0), partial=sum(shard for _, shard, shared in mine if shared),
    )
