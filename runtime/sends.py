"""When a rank that has several stages lets go of what it has sent; torch keeps it until the step is over.

torch's schedules with several stages a rank wait for their sends at the end of a step, and until then each work object keeps
its tensor. What comes from a neighbour tells how far that was when it sent it: everything that it had received for what
it did before has arrived, so its memory is free (on a GPU for whatever this stream does after that receive).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
)

Event = tuple[str, int, int]
"""Forward (F), backward (B, or its input part) or weight part (W) of a stage, for a micro-batch."""
KINDS = {FORWARD: "F", FULL_BACKWARD: "B", BACKWARD_INPUT: "B", BACKWARD_WEIGHT: "W"}


def events_of(order: Sequence[Any]) -> tuple[Event, ...]:
    """The passes among torch's actions of one rank."""
    return tuple(
        (KINDS[action.computation_type], action.stage_index, action.microbatch_index)
        for action in order if action is not None and action.computation_type in KINDS
    )


def releases(
    orders: Mapping[int, Sequence[Event]], rank: int, silent: Set[int] = frozenset()
) -> dict[Event, tuple[Event, ...]]:
    """By the pass at whose start it happens, the passes whose sends this rank lets go of.

    ``orders``: every pipeline rank's passes. ``silent``: this rank's stages to which no gradient comes back (nothing before
    their ends is trained): their backward passes wait for nobody, so nothing is known when they begin. A tensor stays until its
    micro-batch's last pass on the stage as well, whose autograd may keep it. What is not in the result stays until the step is
    over.
    """
    order = orders[rank]
    owner = {stage: other for other, events in orders.items() for _, stage, _ in events}
    places = {other: {event: at for at, event in enumerate(events)} for other, events in orders.items()}
    last = {(stage, microbatch): at for at, (kind, stage, microbatch) in enumerate(order) if kind in "BW"}
    waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by neighbour, (its pass that reads it, own pass)
    due: dict[int, list[int]] = defaultdict(list)
    for at, (kind, stage, microbatch) in enumerate(order):
        step = {"F": 1, "B": -1, "W": 0}[kind]
        source, target = (owner.get(stage - step, rank), owner.get(stage + step, rank)) if step else (rank, rank)
        if source != rank and not (kind == "B" and stage in silent):
            told, queue = places[source][kind, stage - step, microbatch], waiting[source]
            while queue and queue[0][0] <= told:
                sent = heapq.heappop(queue)[1]
                due[max(at, last[order[sent][1:]] + 1)].append(sent)
        if target != rank:
            heapq.heappush(waiting[target], (places[target][kind, stage + step, microbatch], at))
    return {order[at]: tuple(order[sent] for sent in sorted(found)) for at, found in due.items() if at < len(order)}


class Sends:
    """What a rank has sent in this step, and when it lets go of it."""

    def __init__(self, due: Mapping[Event, Sequence[Event]]) -> None:
        self._due = due
        self._kept: dict[Event, list[Tensor]] = {}

    def keep(self, event: Event, tensors: Sequence[Tensor]) -> None:
        """``tensors`` are on their way; nothing but the sending needs them after their micro-batch's last pass."""
        self._kept[event] = list(tensors)

    def before(self, event: Event) -> None:
        """Let go of what must have arrived when this pass begins, its own input received."""
        for sent in self._due.get(event, ()):
            for tensor in self._kept.pop(sent, ()):
                tensor.untyped_storage().resize_(0)

    def end_step(self) -> None:
        """All sends have been waited for."""
        self._kept.clear()
