"""Bytes alive on one rank, by category and by the stream that they were made on, and what they were when most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

Category = Literal["parameters", "gradients", "optimizer", "activations", "buffers"]
CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "optimizer", "activations", "buffers")
Stream = Literal["compute", "gather", "reduction"]
"""FSDP2 gathers and reduces on streams of its own (``_fsdp_param_group.py``, ``FSDPCommContext``), which the stages of a rank
share (runtime/zero.py, ``Streams``). All else is on the current one."""
STREAMS: tuple[Stream, ...] = ("compute", "gather", "reduction")
_Name = TypeVar("_Name", Category, Stream)
_Changes: TypeAlias = tuple[tuple[_Name, int], ...]


@dataclass(frozen=True)
class Peak:
    """``at``: bytes by category when their sum was highest; ``most_held``: the highest sum with what no rehearsal sees;
    ``streams``: the highest of each stream, whenever that was."""

    at: dict[Category, int]
    most_held: int
    streams: dict[Stream, int]

    @property
    def most(self) -> int:
        return sum(self.at.values())


@dataclass(frozen=True)
class Effect:
    """What something does to a heap, whatever that holds before: bytes more than before. ``change``: in all; ``left``,
    ``streams``: in the end; ``most``: the highest sum, none where nothing was made or freed, and ``at``: then; ``tops``: of
    each stream at most. Without what stays as it was."""

    change: int
    left: _Changes[Category]
    streams: _Changes[Stream]
    most: int | None
    at: _Changes[Category]
    tops: _Changes[Stream]


class Heap:
    """``now``: bytes by category; ``peak``: the same when their sum, ``total``, was highest, ``most``. ``held``: bytes that a
    rehearsal does not see, ``most_held``: the highest sum of both. ``streams``: bytes by stream, ``tops``: at most. All since
    the last :meth:`turn`; ``phases``: before it."""

    def __init__(self) -> None:
        self.now: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self.peak = dict(self.now)
        self.total = self.most = self.held = self.most_held = 0
        self.streams: dict[Stream, int] = dict.fromkeys(STREAMS, 0)
        self.tops = dict(self.streams)
        self.phases: list[Peak] = []

    def add(self, category: Category, size: int, stream: Stream = "compute") -> None:
        """Something is made (or, negative, freed)."""
        self.now[category] += size
        assert self.now[category] >= 0, f"{-self.now[category]} bytes of {category} are freed that were never made"
        self.total += size
        self.streams[stream] += size
        self.tops[stream] = max(self.tops[stream], self.streams[stream])
        if self.total > self.most:
            self.most, self.peak = self.total, dict(self.now)
        self.most_held = max(self.most_held, self.total + self.held)

    def turn(self) -> None:
        """Another phase begins, with a peak of its own."""
        self.phases.append(Peak(dict(self.peak), self.most_held, dict(self.tops)))
        self.most, self.peak, self.most_held = self.total, dict(self.now), self.total + self.held
        self.tops = dict(self.streams)

    def passing(self, **sizes: int) -> None:
        """Something is made and gone again."""
        made = sum(sizes.values())
        total = self.total + made
        self.tops["compute"] = max(self.tops["compute"], self.streams["compute"] + made)
        if total > self.most:
            self.most = total
            self.peak = {name: size + sizes.get(name, 0) for name, size in self.now.items()}
        self.most_held = max(self.most_held, total + self.held)

    def effect(self, act: Callable[[], None]) -> Effect:
        """What ``act()`` does to this heap, which is left as it was."""
        now, total, streams = dict(self.now), self.total, dict(self.streams)
        before = self.most, self.peak, self.most_held, self.tops
        self.most, self.peak, self.tops = -1, now, dict(streams)
        act()
        idle = self.most < 0
        found = Effect(
            self.total - total, _changes(self.now, now), _changes(self.streams, streams), None if idle else self.most - total,
            () if idle else _changes(self.peak, now), _changes(self.tops, streams),
        )
        self.now, self.total, self.streams = now, total, streams
        self.most, self.peak, self.most_held, self.tops = before
        return found

    def have(self, effect: Effect) -> None:
        """What has that effect happens."""
        if effect.most is None:
            return
        total = self.total + effect.most
        for stream, size in effect.tops:
            self.tops[stream] = max(self.tops[stream], self.streams[stream] + size)
        if total > self.most:
            self.most, self.peak = total, dict(self.now)
            for category, size in effect.at:
                self.peak[category] += size
        self.most_held = max(self.most_held, total + self.held)
        for category, size in effect.left:
            self.now[category] += size
            assert self.now[category] >= 0, f"{-self.now[category]} bytes of {category} are freed that were never made"
        for stream, size in effect.streams:
            self.streams[stream] += size
        self.total += effect.change


def _changes(sizes: dict[_Name, int], before: dict[_Name, int]) -> _Changes[_Name]:
    return tuple((name, size - before[name]) for name, size in sizes.items() if size != before[name])
