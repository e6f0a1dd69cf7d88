"""What FSDP2 holds for one unit (a block, or blocks that share a parameter), event by event, in bytes.

Files of torch 2.13's ``torch/distributed/fsdp/_fully_shard``, by event: gathering (``_fsdp_param_group.py``, ``unshard`` and
``wait_for_unshard``; ``_fsdp_collectives.py``, ``foreach_all_gather``), the end of a backward pass (``post_backward``), a
reduction (``foreach_reduce``) and the end of a stage's backward pass (``_fsdp_state.py``,
``_root_post_backward_final_callback``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from planner.evaluate.heap import Heap, Stream

_STATE = ("gathered", "pending", "own", "accumulated", "sharded", "partial", "held", "reached", "done")
_state_of = attrgetter(*_STATE)
State = tuple[int, int, tuple[tuple[object, ...], ...]]
"""What a stage's units and the root have from one pass to the next."""


@dataclass(frozen=True, slots=True)
class UnitParameter:
    """One parameter of a unit on one rank: ``elements`` whole, ``shard``: of a rank's shard, padding included; ``trained``:
    whether it gets a gradient."""

    elements: int
    shard: int
    trained: bool = True


@dataclass
class Unit:
    """``working``, ``master``: bytes of an element in computation, and of masters and reductions. ``world``: ranks of the
    shard group, of ``ranks`` of the data axis; ``hybrid``: gradients are summed over copies of the group besides. ``ends``:
    position in the stage of the last block that the unit holds; ``partial_elements``: of the shards whose gradients are
    partial sums. What follows is its state: bytes of a gathering that is under way, of gradients whole (``own``: autograd's,
    ``accumulated``), sharded and partial.
    """

    parameters: Sequence[UnitParameter]
    zero: int
    world: int
    hybrid: bool
    working: int
    master: int
    ends: int = 0
    partial_elements: int = 0
    ranks: int = 1
    gathered: bool = False
    pending: int = 0
    own: int = 0
    accumulated: int = 0
    sharded: int = 0
    partial: int = 0
    held: int = 0
    reached: bool = False
    done: bool = False
    place: int = 0

    @property
    def trained(self) -> list[UnitParameter]:
        return [parameter for parameter in self.parameters if parameter.trained]

    @property
    def padded(self) -> int:
        return self.world * sum(parameter.shard for parameter in self.parameters)

    @property
    def whole_bytes(self) -> int:
        """Of the working copies."""
        return self.working * self.padded

    @property
    def casts(self) -> bool:
        return self.working != self.master


