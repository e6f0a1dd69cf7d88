"""Storages with counted references: what is alive in a pass of a block, and what was when it was most."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

ACTIVATIONS, GRADIENTS, OUTSIDE = range(3)
"""What a storage counts as; what lies outside is not counted."""


@dataclass(frozen=True, slots=True)
class Order:
    """How a gradient lies in memory. ``straight``: as its value does; ``even``: at least its rows are evenly apart; ``turned``:
    its dims lie in another order than its value's; ``rows``: in that of its dims, as its value's do not."""

    straight: bool = True
    even: bool = True
    turned: bool = False
    rows: bool = False

    @property
    def of_sum(self) -> Order:
        """How a sum lies of which this is the first term: its dims in the same order (ATen/TensorIterator.cpp,
        ``reorder_dimensions``)."""
        return ordered(not self.turned, not self.turned, self.turned, self.rows)


STRAIGHT = Order()
ordered = lru_cache(maxsize=16)(Order)
"""One of the few orders that there are."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The gradient of an output as a block finds it: the number and the bytes of the storage that it lies in, which gradients
    of other outputs may share; ``held``: something else holds that storage too, and still does when the block is done."""

    storage: int
    size: int
    held: bool = False
    order: Order = STRAIGHT


@dataclass(frozen=True, slots=True)
class Leaving:
    """The gradient of an input as a block leaves it. ``arrived``: number of the storage that it came in, -1 where the block
    made it; then ``made`` tells storages apart. ``size``: bytes of the storage; ``waits``: the weight part will read it too."""

    value: str
    size: int
    arrived: int
    made: int
    order: Order
    waits: bool


@dataclass(frozen=True, slots=True)
class Pass:
    """(activation, gradient) bytes beyond those at its beginning: ``peak`` when their sum is highest, and ``after``.
    ``leaving``: of a backward pass, the inputs' gradients; ``waiting``: numbers of the storages that arrived and wait for the
    weight part; ``added``: of a weight part, bytes that go when the next gradient has been made (of parameters of other blocks
    too: when all those have); ``left``: bytes that go with the whole stage's graph; of parameters of other
    blocks too, when the next such group's gradients have been made."""

    peak: tuple[int, int]
    after: tuple[int, int]
    leaving: tuple[Leaving, ...] = ()
    waiting: frozenset[int] = frozenset()
    added: int = 0
    left: int = 0


class Storage:
    """``order``: how many others were made before it."""

    __slots__ = ("kind", "order", "references", "size")

    def __init__(self, size: int, kind: int, order: int = 0) -> None:
        self.size, self.kind, self.order, self.references = size, kind, order, 1

    def copy(self) -> Storage:
        """With as many references."""
        other = Storage(self.size, self.kind, self.order)
        other.references = self.references
        return other


class Gradient(NamedTuple):
    """A gradient on its way: ``size`` bytes in a storage that may be larger; ``view``: nothing else has this tensor, whatever
    has its storage."""

    storage: Storage
    size: int
    order: Order = STRAIGHT
    view: bool = False


class Heap:
    """Bytes alive, and what they were when most."""

    def __init__(self) -> None:
        self.now = [0, 0, 0]
        self.peak = (0, 0)
        self.most = self.made = 0

    def make(self, size: int, kind: int = ACTIVATIONS) -> Storage:
        now = self.now
        now[kind] += size
        self.made += 1
        total = now[0] + now[1]
        if total > self.most:
            self.most, self.peak = total, (now[0], now[1])
        return Storage(size, kind, self.made)

    def restart(self) -> tuple[int, int]:
        """Count the peak from here on; returns what is alive."""
        self.peak = begin = (self.now[0], self.now[1])
        self.most = sum(begin)
        return begin

    def drop(self, storage: Storage) -> None:
        storage.references -= 1
        if not storage.references:
            self.now[storage.kind] -= storage.size

    def passing(self, size: int) -> None:
        """Something that is gone at once."""
        if size:
            self.make(size)
            self.now[ACTIVATIONS] -= size

    def move(self, storage: Storage, kind: int) -> None:
        self.now[storage.kind] -= storage.size
        self.now[kind] += storage.size
        storage.kind = kind

    def copy(self) -> Heap:
        """As it is now, to go on another way."""
        other = Heap()
        other.now, other.peak, other.most, other.made = list(self.now), self.peak, self.most, self.made
        return other

    def since(self, begin: tuple[int, int] = (0, 0)) -> Pass:
        """Beyond what was there at the ``begin``."""
        return Pass(
            (self.peak[0] - begin[0], self.peak[1] - begin[1]), (self.now[0] - begin[0], self.now[1] - begin[1])
        )


Kept = dict[int, list[Storage]]
"""What each primitive keeps, by its position."""


class Environment:
    """What the variables of a running function refer to. ``storages``: by the value that each was made for."""

    def __init__(self) -> None:
        self.variables: dict[str, Storage] = {}
        self.storages: dict[str, Storage] = {}

    def find(self, value: str) -> Storage | None:
        """The storage that a value lives in, whether a variable still names it or not."""
        return self.variables.get(value) or self.storages.get(value)
