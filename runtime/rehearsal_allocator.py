"""What torch's caching allocator reserves on an accelerator for a program's storages as they come and go.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings (torch 2.11 to 2.13; the constants and
``alloc_block``, ``get_free_block``, ``should_split``, ``free_block``). A storage is a block of a segment, rounded up to 512
bytes. Up to 1 MiB it is of a segment of 2 MiB, below 10 MiB of one of 20 MiB, else of one of its own size in steps of 2 MiB.
The smallest free block that is large enough is taken, and cut where enough of it is left. Free neighbours of one segment
become one block. Blocks belong to the stream that was current when they were made and serve no other: what FSDP2 gathers and
reduces is made in streams of its own (``_fsdp_collectives.py``).

Segments are kept until the device has no room for another one: then all that nothing lies in are given back
(``release_cached_blocks``), which waits for the device and costs as much time as asking for them again. Not seen are what
kernels take for themselves meanwhile (cuBLAS' workspaces among it) and what other libraries take from the device.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

MIB = 1 << 20
ROUNDED, SMALL, SMALL_SEGMENT = 512, MIB, 2 * MIB
MEDIUM, MEDIUM_SEGMENT, STEP = 10 * MIB, 20 * MIB, 2 * MIB
Event = tuple[int, int, int]
"""A storage's number, its bytes from now on, and the stream that is current."""


@dataclass(eq=False, slots=True)
class Block:
    """``pool``: stream, and whether its requests are small; ``before``, ``after``: its neighbours in the segment."""

    pool: tuple[int, bool]
    address: int
    size: int
    free: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def is_segment(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is self.after is None


@dataclass(frozen=True, slots=True)
class Reserved:
    """``size_bytes``: the most of all segments together; ``flushes``: times a step that segments are given back for want of
    room."""

    size_bytes: int
    flushes: int


class CachingAllocator:
    """``reserved_bytes``: of all segments; ``flushes``: times that segments were given back, because there was no room for
    another one within ``capacity`` bytes."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.reserved_bytes = self.flushes = self._made = 0
        self._free: dict[tuple[int, bool], list[tuple[int, int, Block]]] = {}

    def take(self, size: int, stream: int) -> Block:
        """A block for so many bytes."""
        wanted = max(ROUNDED, _up(size, ROUNDED))
        pool = stream, wanted <= SMALL
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, (wanted, -1))
        block = free.pop(at)[2] if at < len(free) else self._segment(wanted, pool)
        block.free = False
        rest = block.size - wanted
        if rest >= ROUNDED if pool[1] else rest > SMALL:
            self._cut(block, wanted)
        return block

    def give(self, block: Block) -> None:
        """Nothing uses a block any more."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._forget(neighbour)
                block = _joined(block, neighbour)
        self._offer(block)

    def _segment(self, wanted: int, pool: tuple[int, bool]) -> Block:
        size = SMALL_SEGMENT if pool[1] else MEDIUM_SEGMENT if wanted < MEDIUM else _up(wanted, STEP)
        if self.capacity is not None and self.reserved_bytes + size > self.capacity:
            self._flush()
        block = Block(pool, self._made, size)
        self._made += size
        self.reserved_bytes += size
        return block

    def _flush(self) -> None:
        """Give back every segment that is one free block."""
        given = 0
        for free in self._free.values():
            given += sum(size for size, _, block in free if block.is_segment)
            free[:] = [item for item in free if not item[2].is_segment]
        self.reserved_bytes -= given
        self.flushes += given > 0

    def _cut(self, block: Block, wanted: int) -> None:
        rest = Block(block.pool, block.address + wanted, block.size - wanted, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, wanted
        self._offer(rest)

    def _offer(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.pool], (block.size, block.address, block))

    def _forget(self, block: Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _joined(one: Block, other: Block) -> Block:
    """Two neighbours as one block."""
    first, second = (one, other) if one.after is other else (other, one)
    first.size, first.after = first.size + second.size, second.after
    if second.after is not None:
        second.after.before = first
    return first


def reserved(before: Iterable[Event], step: Sequence[Event], capacity: int | None = None, steps: int = 1) -> Reserved:
    """What is reserved at the most in the last of ``steps`` equal ones, after ``before``."""
    allocator, held = CachingAllocator(capacity), dict[Hashable, Block]()
    for storage, size, stream in before:
        _happen(allocator, held, storage, size, stream)
    lasting, most, flushes = set(held), allocator.reserved_bytes, 0
    for turn in range(steps):
        flushes, most = allocator.flushes, allocator.reserved_bytes
        for storage, size, stream in step:
            key: Hashable = storage if storage in lasting else (storage, turn)
            _happen(allocator, held, key, size, stream)
            most = max(most, allocator.reserved_bytes)
            earlier = (storage, turn - 1)
            if earlier in held:  # What a step leaves is let go of when the next has made its own.
                allocator.give(held.pop(earlier))
    return Reserved(most, allocator.flushes - flushes)


def _happen(allocator: CachingAllocator, held: dict[Hashable, Block], storage: Hashable, size: int, stream: int) -> None:
    if storage in held:
        allocator.give(held.pop(storage))
    if size:
        held[storage] = allocator.take(size, stream)