@dataclass
class Root:
    """What the units of one stage share. ``gather``, ``reduction``: buffers that live on until the next of their kind;
    ``before``: by place, the unit that a unit's backward pass begins to gather (runtime/zero.py, ``_prefetch``)."""

    heap: Heap
    units: Sequence[Unit]
    gather: int = 0
    reduction: int = 0
    before: list[Unit] = field(init=False)

    def __post_init__(self) -> None:
        alone = self.units[0].ranks == 1  # Then all is on one stream (runtime/zero.py).
        self.gathers: Stream = "compute" if alone else "gather"
        self.reduces: Stream = "compute" if alone else "reduction"
        order = sorted(self.units, key=lambda unit: unit.ends)
        self.before = [order[max(index - 1, 0)] for index in range(len(order))]
        for place, unit in enumerate(order):
            unit.place = place

    @property
    def state(self) -> State:
        return self.gather, self.reduction, tuple(map(_state_of, self.units))

    @state.setter
    def state(self, state: State) -> None:
        self.gather, self.reduction, units = state
        for unit, values in zip(self.units, units, strict=True):
            vars(unit).update(zip(_STATE, values, strict=True))

    def unshard(self, unit: Unit) -> None:
        """Begin to gather: a cast of the shards, and the output of the collective."""
        if unit.gathered or unit.pending or unit.world == 1:
            return
        cast = unit.working * (unit.padded // unit.world) if unit.casts else 0
        self.heap.add("buffers", cast, self.gathers)
        unit.pending = unit.working * unit.padded
        self.heap.add("buffers", unit.pending, self.gathers)
        self.heap.add("buffers", -cast, self.gathers)

    def wait(self, unit: Unit, *, forward: bool) -> None:
        """Copy out. In a forward pass the collective's output lives until the next one's is copied: a variable of
        ``wait_for_unshard`` holds it."""
        if unit.gathered:
            return
        before = self.gather if forward else 0
        self.gather -= before
        if unit.world == 1:
            self._copy(unit)
        else:
            self.heap.add("parameters", unit.whole_bytes)
            if forward:
                self.gather = unit.pending
            else:
                self.heap.add("buffers", -unit.pending, self.gathers)
            unit.pending = 0
        self.heap.add("buffers", -before, self.gathers)
        unit.gathered = True

    def _copy(self, unit: Unit) -> None:
        """A group of one casts and copies parameter by parameter; a cast lives until the next one is made."""
        before = 0
        for parameter in unit.parameters:
            cast = unit.working * parameter.shard if unit.casts else 0
            self.heap.add("buffers", cast)
            self.heap.add("buffers", -before)
            self.heap.add("parameters", unit.working * parameter.elements)
            before = cast
        self.heap.add("buffers", -before)

    def reshard(self, unit: Unit) -> None:
        """Free the working copies."""
        if unit.gathered:
            self.heap.add("parameters", -unit.whole_bytes)
            unit.gathered = False

    def before_forward(self, unit: Unit) -> None:
        self.unshard(unit)
        self.wait(unit, forward=True)

    def after_forward(self, unit: Unit) -> None:
        if unit.zero == 3:
            self.reshard(unit)

    def end_forward(self) -> None:
        """The stage's forward pass returned."""
        self.heap.add("buffers", -self.gather, self.gathers)
        self.gather = 0

    def before_backward(self, unit: Unit) -> None:
        """A gradient arrives at an output: gather, and begin with the unit that ran before."""
        if unit.reached:
            return
        unit.reached = True
        self.unshard(unit)
        self.wait(unit, forward=False)
        self.unshard(self.before[unit.place])

    def after_backward(self, unit: Unit, *, reduces: bool, reshards: bool, sums: bool) -> None:
        """``post_backward``, which units without parameters do not have. ``sums``: hybrid units sum over the copies now."""
        heap = self.heap
        unit.reached, unit.done = False, True
        if not unit.parameters:
            return
        if unit.accumulated and unit.own:
            heap.add("gradients", -unit.own)
            unit.own = 0
        if not reduces:
            if reshards:
                self.reshard(unit)
            self._widen(unit)
            return
        whole, item = unit.accumulated + unit.own, unit.master if unit.accumulated else unit.working
        unit.accumulated = unit.own = 0
        if reshards:
            self.reshard(unit)
        heap.add("buffers", -self.reduction)
        self.reduction = 0
        if whole:
            heap.add("buffers", -unit.held, self.reduces)
            unit.held = 0
            last = item * unit.trained[-1].elements if unit.world > 1 else 0
            self._reduce(unit, whole - last, sums=sums)
            heap.add("gradients", -last)

    def _widen(self, unit: Unit) -> None:
        """Gradients that wait are kept in the masters' dtype."""
        if not unit.own or not unit.casts:
            return
        for parameter in unit.trained:
            self.heap.add("gradients", unit.master * parameter.elements)
            self.heap.add("gradients", -unit.working * parameter.elements)
        unit.accumulated, unit.own = unit.master * sum(parameter.elements for parameter in unit.trained), 0

    def _reduce(self, unit: Unit, whole: int, *, sums: bool) -> None:
        """One flat buffer in, a shard of it out; the result is the gradient, or is added to it. ``whole``: of the gradients
        that go once they are copied; with several ranks a variable of ``foreach_reduce`` holds the last until the end."""
        heap = self.heap
        self.reduction = unit.master * unit.world * sum(parameter.shard for parameter in unit.trained)
        heap.add("buffers", self.reduction)
        heap.add("gradients", -whole)
        result = self.reduction // unit.world
        stays = not (unit.partial if unit.hybrid and not sums else unit.sharded)
        heap.add("gradients" if stays else "buffers", result, self.reduces)
        if unit.world == 1 and unit.ranks > 1:  # Divided, by one, into a new tensor (runtime/zero.py).
            heap.add("buffers", self.reduction, self.reduces)
            heap.add("buffers", -self.reduction, self.reduces)
        if unit.hybrid and not sums:
            if not stays:
                heap.add("buffers", -result, self.reduces)
            else:
                unit.partial = result
            return
        if unit.partial:
            heap.add("gradients", -unit.partial, self.reduces)
            unit.partial = 0
        if stays:
            unit.sharded = result
        elif unit.hybrid or unit.zero == 0:
            unit.held = result
        else:
            heap.add("buffers", -result, self.reduces)

    def end_backward(self, *, last: bool, reduces: dict[int, bool], reshards: dict[int, bool], sums: bool) -> None:
        """The root's final callback; units whose inputs have no gradient end here. Keys are positions of the units."""
        for at, unit in enumerate(self.units):
            if not unit.done:
                self.after_backward(unit, reduces=reduces[at], reshards=reshards[at], sums=sums)
            unit.reached = unit.done = False
            if last:
                self.finalize(unit)
        if last:
            self.heap.add("buffers", -self.reduction)
            self.reduction = 0

    def finalize(self, unit: Unit) -> None:
        """Forget a prefetch that nobody asked for, and what an all-reduce held."""
        self.heap.add("buffers", -unit.pending, self.gathers)
        unit.pending = 0
        self.heap.add("buffers", -unit.held, self.reduces)
        unit.held = 0
