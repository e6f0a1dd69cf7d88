"""What one block holds while its forward pass runs, and what that leaves for the backward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.costing.activations import repeated_steps
from planner.costing.arranged import Arranged
from planner.costing.expressions import Text
from planner.costing.local import LocalBody
from planner.costing.paths import Paths
from planner.costing.primitives import record
from planner.costing.storages import OUTSIDE, Environment, Heap, Kept, Pass, Storage
from planner.costing.tape import Primitive
from planner.ir.costed import Recompute


class Emitted:
    """A body for one batch as its emitted functions run it; ``local``: its steps in that order, whichever they were given in;
    ``text``, ``recorded``: that order, and the primitives in it, where they are known."""

    def __init__(
        self, local: LocalBody, text: Text | None = None, recorded: tuple[Primitive, ...] | None = None
    ) -> None:
        self.text = Text.of(local) if text is None else text
        self._given, self._recorded, self.local = local, recorded, self.text.ordered(local)

    @cached_property
    def parted(self) -> Emitted:
        """With the regions that selective recomputation repeats in functions of their own: the same primitives elsewhere."""
        text, parted = self.text, self.text.parted
        if parted is text:
            return self
        places = {given: at for at, given in enumerate(parted.order)}
        moved = (p._replace(step=places[text.order[p.step]]) for p in self.arranged.primitives)
        return Emitted(self._given, parted, tuple(sorted(moved, key=lambda primitive: primitive.step)))

    @cached_property
    def arranged(self) -> Arranged:
        """Its primitives in execution order."""
        recorded = tuple(record(self.local).primitives) if self._recorded is None else self._recorded
        return Arranged(self.local, recorded, self.text.named)

@dataclass
class BlockForward:
    """The forward pass of one body under one recomputation level, for one micro-batch; parts of it are run again by others."""

    emitted: Emitted
    recompute: Recompute

    def __post_init__(self) -> None:
        if self.recompute == "selective":
            self.emitted = self.emitted.parted

    @cached_property
    def local(self) -> LocalBody:
        return self.emitted.local

    @cached_property
    def arranged(self) -> Arranged:
        """The primitives in the order of the emitted functions."""
        return self._parted[0]

    @cached_property
    def _runs(self) -> tuple[range, ...]:
        """Those of them that recomputation repeats, run by run."""
        return self._parted[1]

    @cached_property
    def _parted(self) -> tuple[Arranged, tuple[range, ...]]:
        arranged = self.emitted.arranged
        if self.recompute == "none" or not arranged.primitives:
            return arranged, ()
        if self.recompute == "full":
            return arranged, (range(len(arranged.primitives)),)
        again = {id(step) for step in repeated_steps(self.local, self.recompute)}
        return arranged.together([
            {
                at for at, step in enumerate(self.local.steps)
                if id(step) in again and {step.node.name if step.node else step.operands[0].split("#")[0]} & set(names)
            }
            for names in self.local.body.regions
        ])

    @cached_property
    def primitives(self) -> tuple[Primitive, ...]:
        return self.arranged.primitives

    @cached_property
    def forgotten(self) -> frozenset[int]:
        """See :attr:`Arranged.forgotten`."""
        return self.arranged.forgotten

    @cached_property
    def paths(self) -> Paths:
        """Where the gradients of parameters and of inputs come from."""
        return self.arranged.paths

    @cached_property
    def region_of(self) -> Mapping[int, range]:
        """The repeated run that a primitive lies in."""
        return {at: run for run in self._runs for at in run}

    @cached_property
    def _state(self) -> frozenset[str]:
        return frozenset(value.name for value in (*self.local.body.parameters, *self.local.body.buffers))

    @cached_property
    def _inputs(self) -> frozenset[str]:
        return frozenset(value.name for value in self.local.body.inputs)

    def lies_by_rows(self, value: str) -> bool:
        """Whether a value lies in memory row by row, as its gradient then does too. (Parts of operations do.)"""
        layout = self.local.layouts.get(value)
        return layout is None or layout.contiguous

    def size_of(self, value: str, otherwise: int) -> int:
        """Bytes of a value, as far as it has a name."""
        layout = self.local.layouts.get(value)
        return otherwise if layout is None else layout.size_bytes

    @cached_property
    def kept_inputs(self) -> frozenset[str]:
        """Inputs whose storages autograd, or recomputation, keeps."""
        root = self.local.root
        lasting = (p for at, p in enumerate(self.primitives) if at not in self.region_of and at not in self.forgotten)
        kept = {root.get(v, v) for p in lasting for v in p.keeps}
        kept |= {root.get(v, v) for run in self._runs for v in self._held(run)}
        return frozenset(kept & self._inputs)

    @cached_property
    def kept_outputs(self) -> frozenset[str]:
        """Outputs that the block itself keeps."""
        return self._returned[1]

    def _given(self, run: range) -> frozenset[str]:
        """What a repeated run is called with."""
        if self.recompute == "full":
            return self._inputs
        made = {value for at in run for value, _ in self.primitives[at].makes}
        read = {value for at in run for value, _ in self.primitives[at].reads}
        return frozenset(read - made - self._state)

    def _held(self, run: range) -> frozenset[str]:
        """What is held to repeat a run: nothing where autograd asks for nothing that it makes."""
        return self._given(run) if any(map(self.keeps_anything, run)) else frozenset()

    @cached_property
    def forward(self) -> Pass:
        """From the call to the return; outputs and kept inputs are left out of ``after``."""
        return self._returned[0]

    @cached_property
    def _returned(self) -> tuple[Pass, frozenset[str]]:
        """The forward pass, and the outputs that are kept when it is over."""
        heap, _, outputs = self._ran()
        self._leave(heap, outputs, ())
        lasting = frozenset(value for value, storage in outputs.items() if storage.references)
        return heap.since(), lasting
    @cached_property
    def output_bytes(self) -> tuple[int, ...]:
        """Of the storages that the outputs bring with them (0: an input's)."""
        root = self.local.root
        return tuple(0 if root[v] in self._inputs else self.local.storage_bytes(root[v]) for v in self.local.outputs)
    @staticmethod
    def _leave(heap: Heap, outputs: Mapping[str, Storage], owned: Collection[str]) -> None:
        """Hand the outputs over; what the block's own autograd keeps of them counts here only if ``owned``."""
        for storage in outputs.values():
            heap.drop(storage)
        mine = {id(storage) for value, storage in outputs.items() if value in owned}
        for storage in set(outputs.values()):
            if storage.references and id(storage) not in mine:
                heap.move(storage, OUTSIDE)

    def _ran(self) -> tuple[Heap, Kept, dict[str, Storage]]:
        """What a forward pass leaves, for another pass to go on with: bytes, what is kept, and the outputs."""
        heap, kept, outputs = self._forward
        known = {storage: storage.copy() for storage in {*outputs.values(), *(s for held in kept.values() for s in held)}}
        return (
            heap.copy(), {at: [known[storage] for storage in held] for at, held in kept.items()},
            {value: known[storage] for value, storage in outputs.items()},
        )

    @cached_property
    def _forward(self) -> tuple[Heap, Kept, dict[str, Storage]]:
        """Run it. What is alive, what is kept, and the outputs' storages (those of inputs left out)."""
        heap, kept, environment = Heap(), Kept(), Environment()
        for at in range(len(self.primitives)):
            run = self.region_of.get(at)
            if run is not None and at == run[0]:
                held = [s for s in map(environment.find, self._held(run)) if s is not None]
                for storage in held:
                    storage.references += 1
                kept.setdefault(self._holder(run), []).extend(held)
            self.run(heap, environment, at, kept if run is None else None)
            if run is not None and at == run[-1] and self.recompute == "selective":
                self.release(heap, environment, self._inner(run))
        found = {value: environment.find(value) for value in self.local.outputs}
        outputs = {value: storage for value, storage in found.items() if storage is not None}
        for storage in outputs.values():
            storage.references += 1
        self.release(heap, environment, list(environment.variables))
        self.forget(heap, kept, self.forgotten - self.region_of.keys())
        return heap, kept, outputs

    def _holder(self, run: range) -> int:
        """The node that lets go of what a repeated run was called with: the last of the backward pass that asks for its
        tensors (torch/utils/checkpoint.py: saved tensors hold the frame, the frame holds the arguments)."""
        return next((at for at in run if self.keeps_anything(at)), run[0])

    def keeps_anything(self, at: int) -> bool:
        """Whether autograd keeps a tensor for the primitive until the backward pass."""
        primitive = self.primitives[at]
        return primitive.differentiable and at not in self.forgotten and bool(primitive.keeps or primitive.keeps_extra)

    def _inner(self, run: range) -> list[str]:
        """Values that only a repeated run's own function knows."""
        outside = {value for at, p in enumerate(self.primitives) if at not in run for value, _ in p.reads}
        made = [value for at in run for value, _ in self.primitives[at].makes]
        return [value for value in made if value not in outside and value not in self.local.outputs]

    def run(self, heap: Heap, environment: Environment, at: int, kept: Kept | None) -> None:
        """One primitive forward. ``kept`` None: nothing is kept for the backward pass."""
        primitive = self.primitives[at]
        source = environment.find(primitive.reads[0][0]) if primitive.reads else None
        for value, size in primitive.makes:
            if size is not None:
                environment.variables[value] = environment.storages[value] = heap.make(size)
            elif source is not None:
                source.references += 1
                environment.variables[value] = source
        heap.passing(primitive.forward_scratch)
        self._hold(heap, environment, at, kept)
        self.release(heap, environment, self.arranged.dies.get(at, ()))

    def hold_operands(self, heap: Heap, environment: Environment, at: int, kept: Kept) -> None:
        """What a primitive's node holds before the primitive runs, which it then does not. Copies of operands that no gradient
        needs are made by then too."""
        primitive = self.primitives[at]
        heap.passing(primitive.forward_scratch if primitive.early else 0)
        self._hold(heap, environment, at, kept)

    def _hold(self, heap: Heap, environment: Environment, at: int, kept: Kept | None) -> None:
        """What a primitive's node refers to and makes for that."""
        primitive = self.primitives[at]
        extra = heap.make(primitive.keeps_extra) if primitive.keeps_extra else None
        if kept is not None and primitive.differentiable:
            self.keep(environment, at, kept)
            kept[at] += [extra] if extra else []
        elif extra is not None:
            heap.drop(extra)

    def keep(self, environment: Environment, at: int, kept: Kept) -> None:
        """What a primitive's node refers to; a view that no variable names any more lies where its root does."""
        root = self.local.root
        found = (environment.find(value) or environment.find(root.get(value, value)) for value in self.primitives[at].keeps)
        held = [storage for storage in found if storage is not None]
        for storage in held:
            storage.references += 1
        kept.setdefault(at, []).extend(held)

    def keeps_results(self, at: int) -> bool:
        """Whether autograd keeps something that the primitive itself makes; operands, and what it keeps early, are kept before
        its results are."""
        primitive = self.primitives[at]
        made = {self.local.root.get(value, value) for value, size in primitive.makes if size is not None}
        if primitive.keeps_extra and not primitive.early:
            return True
        return any(self.local.root.get(v, v) in made for v in primitive.keeps)

    @staticmethod
    def forget(heap: Heap, kept: Kept, nodes: Iterable[int]) -> None:
        """Let go of what these keep, of whose results no variable is left."""
        for at in nodes:
            for storage in kept.pop(at, ()):
                heap.drop(storage)

    def release(self, heap: Heap, environment: Environment, values: Iterable[str]) -> None:
        """Forget variables."""
        for value in values:
            storage = environment.variables.pop(value, None)
            if storage is not None:
                heap.drop(storage)
