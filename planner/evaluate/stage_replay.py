"""One virtual stage's passes replayed as bytes: its blocks, the units around them, and what crosses its edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cost_models.memory import MASTER_BYTES, WORKING_BYTES, shard_elements
from planner.costing.local import LocalBody, localise
from planner.costing.passes import BlockPasses, Kind
from planner.evaluate.heap import Heap
from planner.evaluate.units import Root, Unit, UnitParameter
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
    _locals: dict[str, LocalBody] = field(default_factory=dict)

    def local(self, body: str) -> LocalBody:
        if body not in self._locals:
            placement = self.plan.placements[body]
            self._locals[body] = localise(self.graph.body_of[body], placement, self.plan.batch.micro)
        return self._locals[body]

    def passes(self, body: str, recompute: Recompute) -> BlockPasses:
        if (body, recompute) not in self._passes:
            self._passes[body, recompute] = BlockPasses(self.local(body), recompute)
        return self._passes[body, recompute]


@dataclass
class _Link:
    """One block in its stage. ``reached``: a gradient arrives at its outputs."""

    block: Block
    passes: BlockPasses
    unit: int
    zero: int
    differentiable_inputs: bool
    reached: bool
    alone: bool


class StageReplay:
    """One virtual stage. ``receives``, ``sends``: bytes that cross its edges for one micro-batch; ``makes``: of what it sends,
    what it has not received; ``returns``, ``answers``: of the gradients that go back for them; ``hands_on``, ``is_handed``: to
    and from a stage of the same rank, which keeps the values themselves as its receive buffers."""

    def __init__(self, bodies: Bodies, stage: StagePlan, heap: Heap) -> None:
        self.plan, self.graph, self.stage, self.heap = bodies.plan, bodies.graph, stage, heap
        graph, plan = bodies.graph, bodies.plan
        self.blocks = graph.blocks[stage.first : stage.last]
        self.first, self.is_last = stage.first == 0, stage.last == len(graph.blocks)
        self.incoming = frozenset() if self.first else frozenset(graph.crossing(stage.first))
        self.outgoing = frozenset() if self.is_last else frozenset(graph.crossing(stage.last))
        self.sizes = _value_bytes(bodies)
        self.receives = sum(self.sizes[name] for name in self.incoming)
        self.sends = sum(self.sizes[name] for name in self.outgoing)
        self.returns, self.answers = (
            sum(self.sizes[name] for name in names if self._differentiable(name)) for names in (self.incoming, self.outgoing)
        )
        units, unit_of = _units(plan, graph, stage)
        self.root = Root(heap, units)
        self.chain = [
            _Link(
                block, bodies.passes(block.body, decision.recompute), unit_of[at], decision.zero,
                any(name in graph.activation_types and self._differentiable(name) for name in block.reads),
                any(bodies.passes(block.body, decision.recompute).gradient_bytes),
                sum(1 for other in unit_of if other == unit_of[at]) == 1,
            )
            for at, (block, decision) in enumerate(zip(self.blocks, stage.decisions, strict=True))
        ]
        passed = self._passed()
        self.makes = self.sends - sum(self.sizes[name] for name in passed)
        self.cloned = sum(self.sizes[name] for name in passed if self._differentiable(name))
        self.finished = 0
        self.hands_on = self.is_handed = False
        self._fresh: Counter[int] = Counter()
        self.context = _context(bodies, self.blocks)
        self._keepers = self._find_keepers()

    def _differentiable(self, name: str) -> bool:
        for block in self.graph.blocks:
            if name in block.writes:
                body = self.graph.body_of[block.body]
                return body.outputs[block.writes.index(name)] in body.differentiable
        return False

    def _passed(self) -> list[str]:
        """What the stage sends in the storage in which it was received."""
        received = set(self.incoming)
        for link in self.chain:
            local, body = link.passes.local, self.graph.body_of[link.block.body]
            bound = {value.name: name for value, name in zip(body.inputs, link.block.reads, strict=True)}
            pairs = zip(local.outputs, link.block.writes, strict=True)
            received |= {name for value, name in pairs if bound.get(local.root[value]) in received}
        return [name for name in self.outgoing if name in received]

    def _find_keepers(self) -> dict[str, list[int]]:
        """By value, the blocks whose autograd keeps it."""
        keepers: dict[str, list[int]] = {}
        for at, link in enumerate(self.chain):
            names = [value.name for value in self.graph.body_of[link.block.body].inputs]
            for name, value in zip(link.block.reads, names, strict=True):
                if value in link.passes.kept_inputs:
                    keepers.setdefault(name, []).append(at)
        return keepers

    def forward(self) -> None:
        """One micro-batch."""
        heap, root = self.heap, self.root
        heap.add("activations", sum(self.context.values()))
        last_reader = {name: at for at, link in enumerate(self.chain) for name in link.block.reads}
        for at, link in enumerate(self.chain):
            root.before_forward(root.units[link.unit])
            passed = link.passes.forward
            handed = passed.edge if self.hands_on and at == len(self.chain) - 1 else 0
            heap.passing(activations=passed.peak[0] - handed, buffers=handed)
            heap.add("activations", passed.after[0] + sum(link.passes.output_bytes))
            if max(i for i, other in enumerate(self.chain) if other.unit == link.unit) == at:
                root.after_forward(root.units[link.unit])
            for name in link.block.reads:
                if last_reader[name] == at and name in self.sizes and not self._stays(name):
                    heap.add("activations", -self.sizes[name])
        root.end_forward()
        for name, size in self.context.items():
            if name not in self._keepers:
                heap.add("activations", -size)

    def _stays(self, name: str) -> bool:
        return name in self._keepers or name in self.incoming or name in self.outgoing

    @property
    def answered(self) -> bool:
        """Whether a gradient comes back for what the stage sends, or it sends nothing."""
        return self.is_last or self.answers > 0

    @property
    def loss_bytes(self) -> int:
        """Of the last stage's output."""
        return sum(self.chain[-1].passes.output_bytes)

    @property
    def loss_gradient_bytes(self) -> int:
        """Of the gradient that the last stage's backward pass begins with; 0 where nothing is trained."""
        return sum(self.chain[-1].passes.gradient_bytes)

    def backward(self, kind: Literal["full", "input", "weight"] = "full", *, last: bool = False,
                 synchronise: bool | None = None) -> None:
        """One micro-batch, or a part of it; the gradients of what was received are left, as activations. ``last``: working
        copies go; ``synchronise`` (by default, then too): ZeRO 0 and 1 reduce now."""
        now = last if synchronise is None else synchronise
        self._fresh.clear()
        if kind == "weight":
            self._weights(now)
            return
        root, whole = self.root, kind == "full"
        if not any(link.reached for link in self.chain):
            return
        # Gradients that are only passed on are copied: by autograd, which accumulates them first of all, or in the end where it
        # hands them over (runtime/zero.py, ``_apart``).
        self.heap.add("activations", self.cloned if whole else 0)
        for at in range(len(self.chain) - 1, -1, -1):
            link = self.chain[at]
            unit = root.units[link.unit]
            if not link.reached:
                continue
            root.before_backward(unit)
            self._run(at, kind)
            if whole:
                self._let_context_go(at)
            if link.differentiable_inputs and link.alone:
                root.after_backward(
                    unit, reduces=whole and (link.zero >= 2 or now), reshards=whole and (link.zero == 3 or last), sums=now
                )
        zeros = {link.unit: link.zero for link in self.chain}
        root.end_backward(
            last=last, reduces={at: whole and (zero >= 2 or now) for at, zero in zeros.items()},
            reshards={at: whole and (zero == 3 or last) for at, zero in zeros.items()}, sums=now,
        )
        if kind == "input":
            self._run(len(self.chain) - 1, "tail")
            self.heap.add("activations", self.cloned)

    def _weights(self, last: bool) -> None:
        """The weight part; ZeRO-2 units reduce after it."""
        for at in range(len(self.chain)):
            self._run(at, "weight")
            self._let_context_go(at)
        for unit in self.root.units:
            if unit.zero == 2:
                self.root.after_backward(unit, reduces=True, reshards=False, sums=last)
                unit.done = False

    def _run(self, at: int, kind: Kind) -> None:
        """A part of one block's backward pass."""
        link, heap = self.chain[at], self.heap
        body = self.graph.body_of[link.block.body]
        owned = [
            value.name for name, value in zip(link.block.reads, body.inputs, strict=True)
            if name in self.sizes and name not in self.incoming and self._keepers.get(name, [-1])[0] == at
        ]
        last = at == len(self.chain) - 1
        waits, joins = self._shared(at)
        passed = link.passes.backward(
            kind, present=self._present(link), owned=owned, incoming=self.is_last or not last, last=last, waits=waits,
            joins=joins,
        )
        handed, early = (self.returns, passed.edge) if self.is_handed and not at and kind in ("full", "input") else (0, 0)
        heap.passing(activations=passed.peak[0] - early, gradients=passed.peak[1], buffers=early)
        heap.add("activations", passed.after[0] - handed)
        heap.add("gradients", passed.after[1])
        heap.add("buffers", handed)
        self.root.units[link.unit].own += passed.after[1]
        self._fresh[link.unit] += passed.after[1]

    def _let_context_go(self, at: int) -> None:
        for name in self.chain[at].block.reads:
            if name in self.context and self._keepers.get(name, [-1])[0] == at:
                self.heap.add("activations", -self.context[name])

    def reduce(self) -> None:
        """The schedule's last word to a stage (stage.py, ``perform_reduce_grad``)."""
        for unit in self.root.units:
            self.root.after_backward(unit, reduces=True, reshards=True, sums=True)
        every = dict.fromkeys(range(len(self.root.units)), True)
        self.root.end_backward(last=True, reduces=every, reshards=every, sums=True)

    def _present(self, link: _Link) -> frozenset[str]:
        """Parameters that have a gradient before the block's backward pass."""
        if not self.root.units[link.unit].own - self._fresh[link.unit]:
            return frozenset()
        return frozenset(value.name for value in self.graph.body_of[link.block.body].parameters)

    def _shared(self, at: int) -> tuple[frozenset[str], frozenset[str]]:
        """Parameters that earlier blocks of the stage use too, and those that later ones do."""
        link = self.chain[at]
        if link.alone:
            return frozenset(), frozenset()
        others = [(i, {fqn for _, fqn in other.block.parameters}) for i, other in enumerate(self.chain) if i != at]
        waits = {fqn for i, names in others if i < at for fqn in names}
        joins = {fqn for i, names in others if i > at for fqn in names}
        return tuple(
            frozenset(local for local, fqn in link.block.parameters if fqn in found) for found in (waits, joins)
        )  # type: ignore[return-value]


