"""What the stages of a plan are made of: placed bodies with their passes, bytes of values, FSDP2's units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cost_models.memory import MASTER_BYTES, WORKING_BYTES, shard_elements
from planner.costing.forward import Emitted
from planner.costing.local import localise
from planner.costing.passes import BlockPasses
from planner.costing.paths import in_module_order
from planner.evaluate.units import Unit, UnitParameter
from planner.ir.costed import Recompute
from planner.ir.graph import Block, ModelGraph
from planner.ir.placement import local_type
from planner.ir.plan import Plan, StagePlan


@dataclass
class Bodies:
    """A plan's placed bodies, and their passes by recomputation level."""

    plan: Plan
    graph: ModelGraph
    _passes: dict[tuple[str, Recompute], BlockPasses] = field(default_factory=dict)
    _emitted: dict[str, Emitted] = field(default_factory=dict)

    def emitted(self, body: str) -> Emitted:
        if body not in self._emitted:
            local = localise(self.graph.body_of[body], self.plan.placements[body], self.plan.batch.micro)
            self._emitted[body] = Emitted(local)
        return self._emitted[body]

    @cached_property
    def taken_over(self) -> frozenset[str]:
        """Values whose variable in the stage's function is taken over by what their last reader writes: a value of the same
        type. Others have theirs until the function returns."""
        graph = self.graph
        last_reader = {name: at for at, block in enumerate(graph.blocks) for name in block.reads}
        differentiable = {
            name: value in graph.body_of[block.body].differentiable for block in graph.blocks
            for name, value in zip(block.writes, graph.body_of[block.body].outputs, strict=True)
        }
        types = {name: (type_, differentiable[name]) for name, type_ in graph.activation_types.items()}
        found: set[str] = set()
        for at, block in enumerate(graph.blocks):
            free = [name for name in block.reads if name in types and last_reader[name] == at]
            for name in block.writes:
                heir = next((old for old in free if types[old] == types[name]), None)
                if heir is not None:
                    free.remove(heir)
                    found.add(heir)
        return frozenset(found)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of one rank's part of every value that a block writes."""
        return value_bytes(self)

    @cached_property
    def carried(self) -> frozenset[str]:
        """Values that a block writes and that carry a gradient."""
        graph = self.graph
        return frozenset(
            name for block in graph.blocks for name, value in zip(block.writes, graph.body_of[block.body].outputs, strict=True)
            if value in graph.body_of[block.body].differentiable
        )

    def passes(self, body: str, recompute: Recompute) -> BlockPasses:
        if (body, recompute) not in self._passes:
            self._passes[body, recompute] = BlockPasses(self.emitted(body), recompute)
        return self._passes[body, recompute]

def value_bytes(bodies: Bodies) -> dict[str, int]:
    """Bytes of one rank's part of every value that a block writes."""
    plan, graph = bodies.plan, bodies.graph
    sizes: dict[str, int] = {}
    for block in graph.blocks:
        placement = plan.placements[block.body]
        for name, placed in zip(block.writes, placement.outputs, strict=True):
            sizes[name] = local_type(graph.activation_types[name], placed, placement.degree).size_bytes(plan.batch.micro)
    return sizes


def context_storages(bodies: Bodies, blocks: Sequence[Block]) -> dict[str, tuple[int, frozenset[str]]]:
    """What a stage makes of the context for one micro-batch: by storage, its bytes and the values that lie in it."""
    graph = bodies.graph
    local = localise(graph.context, None, bodies.plan.batch.micro)
    given = {value.name for value in (*graph.context.inputs, *graph.context.buffers)}
    made = graph.made_for(blocks)
    found: dict[str, set[str]] = {}
    for name in graph.context.outputs:
        if name in made and local.root[name] not in given:
            found.setdefault(local.root[name], set()).add(name)
    return {root: (local.storage_bytes(root), frozenset(names)) for root, names in found.items()}


def context_bytes(
    bodies: Bodies, blocks: Sequence[Block], storages: Mapping[str, tuple[int, frozenset[str]]]
) -> list[tuple[int, int]]:
    """By function of the context that a stage calls: bytes while it runs, at most, and of the ``storages`` that it leaves."""
    found = []
    for group in bodies.graph.made_together(blocks):
        body = bodies.graph.context.part(group)
        running = BlockPasses(Emitted(localise(body, None, bodies.plan.batch.micro)), "none").forward.peak[0]
        found.append((running, sum(size for size, names in storages.values() if not names.isdisjoint(group))))
    return found


def units_of(plan: Plan, graph: ModelGraph, stage: StagePlan) -> tuple[list[Unit], list[int]]:
    """The stage's units (:meth:`ModelGraph.sharded_together`), and each block's."""
    blocks = graph.blocks[stage.first : stage.last]
    members = [[index - stage.first for index in group] for group in graph.sharded_together(stage.first, stage.last)]
    unit_of = {at: unit for unit, group in enumerate(members) for at in group}
    units = [
        _unit(plan, graph, [blocks[at] for at in group], stage.decisions[group[0]].zero, group[-1]) for group in members
    ]
    return units, [unit_of[at] for at in range(len(blocks))]


def _unit(plan: Plan, graph: ModelGraph, blocks: Sequence[Block], zero: int, ends: int) -> Unit:
    world = min(plan.zero_group, plan.mesh.data) if zero else 1
    seen: set[str] = set()
    parameters, partial = [], 0
    for block in blocks:
        body = graph.body_of[block.body]
        bound = dict(block.parameters)
        placed_values = zip(body.parameters, plan.placements[block.body].parameters, strict=True)
        of_name = {value.name: (value, placed) for value, placed in placed_values}
        for name in in_module_order(list(of_name), parts_first=True):
            value, placed = of_name[name]
            if bound[name] in seen:
                continue
            seen.add(bound[name])
            sizes = local_type(value.type, placed, plan.mesh.tensor).sizes(1)
            whole = 1
            for size in sizes:
                whole *= size
            shard = shard_elements(sizes, world)
            known = graph.parameter_of[bound[name]]
            parameters.append(UnitParameter(whole, shard, known.trainable))
            if placed.state == "shared" and plan.mesh.tensor > 1 and known.trainable:
                partial += shard
    return Unit(
        tuple(parameters), zero, world, zero > 0 and plan.zero_group < plan.mesh.data, WORKING_BYTES[plan.precision],
        MASTER_BYTES[plan.precision], ends, partial, plan.mesh.data,
    )
