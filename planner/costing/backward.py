"""The engine's run over one block: node after node, last to first, and the weight part of a split backward pass."""

from __future__ import annotations

from collections.abc import Container, Sequence

from planner.costing.forward import BlockForward
from planner.costing.storages import (
    ACTIVATIONS,
    GRADIENTS,
    OUTSIDE,
    STRAIGHT,
    Environment,
    Gradient,
    Heap,
    Kept,
    Storage,
    ordered,
)
from planner.costing.tape import HANDED, PART, PASS, TURNED, Primitive, Reads

Made = list[tuple[str, Gradient]]


class Backward:
    """The engine's run over one block. ``gradients``: those that wait for a node, by the value that they belong to;
    ``again``: what was made again, by the node that asks for it and then lets it go (torch/utils/checkpoint.py,
    ``unpack_hook``); ``waiting``: what came into the nodes that parameters join, in the input part of a split pass; ``parts``:
    of parameters that several nodes read, of which ``missing`` are still to run, or that later blocks use too, where the node
    that accumulates has it waiting and adds each next part as it comes (``input_buffer.cpp``, ``accumulate``); ``split``: what
    parameters join waits."""

    def __init__(
        self, block: BlockForward, heap: Heap, kept: Kept, present: set[str], split: bool, waits: frozenset[str],
        joins: frozenset[str],
    ) -> None:
        self.block, self.heap, self.kept, self.present = block, heap, kept, present
        self.split, self.waits, self.joins = split, waits, joins
        self.gradients: dict[str, Gradient] = {}
        self.waiting: dict[int, list[Gradient]] = {}
        self.trained, self.missing = block.arranged.trained, block.arranged.shares.copy()
        # The input part makes no gradients of what is made of parameters alone.
        self.skipped: Container[str] = block.paths.derived if self.split else ()
        joined, size = [name for name in joins if self.missing[name]], block.local.storage_bytes
        self.parts = {name: Gradient(Storage(size(name), ACTIVATIONS), size(name)) for name in joined}
        self.repeated: set[range] = set()
        self.again = Kept()

    def all(self) -> None:
        """Every node, last to first."""
        for at in range(len(self.block.primitives) - 1, -1, -1):
            if self.block.primitives[at].differentiable:
                self._node(at, release=not self.split)
        # What is left is of parameters that some path reads to which no gradient came, or waits for the weight part.
        for value, gradient in () if self.split else self.parts.items():
            self._accumulate(value, gradient)

    def tail(self, reached: frozenset[int]) -> None:
        """Let go of the nodes from which no gradient of a parameter is left to be made."""
        for at in range(len(self.block.primitives)):
            if at not in reached:
                self._let_go(at)

    def _node(self, at: int, *, release: bool) -> None:
        primitive = self.block.primitives[at]
        incoming = [self.gradients.pop(value) for value, _ in primitive.makes if value in self.gradients]
        if not incoming:
            return
        if primitive.folds and not incoming[0].order.even:
            folded = Gradient(self.heap.make(incoming[0].size), incoming[0].size)
            self.heap.drop(incoming[0].storage)
            incoming = [folded]
        run = self.block.region_of.get(at)
        if run is not None and run not in self.repeated and self.block.keeps_anything(at):
            self._recompute(run)
        early = len(primitive.reads) - primitive.late
        made = self._gradients(primitive, primitive.reads[:early], incoming[0], self.skipped)
        whole = sum([size for value, size in primitive.sums if value not in self.skipped])
        lined = incoming[0].size if primitive.lines and not self._lies_by_rows(primitive, incoming[0]) else 0
        self.heap.passing(max(primitive.backward_scratch, lined) + whole)
        for storage in self.again.pop(at, ()):
            self.heap.drop(storage)
        if primitive.late:
            made += self._gradients(primitive, primitive.reads[early:], incoming[0], self.skipped)
        self.heap.passing(whole)
        if self.split and at in self.block.paths.joins:
            for gradient in incoming:
                gradient.storage.references += 1
            self.waiting[at] = list(incoming)
            if primitive.inner:
                self.waiting[at].append(Gradient(self.heap.make(2 * primitive.inner), 2 * primitive.inner))
        for gradient in incoming:
            self.heap.drop(gradient.storage)
        if release:
            self._let_go(at)
        for value, gradient in made:
            self._deliver(value, gradient)

    def _gradients(self, primitive: Primitive, reads: Reads, incoming: Gradient, skipped: Container[str]) -> Made:
        """A node's gradients of what it read, by value."""
        made = Made()
        for value, size in reads:
            if size is None or value in skipped:
                continue
            if primitive.merges and not incoming.order.even and not incoming.order.rows:
                lies = STRAIGHT if self.block.lies_by_rows(value) else ordered(False, False, True, True)
                made.append((value, Gradient(self.heap.make(incoming.size, self._kind(value)), incoming.size, lies)))
            elif size in HANDED:
                incoming.storage.references += 1
                held = self.block.size_of(value, incoming.size)
                turned = incoming.order.turned or size == TURNED
                lies = ordered(
                    incoming.order.straight and size == PASS, incoming.order.even and size not in (PART, TURNED), turned,
                    turned and not primitive.permutes and self._by_rows(primitive, incoming),
                )
                view = primitive.cuts or (incoming.view and len(reads) == 1)
                made.append((value, Gradient(incoming.storage, held, lies, view)))
            else:
                turned = (value in primitive.turns) != (primitive.follows and incoming.order.turned)
                rows = turned and (not primitive.follows or self._by_rows(primitive, incoming))
                held = max(size, primitive.storage, incoming.storage.size if primitive.patches else 0)
                lies = ordered(not turned and held == size, not turned, turned, rows)
                storage = self.heap.make(held, self._kind(value) if lies.straight else ACTIVATIONS)
                made.append((value, Gradient(storage, size, lies)))
        return made

    def _by_rows(self, primitive: Primitive, incoming: Gradient) -> bool:
        """Whether the dims of the gradient of what the node made lie row by row."""
        return incoming.order.rows or self._lies_by_rows(primitive, incoming)

    def _lies_by_rows(self, primitive: Primitive, incoming: Gradient) -> bool:
        """Whether that gradient does, without gaps."""
        return incoming.order.straight and self.block.lies_by_rows(primitive.makes[0][0])

    def _kind(self, value: str) -> int:
        """A parameter's first gradient is a gradient from the moment that it is made, a part of one is none."""
        names = self.block.paths.handed_on.get(value, (value,))
        if self.split:
            return GRADIENTS if any(map(self._is_first, names)) else ACTIVATIONS  # the weight part lets the first one have it
        # An ordinary pass copies for all but the last, and for that one too where another holds a part in the same memory.
        *others, last = names
        held = any(name in self.waits or (self.missing[name] > 1 and name not in self.parts) for name in others)
        return GRADIENTS if self._is_first(last) and not held else ACTIVATIONS

    def _is_first(self, name: str) -> bool:
        """Whether what comes next for a parameter is all of its first gradient."""
        earlier = name in self.present or name in self.parts or self.missing[name] > 1
        return name in self.trained and not earlier and name not in self.waits

    def _let_go(self, at: int) -> None:
        for storage in self.kept.pop(at, ()):
            self.heap.drop(storage)

    def _deliver(self, value: str, gradient: Gradient) -> None:
        if value in self.trained:
            gradient = self._with_others(value, gradient)
            if self.missing[value]:
                self.parts[value] = gradient
            else:
                self._accumulate(value, gradient)
        elif value in self.gradients:
            self.gradients[value] = self._sum(self.gradients[value], gradient)
        else:
            self.gradients[value] = gradient

    def _with_others(self, value: str, gradient: Gradient) -> Gradient:
        """A part of a parameter's gradient, summed with those that came before it."""
        earlier = self.parts.pop(value, None)
        self.missing[value] -= 1
        if earlier is None:
            return gradient
        return self._sum(earlier, gradient, ACTIVATIONS if self.missing[value] else self._kind(value))

    def _accumulate(self, value: str, gradient: Gradient) -> None:
        """All of a parameter's gradient that this block and later ones make waits for an earlier block's part, or becomes its
        gradient, or is added to it in place."""
        storage = gradient.storage
        if value in self.waits:
            return
        if value in self.present:
            self.heap.drop(storage)
            return
        # Of a view torch does not ask who else has its memory; where that is all of it, runtime/own_gradients.py does.
        apart = gradient.view and gradient.size < storage.size
        if (storage.references > 1 and not apart) or not gradient.order.straight:
            copy = self.heap.make(gradient.size)
            self.heap.drop(storage)
            storage = copy
        self.heap.move(storage, GRADIENTS)
        self.present.add(value)

    def _sum(self, earlier: Gradient, later: Gradient, kind: int = ACTIVATIONS) -> Gradient:
        """Two gradients of one value, added in a new storage."""
        size = max(earlier.size, later.size)
        total = Gradient(self.heap.make(size, kind), size, earlier.order.of_sum)
        self.heap.drop(earlier.storage)
        self.heap.drop(later.storage)
        return total

    def _recompute(self, again: range) -> None:
        """The forward pass of a run again, up to the last tensor that is kept."""
        self.repeated.add(again)
        block, environment = self.block, Environment()
        keeping = [at for at in again if block.primitives[at].keeps or block.primitives[at].keeps_extra]
        kept = Kept()
        last = keeping[-1] if keeping else again[-1]
        for at in range(again[0], last + 1):
            if keeping and at == last and not block.keeps_results(at):
                block.hold_operands(self.heap, environment, at, kept)
            else:
                block.run(self.heap, environment, at, kept)
        block.release(self.heap, environment, list(environment.variables))
        block.forget(self.heap, kept, block.forgotten.intersection(again))
        self.again |= kept

    def shared(self, index: int) -> tuple[list[int], list[Storage]]:
        """The weight part of a group of parameters that other blocks use too: before all others, whose nodes lie on the way.
        What came into the nodes that are returned goes when the last block's are done; the storages, which were added to older
        gradients, when the next group's gradients are made."""
        group = self.block.paths.groups[index]
        nodes = [at for at in group if at in self.waiting] if self._is_shared(group) else []
        added = self._group(nodes, self.block.paths.inward(nodes, self.waits), kept=True) if nodes else []
        return nodes, added

    def weights(self, carried: Sequence[Storage]) -> list[Storage]:
        """The weight part of the others, group by group. Gradients that are added to older ones live until the next are made
        (``stage_backward_weight``, ``dweights``): ``carried`` are those of the block before; this block's are returned."""
        added, paths = list(carried), self.block.paths
        for group in paths.groups:
            nodes = [at for at in group if at in self.waiting]
            if not nodes or self._is_shared(group):
                continue
            fresh = self._group(nodes, paths.between(nodes), kept=paths.goes_over_others(nodes))
            for storage in added:
                self.heap.drop(storage)
            added = fresh
            self.forget(nodes)
        return added

    def _is_shared(self, group: Sequence[int]) -> bool:
        """Whether a parameter of the group is one of other blocks too."""
        return not self.block.paths.joining(group).isdisjoint(self.waits | self.joins)

    def forget(self, nodes: Sequence[int]) -> None:
        """Let go of what had come into these nodes."""
        for at in nodes:
            for gradient in self.waiting.pop(at):
                self.heap.drop(gradient.storage)

    def _group(self, nodes: Sequence[int], way: frozenset[str], *, kept: bool) -> list[Storage]:
        """Gradients of the parameters that join at these nodes; those that are added to older ones are returned. On the ``way``
        to others of them no gradient goes (runtime/weight_part.py): what a node makes for it is dropped. ``kept``: nodes that
        have run are needed again."""
        found: dict[str, Gradient] = {}
        wanted = self.block.paths.leading_to(nodes) | way
        self.gradients = {}
        for at in range(nodes[-1], -1, -1):
            primitive = self.block.primitives[at]
            joins = at in nodes
            incoming = self.waiting[at] if joins else [
                self.gradients.pop(value) for value, _ in primitive.makes if value in self.gradients
            ]
            called = bool(incoming) or any(value in way for value, _ in primitive.makes)
            for value, gradient in self._called(primitive, incoming, wanted) if incoming else ():
                if value in way:
                    self.heap.drop(gradient.storage)
                    continue
                if value in self.trained:
                    self.parts[value] = found[value] = self._with_others(value, gradient)
                else:
                    self._deliver(value, gradient)
            for gradient in () if joins else incoming:
                self.heap.drop(gradient.storage)
            if called and not kept:
                self._let_go(at)
        return self._hand_over(found, {gradient.storage for at in nodes for gradient in self.waiting[at]})

    def _called(self, primitive: Primitive, incoming: Sequence[Gradient], wanted: Container[str]) -> Made:
        """What a node of the weight part makes of the gradients that are wanted."""
        reads = tuple((value, size) for value, size in primitive.reads if value in wanted)
        made = self._gradients(primitive, reads, incoming[0], ())
        whole = sum(size for value, size in primitive.sums if value in wanted)
        # On the way from step to step, those of the input products are made once more, and replaced.
        self.heap.passing(whole + primitive.backward_scratch + primitive.inner)
        return made

    def _hand_over(self, found: dict[str, Gradient], came: Container[Storage]) -> list[Storage]:
        """The first gradient of a parameter is its gradient, or a copy where it lies in what ``came`` in, in an earlier one's
        memory or over itself (runtime/own_gradients.py); others are added to it in place."""
        added, taken = list[Storage](), dict[Storage, int]()
        for name, gradient in found.items():
            if name in self.waits:
                continue
            storage = gradient.storage
            if name not in self.present:
                self.present.add(name)
                sizes = taken.get(storage, 0) + gradient.size  # parts of one that have none in common are apart
                if sizes <= storage.size and storage not in came:
                    taken[storage] = sizes
                    self.heap.move(storage, GRADIENTS)
                    continue
                self.heap.make(gradient.size, GRADIENTS)
            if storage in taken or storage in added or storage.kind == OUTSIDE:
                self.heap.drop(storage)
            else:
                added.append(storage)
        return added