def _value_bytes(bodies: Bodies) -> dict[str, int]:
    """Bytes of one rank's part of every value that a block writes."""
    plan, graph = bodies.plan, bodies.graph
    sizes: dict[str, int] = {}
    for block in graph.blocks:
        placement = plan.placements[block.body]
        for name, placed in zip(block.writes, placement.outputs, strict=True):
            sizes[name] = local_type(graph.activation_types[name], placed, placement.degree).size_bytes(plan.batch.micro)
    return sizes


def _context(bodies: Bodies, blocks: Sequence[Block]) -> dict[str, int]:
    """Values of the context that a stage makes for one micro-batch: by name, bytes of the storages of its own."""
    graph = bodies.graph
    local = localise(graph.context, None, bodies.plan.batch.micro)
    given = {value.name for value in (*graph.context.inputs, *graph.context.buffers)}
    read = {name for block in blocks for name in block.reads}
    return {
        name: local.storage_bytes(local.root[name]) for name in graph.context.outputs
        if name in read and local.root[name] == name and name not in given
    }


def _units(plan: Plan, graph: ModelGraph, stage: StagePlan) -> tuple[list[Unit], list[int]]:
    """The stage's units, and each block's; blocks that share a parameter are one."""
    blocks = graph.blocks[stage.first : stage.last]
    unit_of: list[int] = []
    owner: dict[str, int] = {}
    members: list[list[int]] = []
    for at, block in enumerate(blocks):
        names = [fqn for _, fqn in block.parameters]
        shared = next((owner[fqn] for fqn in names if fqn in owner), None)
        unit = len(members) if shared is None else shared
        if shared is None:
            members.append([])
        members[unit].append(at)
        unit_of.append(unit)
        owner |= {fqn: unit for fqn in names if fqn not in owner}
    units = [
        _unit(plan, graph, [blocks[at] for at in group], stage.decisions[group[0]].zero, group[-1]) for group in members
    ]
    return units, unit_of


def _unit(plan: Plan, graph: ModelGraph, blocks: Sequence[Block], zero: int, ends: int) -> Unit:
    world = min(plan.zero_group, plan.mesh.data) if zero else 1
    seen: set[str] = set()
    parameters, partial = [], 0
    for block in blocks:
        body = graph.body_of[block.body]
        bound = dict(block.parameters)
        for value, placed in zip(body.parameters, plan.placements[block.body].parameters, strict=True):
            if bound[value.name] in seen:
                continue
            seen.add(bound[value.name])
            sizes = local_type(value.type, placed, plan.mesh.tensor).sizes(1)
            whole = 1
            for size in sizes:
                whole *= size
            shard = shard_elements(sizes, world)
            known = graph.parameter_of[bound[value.name]]
            parameters.append(UnitParameter(whole, shard, known.decay, known.trainable))
            if placed.state == "shared" and plan.mesh.tensor > 1 and known.trainable:
                partial += shard
    return Unit(
        tuple(parameters), zero, world, zero > 0 and plan.zero_group < plan.mesh.data, WORKING_BYTES[plan.precision],
        MASTER_BYTES[plan.precision], ends, partial,
    )
