"""The tape that a placed body is recorded on: primitive operations as autograd sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from planner.costing.local import LocalBody, Step

PASS, PART, ROWS, TURNED = -1, -2, -3, -4
"""Of a gradient: the incoming one is handed on, or a view of it; a view that does not lie in memory as the value does; one of
which only the rows lie apart; one whose dims lie in another order."""
HANDED = frozenset({PASS, PART, ROWS, TURNED})


Reads = tuple[tuple[str, int | None], ...]


class Primitive(NamedTuple):
    """One autograd node, or (``differentiable`` false) an operation that autograd does not record.

    ``reads``: (value, bytes of the gradient that the backward pass makes for it, :data:`PASS` and the like, or None: none).
    ``makes``: (value, bytes of a new storage, or None: a view of the first value read). ``keeps``: values whose storages are
    kept for the backward pass; ``keeps_extra``: bytes that only the backward pass sees; ``early``: it has them before
    it makes its results (copies of operands, what dropout multiplies by). ``scratch``: bytes alive beside the
    results while the operation runs, in each pass; ``late``: the last so many gradients are sums that the engine makes when the
    node has run (``engine.cpp``, ``validate_outputs``); ``sums``: (value, bytes) of a gradient that is made whole first, for an
    operand that was broadcast; ``lines``: a gradient that does not lie as its value does is copied before it is used
    (runtime/primitives.py); ``folds``: one whose rows are not evenly apart is copied, and the copy takes its place (products of
    more than two dims are products of two); ``merges``: a view whose gradient has fewer dims, so one whose rows are not evenly
    apart is copied; ``follows``: the gradients that it makes have their dims in the order of the incoming one; ``turns``:
    values whose dims lie otherwise than those of the gradients that it makes of them (where it ``follows``: than the result's);
    ``permutes``: a view of the dims in another order; ``cuts``: what it hands on is a view of the gradient that came in;
    ``storage``: bytes of the storage in which a gradient lies that it makes, where that is larger; ``patches``: what it makes
    is written into a copy of all the storage of the gradient that came in; ``inner``: bytes of
    gradients that come into its products of inputs, of all steps, and as many into those of hidden states (recurrent layers:
    parameters join in both); ``step``: position of the step that it belongs to.
    """

    step: int
    reads: Reads
    makes: tuple[tuple[str, int | None], ...]
    keeps: tuple[str, ...] = ()
    keeps_extra: int = 0
    forward_scratch: int = 0
    backward_scratch: int = 0
    differentiable: bool = True
    late: int = 0
    sums: tuple[tuple[str, int], ...] = ()
    lines: bool = False
    folds: bool = False
    merges: bool = False
    follows: bool = False
    turns: tuple[str, ...] = ()
    permutes: bool = False
    cuts: bool = False
    storage: int = 0
    patches: bool = False
    inner: int = 0
    early: bool = False


@dataclass
class Tape:
    """Primitives under construction for one body. ``temporary``: values that no variable of the emitted code holds."""

    local: LocalBody
    primitives: list[Primitive] = field(default_factory=list)
    temporary: set[str] = field(default_factory=set)
    at: int = 0

    @cached_property
    def read(self) -> frozenset[str]:
        """Values that some step reads, or the body returns."""
        return frozenset(value for step in self.local.steps for value in step.operands) | frozenset(self.local.outputs)

    def bytes_of(self, value: str) -> int:
        """Of the value itself, whatever storage it lives in."""
        return self.local.layouts[value].size_bytes

    def outputs_of(self, step: Step) -> list[tuple[str, int | None]]:
        """What a step makes: each result with its bytes, None where it is a view."""
        return [
            (value, self.local.storage_bytes(value) if self.local.root[value] == value else None) for value in step.outputs
        ]

    def gradient(self, value: str, made: int) -> int | None:
        """``made`` where the value needs a gradient."""
        return made if needs_gradient(self.local, value) else None

    def add(
        self, reads: Sequence[tuple[str, int | None]], makes: Sequence[tuple[str, int | None]],
        keeps: Sequence[str] = (), *, extra: int = 0, forward: int = 0, backward: int = 0, late: int = 0,
        sums: Sequence[tuple[str, int]] = (), lines: bool = False, folds: bool = False,
        merges: bool = False, follows: bool = False, turns: Sequence[str] = (), permutes: bool = False, cuts: bool = False,
        storage: int = 0, patches: bool = False, inner: int = 0, early: bool = False,
    ) -> None:
        """Append a primitive; it is differentiable where anything it reads has a gradient."""
        self.primitives.append(Primitive(
            self.at, tuple(reads), tuple(makes), tuple(keeps), extra, forward, backward,
            any(made is not None for _, made in reads), late, tuple(sums), lines, folds, merges,
            follows, tuple(turns), permutes, cuts, storage, patches, inner, early,
        ))

    def still_read(self, values: Sequence[str]) -> None:
        """The last primitive holds these values too."""
        last = self.primitives[-1]
        self.primitives[-1] = last._replace(reads=(*last.reads, *((value, None) for value in values)))

    def name(self, suffix: str) -> str:
        """A new value of the current step that no variable holds."""
        value = f"{self.at}:{suffix}"
        while value in self.temporary:
            value += "'"
        self.temporary.add(value)
        return value


def needs_gradient(local: LocalBody, value: str) -> bool:
    """Whether autograd computes a gradient of a value of the body."""
    return value.split(" -> ")[0].split("#")[0] in local.body.differentiable
