"""When a rank that has several stages lets go of what it has sent.

torch's schedules with several stages a rank wait for their sends when the step is over, and until then each work object keeps
its tensor (``torch/distributed/pipelining/schedules.py``, ``_step_microbatches``: ``send_ops``). An emitted program frees it
once it is known to have arrived: what comes from a rank tells that this rank has done all that it did before.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

from cost_models.schedules import Action, actions, rank_of_stage

Releases = Mapping[Action, tuple[Action, ...]]
"""By the action at whose start it happens, whose sends a rank lets go of: of forward passes the activation, of backward passes
the gradient. What is not in it stays until the step is over."""


@lru_cache(maxsize=256)
def releases(
    name: str, pipeline: int, virtual: int, microbatches: int, silent: frozenset[int] = frozenset()
) -> tuple[Releases, ...]:
    """Of every pipeline rank. ``silent``: stages to which no gradient comes back, whose backward passes wait for nobody and
    so tell nothing.

    A rank reads what a neighbour has sent where it acts on it. The neighbour had then done all its actions up to the one that
    made that: what it had received for those has arrived. A tensor also stays until its micro-batch's last pass on
    the stage, whose autograd may keep it. An illegal schedule raises ValueError.
    """
    orders = actions(name, pipeline, virtual, microbatches)
    places = [{_event(action): at for at, action in enumerate(order)} for order in orders]
    return tuple(_of_rank(name, pipeline, virtual, rank, orders[rank], places, silent) for rank in range(pipeline))


def _event(action: Action) -> tuple[str, int, int]:
    """A whole backward pass and its input part are the same to a neighbour."""
    return "B" if action.kind == "I" else action.kind, action.stage, action.microbatch


def _of_rank(
    name: str, pipeline: int, virtual: int, rank: int, order: tuple[Action, ...], places: list[dict[tuple[str, int, int], int]],
    silent: frozenset[int],
) -> Releases:
    last = {(action.stage, action.microbatch): at for at, action in enumerate(order) if action.kind in "BW"}
    waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by neighbour, (its action that reads it, own action)
    due: dict[int, list[int]] = defaultdict(list)
    for at, action in enumerate(order):
        kind, stage, microbatch = _event(action)
        step = {"F": 1, "B": -1}.get(kind, 0)
        source, target = (
            None if not step or not 0 <= other < pipeline * virtual else rank_of_stage(name, pipeline, other)
            for other in (stage - step, stage + step)
        )
        if source is not None and source != rank and not (kind == "B" and stage in silent):
            told, queue = places[source][kind, stage - step, microbatch], waiting[source]
            while queue and queue[0][0] <= told:
                sent = heapq.heappop(queue)[1]
                due[max(at, last[order[sent].stage, order[sent].microbatch] + 1)].append(sent)
        if target is not None and target != rank:
            heapq.heappush(waiting[target], (places[target][kind, stage + step, microbatch], at))
    return {order[at]: tuple(order[sent] for sent in sorted(found)) for at, found in due.items() if at < len(order)}
