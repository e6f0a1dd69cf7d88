"""One virtual stage's passes replayed as bytes: its blocks, the units around them, and what crosses its edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

from planner.costing.passes import BlockPasses
from planner.costing.storages import Arrival, Pass
from planner.evaluate.bodies import Bodies, context_bytes, context_storages, units_of
from planner.evaluate.flows import Flow, Flows, Held
from planner.evaluate.heap import Effect, Heap
from planner.evaluate.shared import Shared
from planner.evaluate.units import Root, State
from planner.ir.graph import Block
from planner.ir.plan import StagePlan


@dataclass
class _Link:
    """One block in its stage. ``reached``: a gradient arrives at its outputs."""

    block: Block
    passes: BlockPasses
    unit: int
    zero: int
    differentiable_inputs: bool
    reached: bool


@dataclass
class _Gradients:
    """What the weight parts of a backward pass find, by block: ``arrived``: at its outputs, ``left``: of its inputs."""

    arrived: dict[int, list[Flow | None]] = field(default_factory=dict)
    left: dict[int, list[tuple[str, Held]]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Outcome:
    """What a pass does to the heap, and what it leaves."""

    effect: Effect
    state: State
    gradients: _Gradients
    returned: int


class StageReplay:
    """One virtual stage. ``receives``, ``sends``: bytes that cross its edges for one micro-batch; ``makes``: of what it sends,
    what it has not received; ``returns``, ``answers``: of the gradients that go back for them."""

    def __init__(self, bodies: Bodies, stage: StagePlan) -> None:
        self.graph, self.stage, self.heap = bodies.graph, stage, Heap()
        graph, plan = bodies.graph, bodies.plan
        self.blocks = graph.blocks[stage.first : stage.last]
        self.first, self.is_last = stage.first == 0, stage.last == len(graph.blocks)
        self.incoming = frozenset() if self.first else frozenset(graph.crossing(stage.first))
        self.outgoing = frozenset() if self.is_last else frozenset(graph.crossing(stage.last))
        self.sizes, self._carried = bodies.sizes, bodies.carried
        self.receives = sum(self.sizes[name] for name in self.incoming)
        self.sends = sum(self.sizes[name] for name in self.outgoing)
        self.returns, self.answers = (
            sum(self.sizes[name] for name in names if self._differentiable(name)) for names in (self.incoming, self.outgoing)
        )
        units, unit_of = units_of(plan, graph, stage)
        self.root = Root(self.heap, units)
        self.chain = [
            _Link(
                block, bodies.passes(block.body, decision.recompute), unit_of[at], decision.zero,
                any(name in graph.activation_types and self._differentiable(name) for name in block.reads),
                any(bodies.passes(block.body, decision.recompute).gradient_bytes),
            )
            for at, (block, decision) in enumerate(zip(self.blocks, stage.decisions, strict=True))
        ]
        asked = graph.gradients.asked(stage.first, stage.last, zeros=True)
        self._shared = Shared(self.blocks, [link.passes.paths for link in self.chain], [asked[at] for at in sorted(asked)])
        passed = self._passed()
        self.makes = self.sends - sum(self.sizes[name] for name in passed)
        self.cloned = sum(self.sizes[name] for name in passed if self._differentiable(name))
        self.finished = 0
        self._fresh: Counter[int] = Counter()
        storages = context_storages(bodies, self.blocks)
        self.context = {storage: size for storage, (size, _) in storages.items()}
        self._context_bytes = context_bytes(bodies, self.blocks, storages)
        self._taken_over = bodies.taken_over
        self._keepers = self._find_keepers()
        self._context_keepers = {
            storage: sorted(at for name in names for at in self._keepers.get(name, ()))
            for storage, (_, names) in storages.items()
        }
        self._reached = self._find_reached()
        self.returned = self.returns
        self._gradients = _Gradients()
        self._known: dict[tuple[object, ...], _Outcome] = {}
        self._idle = self.root.state

    def begin(self, heap: Heap) -> None:
        """As before a step, on this heap."""
        self.heap = self.root.heap = heap
        self.root.state, self.finished, self.returned, self._gradients = self._idle, 0, self.returns, _Gradients()

    def _differentiable(self, name: str) -> bool:
        return name in self._carried

    def _passed(self) -> list[str]:
        """What the stage sends in the storage in which it was received."""
        received = set(self.incoming)
        for link in self.chain:
            local, body = link.passes.local, self.graph.body_of[link.block.body]
            bound = {value.name: name for value, name in zip(body.inputs, link.block.reads, strict=True)}
            pairs = zip(local.outputs, link.block.writes, strict=True)
            received |= {name for value, name in pairs if bound.get(local.root[value]) in received}
        return [name for name in self.outgoing if name in received]

    @cached_property
    def _kept_by_writer(self) -> list[dict[str, str]]:
        """By block, those of its outputs that it keeps itself and that the stage does not send, with their names."""
        return [
            {
                value: name for value, name in zip(link.passes.local.outputs, link.block.writes, strict=True)
                if value in link.passes.kept_outputs and name not in self.outgoing
            }
            for link in self.chain
        ]

    @cached_property
    def _kept_names(self) -> frozenset[str]:
        return frozenset(name for names in self._kept_by_writer for name in names.values())

    def _find_keepers(self) -> dict[str, list[int]]:
        """By value, the blocks whose autograd keeps it."""
        keepers: dict[str, list[int]] = {}
        for at, link in enumerate(self.chain):
            for name in self._kept_by_writer[at].values():
                keepers.setdefault(name, []).append(at)
            names = [value.name for value in self.graph.body_of[link.block.body].inputs]
            for name, value in zip(link.block.reads, names, strict=True):
                if value in link.passes.kept_inputs:
                    keepers.setdefault(name, []).append(at)
        return keepers

    def forward(self) -> None:
        """One micro-batch."""
        self._pass(("forward",), self._forward)

    def _pass(self, kind: tuple[object, ...], run: Callable[[], None]) -> None:
        """A pass does what it did before where it finds the units as it found them then: most micro-batches are alike."""
        # A weight part leaves what its outcome is kept with as it is, so that no other has its identity.
        state = self.root.state
        key = (kind, state, id(self._gradients) if "weight" in kind else 0)
        known = self._known.get(key)
        if known is None:
            effect = self.heap.effect(run)
            known = self._known[key] = _Outcome(effect, self.root.state, self._gradients, self.returned)
        elif known.state != state:
            self.root.state = known.state
        self._gradients, self.returned = known.gradients, known.returned
        self.heap.have(known.effect)

    def _forward(self) -> None:
        heap, root = self.heap, self.root
        for running, made in self._context_bytes:
            heap.passing(activations=running)
            heap.add("activations", made)
        for at, link in enumerate(self.chain):
            root.before_forward(root.units[link.unit])
            passed = link.passes.forward
            heap.passing(activations=passed.peak[0])
            heap.add("activations", passed.after[0] + sum(link.passes.output_bytes))
            if self._ends[link.unit] == at:
                root.after_forward(root.units[link.unit])
            heap.add("activations", -self._released[at])
        heap.add("activations", -self._released[len(self.chain)])
        root.end_forward()
        for storage, size in self.context.items():
            if not self._context_keepers[storage]:
                heap.add("activations", -size)

    @cached_property
    def _ends(self) -> dict[int, int]:
        """The last block of every unit."""
        return {link.unit: at for at, link in enumerate(self.chain)}

    @cached_property
    def _begins(self) -> dict[int, int]:
        """The first block of every unit, whose inputs tell torch that the unit's backward pass is over."""
        return {link.unit: at for at, link in reversed(list(enumerate(self.chain)))}

    @cached_property
    def _bound(self) -> list[dict[str, str]]:
        """By block, the values that its inputs are bound to."""
        return [
            {value.name: name for value, name in zip(self.graph.body_of[link.block.body].inputs, link.block.reads, strict=True)}
            for link in self.chain
        ]

    @cached_property
    def _first_owned(self) -> list[list[str]]:
        """By block, its inputs of which it is the first keeper (see :meth:`_owned`)."""
        first = {name: found[0] for name, found in self._keepers.items()}
        return [self._owned(at, first) for at in range(len(self.chain))]

    @cached_property
    def _released(self) -> list[int]:
        """Bytes of values that go when a block's forward pass is over, by block; at last those that go when the stage's is."""
        last_reader = {name: at for at, link in enumerate(self.chain) for name in link.block.reads}
        released = [0] * (len(self.chain) + 1)
        for name in {name for link in self.chain for name in (*link.block.reads, *link.block.writes)}:
            if self._goes(name):
                released[last_reader[name] if name in self._taken_over and name in last_reader else -1] += self.sizes[name]
        return released

    def _goes(self, name: str) -> bool:
        """Whether nothing holds a value of the stage once its variable does not."""
        kept = name in self._keepers or name in self.incoming or name in self.outgoing
        return name in self.sizes and name != self.graph.loss and not kept

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
        """One micro-batch, or a part of it; the gradients of what was received are left, ``returned`` bytes. ``last``: working
        copies go; ``synchronise`` (by default, then too): ZeRO 0 and 1 reduce now."""
        now = last if synchronise is None else synchronise
        self._pass((kind, last, now), partial(self._backward, kind, last, now))

    def _backward(self, kind: Literal["full", "input", "weight"], last: bool, now: bool) -> None:
        self._fresh.clear()
        if kind == "weight":
            self._weights(now)
            return
        root, whole = self.root, kind == "full"
        if not any(link.reached for link in self.chain):
            return
        flows = self._begin_backward(whole)
        for at in range(len(self.chain) - 1, -1, -1):
            link = self.chain[at]
            unit = root.units[link.unit]
            if not link.reached:
                continue
            root.before_backward(unit)
            leaving = self._run(at, kind, flows)
            if whole:
                self._let_context_go(at)
            if link.differentiable_inputs and self._begins[link.unit] == at:
                leaving += self._zeros(at, leaving)
                ends = whole and (link.zero == 3 or last)
                root.after_backward(unit, reduces=whole and (link.zero >= 2 or now), reshards=ends, sums=now)
            for flow in leaving:
                flows.leave(flow, copies=whole)
        zeros = {link.unit: link.zero for link in self.chain}
        root.end_backward(
            last=last, reduces={at: whole and (zero >= 2 or now) for at, zero in zeros.items()},
            reshards={at: whole and (zero == 3 or last) for at, zero in zeros.items()}, sums=now,
        )
        if kind == "input":
            self._let_tail_go()
        self.returned = flows.end()

    def _begin_backward(self, whole: bool) -> Flows:
        """The gradients that a backward pass begins with: what was received, or the loss's own."""
        readers, self._gradients = self._readers, _Gradients()
        flows = Flows(self.heap, self.sizes, self.incoming, readers)
        for name in self.outgoing:
            if self._differentiable(name):
                flows.begin(name, self.sizes[name], received=True)
                if whole and name in self.incoming and name not in readers:
                    flows.copy(name)  # Accumulated first of all; a split pass copies in the end (runtime/stage.py, ``_apart``).
        if self.is_last:
            link = self.chain[-1]
            for name, size in zip(link.block.writes, link.passes.gradient_bytes, strict=True):
                if size:
                    flows.begin(name, size, received=False)
        return flows

    @cached_property
    def _readers(self) -> dict[str, int]:
        """By value, the first block that leaves a gradient of it."""
        readers: dict[str, int] = {}
        for at, link in reversed(list(enumerate(self.chain))):
            inputs = zip(self.graph.body_of[link.block.body].inputs, link.block.reads, strict=True)
            readers |= {name: at for value, name in inputs if value.differentiable and link.reached}
        return readers

    def _weights(self, last: bool) -> None:
        """The weight part, of parameters that several blocks use first; after it ZeRO-2 units reduce, others widen."""
        carried, left = 0, sum(size for storage, size in self.context.items() if self._context_keepers[storage])
        left += sum(self.sizes[name] for name, at in self._weight_owners.items() if at < 0 and self._is_own(name))
        for group in self._shared.groups:
            passes = [self._run_weights(at, 0, index) for at, index in group]
            self.heap.add("activations", -carried - sum(passed.added for passed in passes))
            carried = sum(passed.left for passed in passes)
        for at in range(len(self.chain)):
            passed = self._run_weights(at, carried)
            carried, left = passed.added, left + passed.left
        self.heap.add("activations", -carried - left)
        for unit in self.root.units:
            self.root.after_backward(unit, reduces=unit.zero == 2, reshards=False, sums=last)
            unit.done = False

    def _run(self, at: int, kind: Literal["full", "input"], flows: Flows) -> list[Flow]:
        """One block's backward pass, or the input part of it; the gradients that it leaves."""
        link, heap, bound = self.chain[at], self.heap, self._bound[at]
        waits, joins = self._shared.of(at)
        arrived = [
            flows.take(name) if size else None
            for name, size in zip(link.block.writes, link.passes.gradient_bytes, strict=True)
        ]
        self._gradients.arrived[at] = arrived
        passed = link.passes.backward(
            kind, present=self._present(link), owned=self._first_owned[at],
            arrivals=_arrivals(arrived, lambda storage: storage.held),
            waits=waits, joins=joins,
        )
        leaving = flows.settle(at, arrived, [(bound[item.value], item) for item in passed.leaving], passed.waiting)
        self._gradients.left[at] = [(item.value, flow.storage) for item, flow in zip(passed.leaving, leaving, strict=True)]
        heap.passing(activations=passed.peak[0], gradients=passed.peak[1])
        self._add(link, passed)
        return leaving

    def _zeros(self, at: int, leaving: Sequence[Flow]) -> list[Flow]:
        """Of a unit's inputs with a gradient that get none (what is only detached): autograd makes zeros for the node by which
        FSDP2 learns that the unit's backward pass is over (``_fsdp_param_group.py``, ``RegisterPostBackwardFunction``)."""
        link, made = self.chain[at], {flow.name for flow in leaving}
        if not made or not self.root.units[link.unit].parameters:
            return []
        sizes = {name: self.sizes[name] for name in link.block.reads if self._differentiable(name) and name not in made}
        self.heap.add("activations", sum(sizes.values()))
        return [Flow(name, Held(size, references=1), size) for name, size in sizes.items()]

    def _run_weights(self, at: int, carried: int, group: int | None = None) -> Pass:
        """The weight part of one block's backward pass, or of one of its groups whose parameters other blocks use too."""
        link = self.chain[at]
        waits, joins = self._shared.of(at)
        arrived = self._gradients.arrived.get(at, [None] * len(link.block.writes))
        passed = link.passes.backward(
            "weight" if group is None else "shared", present=self._present(link), owned=self._owned(at, self._weight_owners),
            arrivals=_arrivals(arrived, lambda storage: storage.outlives(at)),
            reached=self._reached[at],
            returned=[value for value, storage in self._gradients.left.get(at, ()) if storage.returned],
            carried=carried, waits=waits, joins=joins, group=group or 0,
        )
        self.heap.passing(activations=passed.peak[0], gradients=passed.peak[1])
        self._add(link, passed)
        return passed

    def _let_tail_go(self) -> None:
        """After the input part, what no node leads to from which a parameter's gradient is still to be made."""
        owners = {name: found[-1] for name, found in self._keepers.items() if name not in self._weight_owners}
        for at, link in enumerate(self.chain):
            nodes, _ = link.passes.paths.reached(self._reached[at])
            if link.reached and len(nodes) < sum(primitive.differentiable for primitive in link.passes.primitives):
                passed = link.passes.backward("tail", owned=self._owned(at, owners), reached=self._reached[at])
                self._add(link, passed)

    def _add(self, link: _Link, passed: Pass) -> None:
        """What a pass leaves behind."""
        self.heap.add("activations", passed.after[0])
        self.heap.add("gradients", passed.after[1])
        self.root.units[link.unit].own += passed.after[1]
        self._fresh[link.unit] += passed.after[1]

    def _owned(self, at: int, owner: Mapping[str, int]) -> list[str]:
        """Inputs and kept outputs of a block that nothing else holds once it lets go of them."""
        link = self.chain[at]
        return [*self._kept_by_writer[at]] + [
            value.name for name, value in zip(link.block.reads, self.graph.body_of[link.block.body].inputs, strict=True)
            if self._is_own(name) and owner.get(name, -1) == at
        ]

    def _is_own(self, name: str) -> bool:
        """Whether a block of the stage has made the value, and neither keeps it itself nor sends it."""
        return name in self.sizes and not {name} & {*self.incoming, *self.outgoing, *self._kept_names}

    @cached_property
    def _weight_owners(self) -> dict[str, int]:
        """By value that the weight part still finds kept, the last block to let go of it; -1 where only the end of the whole
        stage's graph does."""
        owners: dict[str, int] = {}
        for at, link in enumerate(self.chain):
            held, retained = link.passes.paths.holds(self._reached[at])
            values = [value.name for value in self.graph.body_of[link.block.body].inputs]
            for name, value in zip(link.block.reads, values, strict=True):
                if value in held:
                    owners[name] = -1 if value in retained or owners.get(name) == -1 else at
        return owners

    def _find_reached(self) -> list[frozenset[str]]:
        """By block, its outputs to which the nodes lead that make gradients of later blocks' parameters."""
        wanted: set[str] = set()
        found: list[frozenset[str]] = []
        for link in reversed(self.chain):
            body = self.graph.body_of[link.block.body]
            outputs = frozenset(
                value for value, name in zip(link.passes.local.outputs, link.block.writes, strict=True) if name in wanted
            )
            found.append(outputs)
            _, inputs = link.passes.paths.reached(outputs)
            wanted |= {name for value, name in zip(body.inputs, link.block.reads, strict=True) if value.name in inputs}
        return found[::-1]

    def _let_context_go(self, at: int) -> None:
        for storage, keepers in self._context_keepers.items():
            if keepers and keepers[0] == at:
                self.heap.add("activations", -self.context[storage])

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


def _arrivals(flows: Sequence[Flow | None], held: Callable[[Held], bool]) -> list[Arrival | None]:
    """What arrives at a block, by storages that are told apart by number."""
    numbers = {id(flow.storage): number for number, flow in enumerate(flows) if flow is not None}
    return [
        None if flow is None else Arrival(numbers[id(flow.storage)], flow.storage.size, held(flow.storage), flow.order)
        for flow in flows
    ]
