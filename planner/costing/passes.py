"""What one block holds while its passes run, storage by storage: a placed body replayed as torch runs it, bytes only.

A storage lives while anything refers to it. In the forward pass that is a variable of the emitted function (until it
returns), or autograd (what a node keeps). In the backward pass nodes run from the last to the first: a node makes its
gradients while it still holds what it kept and what came in (``torch/csrc/autograd/engine.cpp``, ``evaluate_function``);
a second gradient of one value is added to the first in a new tensor, as it is wherever a dispatch mode watches
(``input_buffer.cpp``, ``accumulate``). Recomputation runs the forward pass again where the first kept tensor is asked for
and stops after the last one (``torch/utils/checkpoint.py``). A split backward pass keeps the graph and what came into every
node that a parameter joins (``torch/distributed/pipelining/_backward.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from planner.costing.backward import Backward
from planner.costing.forward import BlockForward
from planner.costing.storages import ACTIVATIONS, OUTSIDE, Arrival, Gradient, Kept, Leaving, Pass, Storage
from planner.costing.tape import needs_gradient

Kind = Literal["full", "input", "tail", "shared", "weight"]


@dataclass
class BlockPasses(BlockForward):
    """The passes of one body under one recomputation level, for one micro-batch."""

    _known: dict[tuple[object, ...], Pass] = field(default_factory=dict, repr=False)

    def backward(
        self, kind: Kind = "full", *, present: Collection[str] = (), owned: Collection[str] = (),
        arrivals: Sequence[Arrival | None] | None = None, reached: Collection[str] | None = None,
        returned: Collection[str] = (), carried: int = 0, waits: Collection[str] = (), joins: Collection[str] = (),
        group: int = 0,
    ) -> Pass:
        """From the arrival of the outputs' gradients to the inputs' gradients.

        ``present``: parameters that have a gradient already; ``owned``: inputs, and kept outputs, that nothing else holds once
        this pass lets go of them; ``arrivals``: the outputs' gradients (by default each in its own storage, which nothing
        else holds). A split pass has an ``input`` part and a ``weight`` part; between them, ``tail`` lets go of what the weight
        part will not ask for: nodes that none of this block's and none of later blocks' (which lead to the outputs ``reached``;
        by default to all) leads to, and of parameters ``shared`` with other blocks a ``group`` has its weight part before.
        ``returned``: inputs whose gradients are still held in the weight part; ``carried``: bytes of gradients that the block
        before has left there. A parameter that other blocks of the stage use too has one gradient, which autograd hands over
        when all parts are there: it ``waits`` after this block for an earlier one's, it ``joins`` a later one's.
        """
        arriving = self._default_arrivals if arrivals is None else tuple(arrivals)
        through = frozenset(self.local.outputs if reached is None else reached)
        key = (
            kind, frozenset(present), frozenset(owned), arriving, through, frozenset(returned), carried, frozenset(waits),
            frozenset(joins), group,
        )
        if key not in self._known:
            self._known[key] = self._backward(*key)
        return self._known[key]

    @cached_property
    def _default_arrivals(self) -> tuple[Arrival | None, ...]:
        return tuple(Arrival(number, size) if size else None for number, size in enumerate(self.gradient_bytes))

    def _backward(
        self, kind: Kind, present: frozenset[str], owned: frozenset[str], arrivals: tuple[Arrival | None, ...],
        reached: frozenset[str], returned: frozenset[str], carried: int, waits: frozenset[str], joins: frozenset[str],
        group: int,
    ) -> Pass:
        heap, kept, outputs = self._ran()
        self._leave(heap, outputs, owned)
        given = {name: Storage(self._size(name), OUTSIDE) for name in self.kept_inputs}
        for name in self.kept_inputs & owned:
            heap.now[ACTIVATIONS] += given[name].size
            given[name].kind = ACTIVATIONS
        self._attach(kept, given)
        run = Backward(self, heap, kept, set(present), kind != "full", waits, joins)
        storages = self._arrive(run, arrivals)
        begin = heap.restart()
        run.all()
        waits_for = {gradient.storage for gradients in run.waiting.values() for gradient in gradients}
        inward = replace(
            heap.since(begin), leaving=self._leaving(run, storages, waits_for),
            waiting=frozenset(number for number, item in storages.items() if item in waits_for),
        )
        if kind in ("full", "input"):
            return inward
        self._known["input", present, owned, arrivals, reached, returned, carried, waits, joins, 0] = inward
        nodes, _ = self.paths.reached(reached)
        if kind == "tail":
            begin = heap.restart()
            run.tail(nodes)
            return heap.since(begin)
        run.tail(nodes)
        for name in run.gradients.keys() & self._inputs - returned:
            heap.drop(run.gradients.pop(name).storage)
        return _shared(run, group) if kind == "shared" else self._weights(run, carried, reached)

    def _weights(self, run: Backward, carried: int, reached: frozenset[str]) -> Pass:
        """The weight part of what no other block uses, when that of the others is done."""
        for index in range(len(self.paths.groups)):
            run.forget(run.shared(index)[0])
        before = [run.heap.make(carried)] if carried else []
        begin = run.heap.restart()
        added = run.weights(before)
        left = self._left(run, reached)
        return replace(run.heap.since(begin), added=sum(storage.size for storage in added), left=left)

    def _arrive(self, run: Backward, arrivals: Sequence[Arrival | None]) -> dict[int, Storage]:
        """Let the gradients of the outputs arrive; by number, the storages that they lie in."""
        storages: dict[int, Storage] = {}
        for value, arrival, size in zip(self.local.outputs, arrivals, self.gradient_bytes, strict=True):
            if arrival is None or not size:
                continue
            if arrival.storage in storages:
                storages[arrival.storage].references += 1
            else:
                storage = storages[arrival.storage] = Storage(arrival.size, OUTSIDE if arrival.held else ACTIVATIONS)
                run.heap.now[storage.kind] += arrival.size
            arrived = Gradient(storages[arrival.storage], size, arrival.order)
            run.gradients[value] = run._sum(run.gradients[value], arrived) if value in run.gradients else arrived
        return storages

    def _leaving(self, run: Backward, storages: Mapping[int, Storage], waiting: Container[Storage]) -> tuple[Leaving, ...]:
        """The inputs' gradients."""
        numbers = {storage: number for number, storage in storages.items()}
        found = []
        for name in (value.name for value in self.local.body.inputs if value.name in run.gradients):
            gradient = run.gradients[name]
            storage = gradient.storage
            arrived = numbers.get(storage, -1)
            made = -1 if arrived >= 0 else storage.order
            found.append(Leaving(name, storage.size, arrived, made, gradient.order, storage in waiting))
        return tuple(found)

    def _left(self, run: Backward, reached: frozenset[str]) -> int:
        """What is still kept when the weight part is done: it goes at once where no later block leads here."""
        before = run.heap.now[ACTIVATIONS]
        for at in list(run.kept):
            for storage in run.kept.pop(at):
                run.heap.drop(storage)
        left = before - run.heap.now[ACTIVATIONS] if reached else 0
        run.heap.now[ACTIVATIONS] += left
        return left

    @cached_property
    def gradient_bytes(self) -> tuple[int, ...]:
        """Of the gradients that arrive at the outputs (0: none does)."""
        return tuple(
            self.local.layouts[v].size_bytes if needs_gradient(self.local, v) else 0 for v in self.local.outputs
        )

    def _size(self, name: str) -> int:
        return self.local.storage_bytes(name)

    def _attach(self, kept: Kept, given: Mapping[str, Storage]) -> None:
        """Let the nodes that keep inputs hold them (the first pass did not count inputs)."""
        for storage in given.values():
            storage.references = 0
        for at, name in self._holding:
            kept.setdefault(at, []).append(given[name])
            given[name].references += 1

    @cached_property
    def _holding(self) -> tuple[tuple[int, str], ...]:
        """Which node holds which of the kept inputs, once for each time."""
        holding: list[tuple[int, Iterable[str]]] = [
            (at, p.keeps) for at, p in enumerate(self.primitives)
            if p.differentiable and at not in self.region_of and at not in self.forgotten
        ]
        holding += [(self._holder(run), self._held(run)) for run in self._runs]
        named = ((at, self.local.root.get(value, value)) for at, values in holding for value in values)
        return tuple((at, name) for at, name in named if name in self.kept_inputs)


def _shared(run: Backward, group: int) -> Pass:
    """The weight part of one group of parameters that other blocks use too, when those before it are done."""
    for index in range(group):
        run.forget(run.shared(index)[0])
    begin = run.heap.restart()
    spent, added = run.shared(group)
    passed = run.heap.since(begin)
    run.forget(spent)
    left = sum(storage.size for storage in added)
    return replace(passed, added=passed.after[0] - run.heap.since(begin).after[0], left=left)
