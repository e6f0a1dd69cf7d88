"""StorageLog: every storage of a step as it comes and goes, and what all of them were for when the most was alive.

Bytes are those of storages, as a program asks for them: no context, no buffers inside a communication library, and no
allocator's rounding or cache but where that is asked for (:meth:`StorageLog.reserved`). A storage is counted once, whatever
views it, and belongs to one category for its whole life: that of the code that made it, unless something claims it (a
parameter's gradient is made by an operation of the backward pass and claimed as a gradient when autograd has handed it over).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .rehearsal_allocator import Event, Reserved, reserved

_CPU = torch.device("cpu")
_STEPS = 3
"""After so many what the allocator reserves hardly changes."""
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")


class StorageLog:
    """The life of storages. ``making``: the category of what is made now."""

    def __init__(self) -> None:
        self.making = "buffers"
        self._live: dict[int, tuple[int, Any]] = {}  # address -> (serial number, weak reference)
        self._sizes: list[int] = []  # by serial number, as of now
        self._categories: list[str] = []
        self._events: list[tuple[int, int]] = []  # (serial number, bytes more)
        self._held: dict[int, int] = {}  # what was alive when the log began, by serial number
        self._marks: dict[str, list[int]] = {}  # by kind, how much had happened
        self._all: list[Event] = []  # since the log was made
        self._begun = 0  # of those, how many had happened by :meth:`begin`
        self._first: int | None = None  # and how many by the first :meth:`begin`
        self._streams: dict[Any, int] = {}

    def see(self, tensor: Tensor) -> None:
        """Take note of a tensor's storage."""
        if getattr(tensor, "fake_device", _CPU).type == "meta":
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._live:
            serial = len(self._sizes)
            self._live[address] = serial, weakref.ref(storage, partial(self._freed, address))
            self._categories.append(self.making)
            self._sizes.append(0)
            self._changed(serial, storage.nbytes())

    def claim(self, tensor: Tensor | None, category: str) -> None:
        """Say what a tensor's storage is for, from now on and in hindsight."""
        if tensor is None:
            return
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        self.see(local)
        known = self._live.get(local.untyped_storage()._cdata)
        if known is not None:
            self._categories[known[0]] = category

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take note that a storage has another size than it was made with."""
        known = self._live.get(storage._cdata)
        if known is not None:
            self._changed(known[0], storage.nbytes())

    def begin(self) -> None:
        """Forget what happened until now, but for what is alive."""
        self._events.clear()
        self._marks.clear()
        self._begun = len(self._all)
        self._first = self._begun if self._first is None else self._first
        self._held = {serial: self._sizes[serial] for serial, _ in self._live.values()}

    def mark(self, kind: str) -> None:
        """Remember this moment as one of its kind."""
        self._marks.setdefault(kind, []).append(len(self._events))

    def phases(self, passes: int) -> list[tuple[int, int]]:
        """The parts of what happened since :meth:`begin`, as places of its first event and of the first after it: until
        ``passes`` passes had begun, until so many were left, until the optimizer began, until now."""
        begun, stepped = self._marks.get("pass", []), self._marks.get("optimizer", [len(self._events)])
        cuts = [begun[passes], begun[-passes], stepped[0]] if 0 < 2 * passes < len(begun) else [stepped[0]]
        return list(zip([0, *cuts], [*cuts, len(self._events)], strict=True))

    @property
    def passes(self) -> int:
        """How many passes were marked since :meth:`begin`."""
        return len(self._marks.get("pass", []))

    def peak(self) -> dict[str, int]:
        """Bytes by category at the moment since :meth:`begin` when the most was alive, the first such moment."""
        return self.peaks()[0]

    def peaks(self, first: int = 0, after: int | None = None) -> list[dict[str, int]]:
        """The same of every such moment, as far as they differ; of a part of what happened, where its first event and the first
        after it are given."""
        now = dict.fromkeys(CATEGORIES, 0)
        for serial, size in self._held.items():
            now[self._categories[serial]] += size
        for serial, more in self._events[:first]:
            now[self._categories[serial]] += more
        found, total = [dict(now)], sum(now.values())
        most = total
        for serial, more in self._events[first:after]:
            now[self._categories[serial]] += more
            total += more
            if total > most:
                found, most = [], total
            if total == most and now not in found:
                found.append(dict(now))
        return found

    def reserved(self, capacity: int | None = None) -> Reserved:
        """What torch's caching allocator would reserve on an accelerator that has so many bytes, if what happened since
        :meth:`begin` were all steps: the pieces that a shorter one leaves serve a longer one, which no run of a program begins
        with."""
        first, begun = self._first or 0, self._begun
        steps_before = self._all[first:begun]
        own = {storage for storage, _, _ in steps_before} - {storage for storage, _, _ in self._all[:first]}
        gone = own - {storage for storage, _, _ in self._all[begun:]} - self._held.keys()
        before = (event for event in self._all[:begun] if event[0] not in gone)
        return reserved(before, self._all[begun:], capacity, steps=_STEPS)

    def of_streams(self) -> int:
        """The most that each stream's storages took since :meth:`begin`, each at its own moment, added up."""
        now = dict.fromkeys(self._streams.values(), 0)
        most, held = dict(now), dict[int, tuple[int, int]]()
        for at, (storage, size, stream) in enumerate(self._all):
            if at == self._begun:
                most = dict(now)
            before, where = held.get(storage, (0, stream))
            now[where] -= before
            now[stream] += size
            held[storage] = size, stream
            most[stream] = max(most[stream], now[stream])
        return sum(most.values())

    @contextmanager
    def made_for(self, category: str) -> Iterator[None]:
        """What is made inside is of this category."""
        before, self.making = self.making, category
        try:
            yield
        finally:
            self.making = before

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """FSDP2 frees and takes memory by resizing storages, which no operator shows."""
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self.resized(storage)
            return result

        torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _freed(self, address: int, _: Any) -> None:
        serial, _ = self._live.pop(address)
        self._changed(serial, 0)

    def _changed(self, serial: int, size: int) -> None:
        self._events.append((serial, size - self._sizes[serial]))
        stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
        self._all.append((serial, size, stream))
        self._sizes[serial] = size
