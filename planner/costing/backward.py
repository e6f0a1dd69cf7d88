"""The engine's run over one block: node after node, last to first, and the weight part of a split backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.costing.primitives import PASS, Reads
from planner.costing.storages import ACTIVATIONS, GRADIENTS, Environment, Heap, Kept, Storage

if TYPE_CHECKING:
    from planner.costing.passes import BlockPasses, Kind


class Backward:
    """The engine's run over one block. ``gradients``: those that wait for a node, by the value that they belong to;
    ``again``: what was made again, by the node that asks for it and then lets it go (torch/utils/checkpoint.py,
    ``unpack_hook``)."""

    def __init__(
        self, block: BlockPasses, heap: Heap, kept: Kept, present: set[str], kind: Kind, waits: frozenset[str],
        joins: frozenset[str],
    ) -> None:
        self.block, self.heap, self.kept, self.present = block, heap, kept, present
        self.waits, self.joins = waits, joins
        self.split = kind != "full"
        self.gradients: dict[str, Storage] = {}
        self.waiting: dict[int, list[Storage]] = {}
        self.trained = {v.name for v in block.local.body.parameters if v.differentiable}
        self.repeated: set[range] = set()
        self.again = Kept()

    def all(self) -> None:
        """Every node, last to first."""
        for at in range(len(self.block.primitives) - 1, -1, -1):
            if self.block.primitives[at].differentiable:
                self._node(at, release=not self.split)

    def tail(self) -> None:
        """Let go of what follows the last node that a parameter joins: nothing asks for it any more."""
        for at in range(max(self.block.joins, default=-1) + 1, len(self.block.primitives)):
            self._let_go(at)

    def _node(self, at: int, *, release: bool) -> None:
        primitive = self.block.primitives[at]
        incoming = [self.gradients.pop(value) for value, _ in primitive.makes if value in self.gradients]
        if not incoming:
            return
        run = self.block.region_of.get(at)
        if run is not None and run not in self.repeated and self.block.keeps_anything(at):
            self._recompute(run)
        early = len(primitive.reads) - primitive.late
        made = self._gradients(at, primitive.reads[:early], incoming[0])
        self.heap.passing(primitive.backward_scratch)
        for storage in self.again.pop(at, ()):
            self.heap.drop(storage)
        made += self._gradients(at, primitive.reads[early:], incoming[0])
        if self.split and at in self.block.joins:
            for storage in incoming:
                storage.references += 1
            self.waiting[at] = list(incoming)
        for storage in incoming:
            self.heap.drop(storage)
        if release:
            self._let_go(at)
        for value, storage in made:
            self._deliver(value, storage)

    def _gradients(self, at: int, reads: Reads, incoming: Storage) -> list[tuple[str, Storage]]:
        """A node's gradients of what it read, by value."""
        made = []
        for value, size in reads:
            if size is None or (self.split and self._derived(at, value)):
                continue
            if size == PASS:
                incoming.references += 1
                made.append((value, incoming))
            else:
                made.append((value, self.heap.make(size, self._kind(value))))
        return made

    def _kind(self, value: str) -> int:
        """A parameter's first gradient is a gradient from the moment that it is made."""
        return GRADIENTS if value in self.trained - self.present - self.waits - self.joins else ACTIVATIONS

    def _derived(self, at: int, value: str) -> bool:
        return at in self.block.joins and value.split(" -> ")[0] in self.trained

    def _let_go(self, at: int) -> None:
        for storage in self.kept.pop(at, ()):
            self.heap.drop(storage)

    def _deliver(self, value: str, storage: Storage) -> None:
        if value in self.waits | self.joins:
            self._gather(value, storage)
        elif value in self.trained:
            if value in self.present:
                self.heap.drop(storage)
                return
            if storage.references > 1:
                self.heap.drop(storage)
                storage = self.heap.make(storage.size)
            self.heap.move(storage, GRADIENTS)
            self.present.add(value)
        elif value in self.gradients:
            earlier = self.gradients[value]
            self.gradients[value] = self.heap.make(max(storage.size, earlier.size))
            self.heap.drop(earlier)
            self.heap.drop(storage)
        else:
            self.gradients[value] = storage

    def _groups(self) -> list[list[int]]:
        """Nodes that parameters join, in the order of the parameters; a bias that is added to a product is the product's."""
        groups: list[list[int]] = []
        for at in sorted(self.waiting):
            before = groups[-1][-1] if groups else -2
            if before == at - 1 and self.waiting[before][0] is self.waiting[at][0]:
                groups[-1].append(at)
            else:
                groups.append([at])
        return groups

    def _gather(self, value: str, storage: Storage) -> None:
        """A part of a shared parameter's gradient: summed with the part that waits, and handed over, or left to wait."""
        if value in self.joins:
            done = value not in self.waits and value not in self.present
            total = self.heap.make(storage.size, GRADIENTS if done else ACTIVATIONS)
            self.heap.drop(storage)
            self.heap.now[ACTIVATIONS] -= storage.size
            if value not in self.waits and value in self.present:
                self.heap.drop(total)

    def _recompute(self, again: range) -> None:
        """The forward pass of a run again, up to the last tensor that is kept."""
        self.repeated.add(again)
        block, environment = self.block, Environment()
        keeping = [at for at in again if block.primitives[at].keeps or block.primitives[at].keeps_extra]
        kept = Kept()
        for at in again:
            if keeping and at == keeping[-1] and not block.keeps_results(at):
                block.keep(environment, at, kept)
            if keeping and at >= keeping[-1] + block.keeps_results(keeping[-1]):
                break
            block.run(self.heap, environment, at, kept)
        self.again |= kept
        block.release(self.heap, environment, list(environment.variables))

    def weights(self) -> None:
        """The weight part: parameter by parameter, first to last; the graph goes when all are done. Gradients that are added
        to older ones live until the next are made (``stage_backward_weight``, ``dweights``)."""
        added: list[Storage] = []
        for group in self._groups():
            fresh = [self._weight(at) for at in group]
            for storage in added:
                self.heap.drop(storage)
            added = [storage for storages in fresh for storage in storages]
            for at in group:
                for storage in self.waiting.pop(at):
                    self.heap.drop(storage)
                self._let_go(at)
        for storage in added:
            self.heap.drop(storage)
        for at in list(self.kept):
            self._let_go(at)

    def _weight(self, at: int) -> list[Storage]:
        """Gradients of one node's parameters; those that are added to older ones are returned."""
        primitive, added = self.block.primitives[at], list[Storage]()
        for value, size in primitive.reads:
            name = value.split(" -> ")[0]
            if size is None or size == PASS or not self._derived(at, value):
                continue
            storage = self.heap.make(size, self._kind(name))
            if name in self.present and name not in self.waits | self.joins:
                added.append(storage)
            else:
                self._deliver(name, storage)
        self.heap.passing(primitive.backward_scratch)
        return added
