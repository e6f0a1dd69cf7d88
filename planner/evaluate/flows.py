"""Gradients on their way through the blocks of one stage, and the storages that they lie in: several may share one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from planner.costing.storages import STRAIGHT, Leaving, Order
from planner.evaluate.heap import Heap


@dataclass(eq=False)
class Held:
    """A storage. ``received``: from the stage behind, which outlives the pass; ``references``: gradients on their way that lie
    in it; ``waits``: blocks whose weight part will read it; ``returned``: it goes on to the stage before."""

    size: int
    received: bool = False
    references: int = 0
    waits: set[int] = field(default_factory=set)
    returned: bool = False

    @property
    def held(self) -> bool:
        """Whether something holds it besides the block that has just taken it."""
        return self.received or self.references > 0 or bool(self.waits)

    def outlives(self, at: int) -> bool:
        """Whether something holds it still when the weight part of a block is done (they go first to last)."""
        return self.received or self.returned or any(other > at for other in self.waits)


@dataclass(frozen=True)
class Flow:
    """A gradient of a value: ``size`` bytes of a storage."""

    name: str
    storage: Held
    size: int
    order: Order = STRAIGHT


class Flows:
    """Those of one backward pass. ``sizes``: bytes of values; ``incoming``: those that the stage has received, whose gradients
    are sent back; ``readers``: by value, the first block that leaves a gradient of it."""

    def __init__(
        self, heap: Heap, sizes: Mapping[str, int], incoming: Collection[str], readers: Mapping[str, int]
    ) -> None:
        self.heap, self.sizes, self.incoming, self.readers = heap, sizes, incoming, readers
        self._now: dict[str, Flow] = {}
        self._at = 0

    def begin(self, name: str, size: int, *, received: bool) -> None:
        """A gradient that the pass begins with, in a storage of its own that is counted already."""
        self._now[name] = Flow(name, Held(size, received, 1), size)

    def take(self, name: str) -> Flow | None:
        """A value's gradient, which the value's block now runs with; None: it has none."""
        flow = self._now.pop(name, None)
        if flow is None:
            return None
        flow.storage.references -= 1
        return flow

    def settle(
        self, at: int, arrived: Sequence[Flow | None], leaving: Sequence[tuple[str, Leaving]], waiting: Collection[int],
    ) -> list[Flow]:
        """What a block has done with the storages that ``arrived``, by number, and the gradients that it leaves, by value."""
        self._at = at
        for number in waiting:
            flow = arrived[number]
            assert flow is not None
            flow.storage.waits.add(at)
        made: dict[int, Held] = {}
        flows = list[Flow]()
        for name, item in leaving:
            taken = None if item.arrived < 0 else arrived[item.arrived]
            held = taken.storage if taken else made.setdefault(item.made, Held(item.size))
            held.references += 1
            if item.waits:
                held.waits.add(at)
            flows.append(Flow(name, held, self.sizes[name], item.order))
        return flows

    def _final(self, flow: Flow) -> bool:
        """Whether no block before the present one adds to the gradient of what the stage has received."""
        return flow.name in self.incoming and self.readers.get(flow.name, self._at) >= self._at

    def leave(self, flow: Flow, *, copies: bool) -> None:
        """A block's gradient of a value joins what there is of it. ``copies``: leaves of the graph take over only what lies
        in memory as they do and what nothing else refers to (``accumulate_grad.h``, ``accumulateGrad``)."""
        final = self._final(flow)
        earlier = self._now.pop(flow.name, None)
        if earlier is not None:
            total = self._make(flow.name, flow.size, earlier.order.of_sum)
            self._drop(earlier)
            self._drop(flow)
            flow = total
        self._now[flow.name] = flow
        if copies and final and (not flow.order.straight or flow.storage.references > 1 or flow.storage.received):
            self.copy(flow.name)

    def copy(self, name: str) -> None:
        """A value's gradient in a storage of its own."""
        flow = self._now[name]
        self._now[name] = self._make(name, flow.size)
        self._drop(flow)

    def end(self) -> int:
        """Gradients that lie where they were received, or otherwise than in rows, are copied. Bytes of what is sent back."""
        sent = [name for name in self._now if name in self.incoming]
        for name in sent:
            if self._now[name].storage.received or not self._now[name].order.straight:
                self.copy(name)
        storages = {id(self._now[name].storage): self._now[name].storage for name in sent}
        for storage in storages.values():
            storage.returned = True
        return sum(storage.size for storage in storages.values())

    def _make(self, name: str, size: int, order: Order = STRAIGHT) -> Flow:
        self.heap.add("activations", size)
        return Flow(name, Held(size, references=1), size, order)

    def _drop(self, flow: Flow) -> None:
        storage = flow.storage
        storage.references -= 1
        if not storage.received and not storage.references and not storage.waits:
            self.heap.add("activations", -storage.size)
