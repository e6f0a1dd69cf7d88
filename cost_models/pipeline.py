"""Seconds and memory of a pipeline step: the schedule as a fixed graph of actions, simulated exactly.

An action starts when the action before it on its rank has ended and its input has arrived; a transfer delays only what
waits for it. The step is then the longest path, and a path is a linear function of the stages' times: the critical
path's counts are a cut for an optimiser. Closed forms that it must meet (equal stages, no transfers):

- GPipe and 1F1B take ``(microbatches + pipeline - 1) (forward + backward)`` (Huang 2019; Narayanan 2019);
- interleaving divides the bubble by the virtual stages (Narayanan 2021, section 2.2);
- zbv has no bubble beyond its fill (Qi 2023, section 6).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cost_models.schedules import Action, Orders, actions, rank_of_stage

NOTHING = -1
TOGETHER = 10_000_000
"""Actions times cases that :func:`lengths` holds at once."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch on one virtual stage, by kind of action; a full backward is both gradients."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """How often each time lies on a longest path (on average, of a mixture of paths): per virtual stage, and per cut (index 0
    is always 0)."""

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    transfers: tuple[float, ...]

    def seconds(self, times: Sequence[StageTimes], send_s: Sequence[float]) -> float:
        """The path's length under any times: a lower bound of the step under those times."""
        stages = zip(times, self.forward, self.input_gradient, self.weight_gradient, strict=True)
        computing = sum(
            stage.forward_s * forward + stage.input_gradient_s * inputs + stage.weight_gradient_s * weights
            for stage, forward, inputs, weights in stages
        )
        return computing + sum(count * send_s[cut] for cut, count in enumerate(self.transfers) if count)


@dataclass(frozen=True, slots=True)
class Event:
    """One action as it ran on a pipeline rank."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step. ``busy_s`` and ``idle_s`` are per pipeline rank and sum to ``total_s``."""

    total_s: float
    busy_s: tuple[float, ...]
    critical_path: CriticalPath
    orders: Orders
    ends_s: tuple[tuple[float, ...], ...]
    times: tuple[StageTimes, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        return tuple(self.total_s - busy for busy in self.busy_s)

    @property
    def events(self) -> Iterator[Event]:
        """Every action, rank by rank, in order."""
        for rank, (order, ends) in enumerate(zip(self.orders, self.ends_s, strict=True)):
            for action, end in zip(order, ends, strict=True):
                yield Event(rank, action, end - _duration(self.times[action.stage], action.kind), end)


def _duration(times: StageTimes, kind: str) -> float:
    if kind == "F":
        return times.forward_s
    if kind == "I":
        return times.input_gradient_s
    if kind == "W":
        return times.weight_gradient_s
    return times.input_gradient_s + times.weight_gradient_s


@dataclass(frozen=True)
class _Graph:
    """The actions in an order in which every input precedes its use; positions in it, :data:`NOTHING` where absent.

    ``cost``: index into the flat durations (4 x stage + kind); ``source``: the action that produces the input;
    ``cut``: the cut that it is sent over (0: none, both stages share a rank).
    """

    actions: tuple[Action, ...]
    cost: tuple[int, ...]
    before: tuple[int, ...]
    source: tuple[int, ...]
    cut: tuple[int, ...]
    positions: tuple[tuple[int, ...], ...]


_KINDS = "FIWB"


@dataclass(frozen=True)
class Dependencies:
    """What waits for what in a schedule, inputs before their use. Of every action: ``stage``; ``kind``, an index into FIWB. Of
    every edge, in the order of its ``target``: ``source``, the action it waits for, negative where it is the first of its rank
    and needs nothing; ``cut``, over which the source's result is sent (0: none). ``last``: of every rank, its last action."""

    stage: NDArray[np.int64]
    kind: NDArray[np.int64]
    target: NDArray[np.int64]
    source: NDArray[np.int64]
    cut: NDArray[np.int64]
    last: NDArray[np.int64]


def dependencies(name: str, pipeline: int, virtual: int, microbatches: int) -> Dependencies:
    """Of one step. An illegal schedule raises ValueError."""
    graph = _graph(name, pipeline, virtual, microbatches)
    edges = []
    for at, (before, source, cut) in enumerate(zip(graph.before, graph.source, graph.cut, strict=True)):
        if before != NOTHING or source == NOTHING:
            edges.append((at, before, 0))
        if source != NOTHING:
            edges.append((at, source, cut))
    cost = np.array(graph.cost)
    target, sources, cuts = np.array(edges).T
    return Dependencies(cost // 4, cost % 4, target, sources, cuts, np.array([at[-1] for at in graph.positions]))


@lru_cache(maxsize=64)
def _graph(name: str, pipeline: int, virtual: int, microbatches: int) -> _Graph:
    orders = actions(name, pipeline, virtual, microbatches)
    last_stage = pipeline * virtual - 1
    rank_of = [rank_of_stage(name, pipeline, stage) for stage in range(last_stage + 1)]
    done: dict[tuple[bool, int, int], int] = {}
    listed: list[Action] = []
    before, source, cuts = [], [], []
    positions: list[list[int]] = [[] for _ in orders]
    taken = [0] * pipeline
    ready = list(range(pipeline))
    waiting: dict[tuple[bool, int, int], int] = {}
    while ready:
        rank = ready.pop()
        order, mine = orders[rank], positions[rank]
        while taken[rank] < len(order):
            action = order[taken[rank]]
            need, cut = _input(action, last_stage)
            origin = NOTHING if need is None else done.get(need, NOTHING)
            if need is not None and origin == NOTHING:
                waiting[need] = rank
                break
            position = len(listed)
            listed.append(action)
            before.append(mine[-1] if mine else NOTHING)
            source.append(origin)
            cuts.append(cut if cut and rank_of[cut - 1] != rank_of[cut] else 0)
            mine.append(position)
            taken[rank] += 1
            if action.kind != "W":
                result = (action.kind == "F", action.stage, action.microbatch)
                done[result] = position
                if result in waiting:
                    ready.append(waiting.pop(result))
    if len(listed) != sum(map(len, orders)):
        raise ValueError(f"{name} with {pipeline} ranks and {microbatches} micro-batches waits for itself")
    cost = tuple(4 * action.stage + _KINDS.index(action.kind) for action in listed)
    return _Graph(tuple(listed), cost, tuple(before), tuple(source), tuple(cuts), tuple(map(tuple, positions)))


def _input(action: Action, last_stage: int) -> tuple[tuple[bool, int, int] | None, int]:
    """(is forward, stage, micro-batch) that must end before ``action``, and the cut between; the rank's own order
    covers the rest."""
    if action.kind == "W" or (action.kind == "F" and action.stage == 0):
        return None, 0
    if action.kind == "F":
        return (True, action.stage - 1, action.microbatch), action.stage
    if action.stage == last_stage:
        return (True, action.stage, action.microbatch), 0
    return (False, action.stage + 1, action.microbatch), action.stage + 1


@dataclass(frozen=True)
class _Waves:
    """The actions in waves, each of which waits for actions of earlier waves only. ``bounds``: the positions of each wave; of
    every action: ``cost``, ``before`` and ``source`` as in :class:`_Graph` (the number of actions where absent), ``sent``
    [actions, 1]: 1 where its input comes over a cut. ``last``: of every rank, its last action."""

    bounds: tuple[slice, ...]
    cost: NDArray[np.int64]
    before: NDArray[np.int64]
    source: NDArray[np.int64]
    sent: NDArray[np.float64]
    last: NDArray[np.int64]


@lru_cache(maxsize=64)
def _waves(name: str, pipeline: int, virtual: int, microbatches: int) -> _Waves:
    graph = _graph(name, pipeline, virtual, microbatches)
    depth = [0] * (len(graph.cost) + 1)  # Its last place is where NOTHING points to.
    for at, (before, source) in enumerate(zip(graph.before, graph.source, strict=True)):
        depth[at] = 1 + max(depth[before], depth[source])
    order = np.argsort(depth[:-1], kind="stable")
    place = np.append(np.argsort(order), len(order))
    ends = np.cumsum(np.bincount(depth[:-1])[1:]).tolist()
    return _Waves(
        tuple(slice(first, last) for first, last in zip([0, *ends], ends, strict=False)),
        np.array(graph.cost)[order], place[np.array(graph.before)[order]], place[np.array(graph.source)[order]],
        (np.array(graph.cut)[order, None] > 0).astype(float), place[[positions[-1] for positions in graph.positions]],
    )


def simulate(
    name: str,
    pipeline: int,
    virtual: int,
    microbatches: int,
    times: Sequence[StageTimes],
    send_s: Sequence[float],
) -> Timeline:
    """Run one step. ``times``: one per virtual stage; ``send_s[i]``: seconds over the cut between virtual stages i -
    1 and i, either way (index 0 is not read; a cut inside a rank costs nothing). An illegal schedule raises
    ValueError."""
    graph = _graph(name, pipeline, virtual, microbatches)
    if len(times) != pipeline * virtual or len(send_s) < pipeline * virtual:
        raise ValueError(f"{pipeline * virtual} virtual stages need as many times and sends")
    durations, sends = _durations(times), [0.0, *send_s[1:]]
    ends = _ends(graph, durations, sends)
    busy = tuple(sum(durations[graph.cost[at]] for at in positions) for positions in graph.positions)
    return Timeline(
        total_s=max(ends),
        busy_s=busy,
        critical_path=_path_to(graph, ends, sends, pipeline * virtual, max(range(len(ends)), key=ends.__getitem__)),
        orders=actions(name, pipeline, virtual, microbatches),
        ends_s=tuple(tuple(ends[at] for at in positions) for positions in graph.positions),
        times=tuple(times),
    )


def longest_paths(
    name: str, pipeline: int, virtual: int, microbatches: int, times: Sequence[StageTimes], send_s: Sequence[float], most: int
) -> tuple[float, list[CriticalPath]]:
    """Seconds of a step, as :func:`simulate` says, and the longest paths to the last actions of ``most`` ranks, the critical
    one among them. Any path's length is a lower bound under any times, so an optimiser gains from more than one."""
    graph = _graph(name, pipeline, virtual, microbatches)
    durations, sends = _durations(times), [0.0, *send_s[1:]]
    ends = _ends(graph, durations, sends)
    last = sorted((positions[-1] for positions in graph.positions), key=ends.__getitem__, reverse=True)
    chosen = last[:1] + last[1 :: max(1, (len(last) - 1) // max(1, most - 1))][: most - 1]
    paths = [_path_to(graph, ends, sends, pipeline * virtual, at) for at in chosen]
    return ends[last[0]], list(dict.fromkeys(paths))


def lengths(
    name: str, pipeline: int, virtual: int, microbatches: int, times: NDArray[np.float64], send_s: float
) -> NDArray[np.float64]:
    """[cases]: seconds of a step under each of many ``times`` [cases, virtual stages, 3] (forward, input and weight
    gradient), as :func:`simulate` says, every cut between ranks taking ``send_s``. An illegal schedule raises ValueError."""
    waves = _waves(name, pipeline, virtual, microbatches)
    size = max(1, TOGETHER // len(waves.cost))
    parts = [_last_ends(waves, times[at : at + size], send_s) for at in range(0, len(times), size)]
    return np.concatenate(parts) if parts else np.zeros(0)


def _last_ends(waves: _Waves, times: NDArray[np.float64], send_s: float) -> NDArray[np.float64]:
    """[cases]: when the last action ends."""
    by_kind = (times[..., 0], times[..., 1], times[..., 2], times[..., 1] + times[..., 2])
    durations = np.stack(by_kind, axis=-1).reshape(len(times), -1).T
    # One more action, which is never waited for: it has ended when the step begins.
    ends = np.zeros((len(waves.cost) + 1, len(times)))
    for wave in waves.bounds:
        begun = np.maximum(ends[waves.before[wave]], ends[waves.source[wave]] + send_s * waves.sent[wave])
        np.add(begun, durations[waves.cost[wave]], out=ends[wave])
    return np.asarray(ends[waves.last].max(axis=0))


def _durations(times: Sequence[StageTimes]) -> list[float]:
    return [_duration(stage, kind) for stage in times for kind in _KINDS]


def _ends(graph: _Graph, durations: Sequence[float], sends: Sequence[float]) -> list[float]:
    """When each action ends."""
    ends: list[float] = []
    for cost, before, source, cut in zip(graph.cost, graph.before, graph.source, graph.cut, strict=True):
        start = ends[before] if before >= 0 else 0.0
        if source >= 0:
            arrival = ends[source] + sends[cut]
            if arrival > start:
                start = arrival
        ends.append(start + durations[cost])
    return ends


def _path_to(graph: _Graph, ends: Sequence[float], sends: Sequence[float], stages: int, at: int) -> CriticalPath:
    """Back from an action, always through what its start waited for."""
    forward, inputs, weights, transfers = ([0] * stages for _ in range(4))
    while at != NOTHING:
        action = graph.actions[at]
        if action.kind == "F":
            forward[action.stage] += 1
        if action.kind in "IB":
            inputs[action.stage] += 1
        if action.kind in "WB":
            weights[action.stage] += 1
        before, source, cut = graph.before[at], graph.source[at], graph.cut[at]
        if source != NOTHING and (before == NOTHING or ends[source] + sends[cut] > ends[before]):
            transfers[cut] += 1 if cut else 0
            at = source
        else:
            at = before
    return CriticalPath(tuple(forward), tuple(inputs), tuple(weights), tuple(transfers))
