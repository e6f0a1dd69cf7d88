"""Seconds and memory of a pipeline step: the schedule as a fixed graph of actions, simulated exactly.

An action starts when the action before it on its rank has ended and its input has arrived; a transfer delays only what
waits for it. The step is then the longest path, and a path is a linear function of the stages' times: the critical
path's counts are a cut for an optimiser. Once its ranks are busy, every further turn of micro-batches adds the same to
a step, so the longest schedules (:func:`is_long`) are known from two shorter ones.

Closed forms that it must meet (equal stages, no transfers):

- GPipe and 1F1B take ``(microbatches + pipeline - 1) (forward + backward)`` (Huang 2019; Narayanan 2019);
- interleaving divides the bubble by the virtual stages (Narayanan 2021, section 2.2);
- zbv has no bubble beyond its fill (Qi 2023, section 6).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_models.schedules import KINDS, Action, actions, all_steps, legal, rank_of_stage

NOTHING = -1
SPLITTING = ("interleaved-zero-bubble", "zbv")
"""Schedules whose backward passes are two actions."""
LONG, LONG_ALONE = 1_200_000, 20_000
"""Schedules of more actions are not simulated whole; of one stage, whose step is its micro-batches' sum."""
ENOUGH, ROUNDS = 50_000, 8
"""Actions of the shorter ones at least, and turns of all ranks."""
TOGETHER = 4_000_000
"""Actions times cases that :func:`lengths` holds at once."""
FEW = 40
"""Where a wave has fewer actions, of all cases together, one after the other is quicker."""


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
    """A simulated step. ``busy_s`` and ``idle_s`` are per pipeline rank and sum to ``total_s``. ``timetable``: schedule, ranks,
    virtual stages, micro-batches; ``ends_s``: of every rank's actions, none of a long schedule's."""

    total_s: float
    busy_s: tuple[float, ...]
    critical_path: CriticalPath
    timetable: tuple[str, int, int, int]
    ends_s: tuple[tuple[float, ...], ...]
    times: tuple[StageTimes, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        return tuple(self.total_s - busy for busy in self.busy_s)

    @property
    def events(self) -> Iterator[Event]:
        """Every action, rank by rank, in order."""
        orders = actions(*self.timetable) if self.ends_s else ()
        for rank, (order, ends) in enumerate(zip(orders, self.ends_s, strict=True)):
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
    """The actions, wave by wave: each waits for actions of earlier waves only. ``bounds``: the positions of each wave; of every
    action, [actions]: ``cost``, an index into the flat durations (4 x stage + kind); ``microbatch``; ``before``, the action
    before it on its rank, and ``source``, the one that makes its input (:data:`NOTHING` where absent); ``cut``, over which that
    is sent (0: none, or both stages share a rank). ``positions``: of every rank, its actions in order."""

    bounds: tuple[slice, ...]
    cost: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    before: NDArray[np.int64]
    source: NDArray[np.int64]
    cut: NDArray[np.int64]
    positions: tuple[NDArray[np.int64], ...]

    @cached_property
    def lists(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """``cost``, ``before``, ``source`` and ``cut``, to go through one by one."""
        return self.cost.tolist(), self.before.tolist(), self.source.tolist(), self.cut.tolist()

    @cached_property
    def last(self) -> NDArray[np.int64]:
        """[ranks]: the last action of each."""
        return np.array([mine[-1] for mine in self.positions])


@dataclass(frozen=True)
class Dependencies:
    """What waits for what in a schedule, inputs before their use. Of every action: ``stage``; ``kind``, an index into FIWB;
    ``microbatch``. Of every edge, in the order of its ``target``: ``source``, the action it waits for, negative where it is the
    first of its rank and needs nothing; ``cut``, over which the source's result is sent (0: none). ``last``: of every rank, its
    last action."""

    stage: NDArray[np.int64]
    kind: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    target: NDArray[np.int64]
    source: NDArray[np.int64]
    cut: NDArray[np.int64]
    last: NDArray[np.int64]


def dependencies(name: str, pipeline: int, virtual: int, microbatches: int) -> Dependencies:
    """Of one step. An illegal schedule raises ValueError."""
    graph = _graph(name, pipeline, virtual, microbatches)
    first = (graph.before != NOTHING) | (graph.source == NOTHING)
    there = np.stack([first, graph.source != NOTHING], axis=1)
    target = np.repeat(np.arange(len(graph.cost)), there.sum(axis=1))
    source = np.stack([graph.before, graph.source], axis=1)[there]
    cut = np.stack([np.zeros_like(graph.cut), graph.cut], axis=1)[there]
    return Dependencies(graph.cost // 4, graph.cost % 4, graph.microbatch, target, source, cut, graph.last)


def _check(name: str, pipeline: int, virtual: int, microbatches: int) -> None:
    reason = legal(name, pipeline, virtual, microbatches)
    if reason is not None:
        raise ValueError(reason)


@lru_cache(maxsize=64)
def _graph(name: str, pipeline: int, virtual: int, microbatches: int) -> _Graph:
    _check(name, pipeline, virtual, microbatches)
    ranks = all_steps(name, pipeline, virtual, microbatches)
    kind, stage, micro = (np.concatenate([getattr(rank, part) for rank in ranks]) for part in ("kind", "stage", "microbatch"))
    ends = np.cumsum([len(rank.kind) for rank in ranks])
    starts = np.append(0, ends[:-1])
    before = np.arange(len(kind)) - 1
    before[starts] = NOTHING
    source, cut = _inputs(kind, stage, micro, pipeline * virtual - 1)
    rank_of = np.array([rank_of_stage(name, pipeline, at) for at in range(pipeline * virtual)])
    cut[(cut > 0) & (rank_of[cut - 1] == rank_of[cut])] = 0
    depth = _depths(starts, ends, source)
    if depth is None:
        raise ValueError(f"{name} with {pipeline} ranks and {microbatches} micro-batches waits for itself")
    order = np.argsort(depth, kind="stable")
    place = np.append(np.argsort(order), NOTHING)
    waves = np.cumsum(np.bincount(depth)[1:]).tolist()
    return _Graph(
        tuple(slice(first, last) for first, last in zip([0, *waves], waves, strict=False)),
        (4 * stage + kind)[order], micro[order], place[before[order]], place[source[order]], cut[order],
        tuple(place[first:last] for first, last in zip(starts, ends, strict=True)),
    )


def _inputs(
    kind: NDArray[np.int64], stage: NDArray[np.int64], micro: NDArray[np.int64], last_stage: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[actions]: which action must end before each one (:data:`NOTHING`: none), and the cut between; the ranks' own orders
    cover the rest."""
    forward, weights = kind == KINDS.index("F"), kind == KINDS.index("W")
    made = np.full((2, last_stage + 2, micro.max(initial=0) + 1), NOTHING)
    made[np.where(forward, 1, 0)[~weights], stage[~weights], micro[~weights]] = np.flatnonzero(~weights)
    needs = ~weights & ~(forward & (stage == 0))
    # A forward pass needs the stage before; a backward pass the one after, or on the last stage its own forward pass.
    ends = ~forward & (stage == last_stage)
    of = np.where(forward, stage - 1, np.where(ends, stage, stage + 1))
    source = np.where(needs, made[np.where(forward | ends, 1, 0), of, micro], NOTHING)
    return source, np.where(needs & ~ends, np.where(forward, stage, stage + 1), 0)


def _depths(starts: NDArray[np.int64], ends: NDArray[np.int64], source: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """[actions]: the first wave in which each can be, where ranks lie from ``starts`` to ``ends``; None where some wait for
    each other."""
    depth, done = np.zeros(len(source), dtype=np.int64), np.zeros(len(source) + 1, dtype=bool)
    done[NOTHING] = True
    next_, ends, wave = starts.copy(), ends.copy(), 0
    while next_.size:
        wave += 1
        ready = done[source[next_]]
        now = next_[ready]
        if not now.size:
            return None
        depth[now] = wave
        done[now] = True
        next_ = next_ + ready
        left = next_ < ends
        if not left.all():
            next_, ends = next_[left], ends[left]
    return depth


def actions_of(name: str, pipeline: int, virtual: int, microbatches: int) -> int:
    """Of one step."""
    return (3 if name in SPLITTING else 2) * pipeline * virtual * microbatches


def is_long(name: str, pipeline: int, virtual: int, microbatches: int) -> bool:
    """Whether a schedule has too many actions to be simulated whole."""
    return _shorter(name, pipeline, virtual, microbatches) is not None


def _shorter(name: str, pipeline: int, virtual: int, microbatches: int) -> int | None:
    """Micro-batches of a schedule that is long enough to be like a longer one; None where this is not much longer."""
    count, alone = actions_of(name, pipeline, virtual, microbatches), pipeline * virtual == 1
    rounds = max(ROUNDS, -(-ENOUGH // actions_of(name, pipeline, virtual, pipeline))) if not alone else ROUNDS
    short = rounds * pipeline
    return short if count > (LONG_ALONE if alone else LONG) and microbatches > 2 * short else None


def _drawn(a: float, b: float, times: float) -> float:
    """``times`` as far from ``a`` as ``b`` is."""
    return a + times * (b - a)


def _prolonged(a: Timeline, b: Timeline, microbatches: int) -> Timeline:
    """The step of more micro-batches than either has: never longer than it is, and shorter only where what nearly is the
    slowest rhythm of the ranks has hidden the slowest until then."""
    short, longer = a.timetable[3], b.timetable[3]
    times = (microbatches - short) / (longer - short)
    paths = (
        tuple(_drawn(x, y, times) for x, y in zip(getattr(a.critical_path, kind), getattr(b.critical_path, kind), strict=True))
        for kind in ("forward", "input_gradient", "weight_gradient", "transfers")
    )
    busy_s = tuple(_drawn(x, y, times) for x, y in zip(a.busy_s, b.busy_s, strict=True))
    return Timeline(
        max(_drawn(a.total_s, b.total_s, times), *busy_s), busy_s,
        CriticalPath(*paths), (*a.timetable[:3], microbatches), (), a.times,
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
    short = _shorter(name, pipeline, virtual, microbatches)
    if short is not None:
        _check(name, pipeline, virtual, microbatches)
        first, second = (simulate(name, pipeline, virtual, each, times, send_s) for each in (short, 2 * short))
        return _prolonged(first, second, microbatches)
    graph = _graph(name, pipeline, virtual, microbatches)
    if len(times) != pipeline * virtual or len(send_s) < pipeline * virtual:
        raise ValueError(f"{pipeline * virtual} virtual stages need as many times and sends")
    durations, sends = _durations(times), [0.0, *send_s[1:]]
    ends = _ends(graph, durations, sends)
    costs, positions = graph.lists[0], [mine.tolist() for mine in graph.positions]
    return Timeline(
        total_s=max(ends),
        busy_s=tuple(sum(durations[costs[at]] for at in mine) for mine in positions),
        critical_path=_path_to(graph, ends, sends, pipeline * virtual, max(range(len(ends)), key=ends.__getitem__)),
        timetable=(name, pipeline, virtual, microbatches),
        ends_s=tuple(tuple(ends[at] for at in mine) for mine in positions),
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
    last = sorted(graph.last.tolist(), key=ends.__getitem__, reverse=True)
    chosen = last[:1] + last[1 :: max(1, (len(last) - 1) // max(1, most - 1))][: most - 1]
    paths = [_path_to(graph, ends, sends, pipeline * virtual, at) for at in chosen]
    return ends[last[0]], list(dict.fromkeys(paths))


def lengths(
    name: str, pipeline: int, virtual: int, microbatches: int, times: NDArray[np.float64], sends_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[cases]: seconds of a step under each of many ``times`` [cases, virtual stages, 3] (forward, input and weight
    gradient), as :func:`simulate` says; ``sends_s`` [virtual stages], or [cases, virtual stages]: seconds over the cut before a
    stage. An illegal schedule raises ValueError."""
    short = _shorter(name, pipeline, virtual, microbatches)
    if short is not None:
        _check(name, pipeline, virtual, microbatches)
        a, b = (_lengths(_graph(name, pipeline, virtual, each), times, sends_s) for each in (short, 2 * short))
        return np.asarray(a + (microbatches - short) / short * (b - a))
    return _lengths(_graph(name, pipeline, virtual, microbatches), times, sends_s)


def rough_lengths(
    name: str, pipeline: int, virtual: int, microbatches: int, times: NDArray[np.float64], sends_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[cases]: what :func:`lengths` says or less, by a ten-thousandth or so: in single precision, in half the time. ``times``
    must not be negative."""
    graph = _graph(name, pipeline, virtual, microbatches)
    found = _lengths(graph, times.astype(np.float32), sends_s).astype(np.float64)
    # Every number and every sum is too large by half a digit at most; a path adds two numbers a wave.
    return np.asarray(found / (1 + float(np.finfo(np.float32).eps) / 2) ** (2 * len(graph.bounds) + 3))


def _lengths(graph: _Graph, times: NDArray[Any], sends_s: NDArray[np.float64]) -> NDArray[Any]:
    sends_s = np.where(np.arange(times.shape[1]) > 0, sends_s, 0.0)  # Where nothing is sent, the cut is the first.
    every = np.broadcast_to(sends_s, (len(times), times.shape[1]))
    if len(times) * len(graph.cost) < FEW * len(graph.bounds):
        pairs = zip(_of_kinds(times).tolist(), every.tolist(), strict=True)
        return np.array([max(_ends(graph, durations, sends)) for durations, sends in pairs])
    size = max(1, TOGETHER // len(graph.cost))
    parts = [
        _last_ends(graph, times[at : at + size], sends_s[None] if sends_s.ndim == 1 else every[at : at + size])
        for at in range(0, len(times), size)
    ]
    return np.concatenate(parts) if parts else np.zeros(0)


def _last_ends(graph: _Graph, times: NDArray[Any], sends_s: NDArray[np.float64]) -> NDArray[Any]:
    """[cases]: when the last action ends. ``sends_s`` [cases or 1, virtual stages]."""
    durations = np.ascontiguousarray(_of_kinds(times).T)
    sent = sends_s.astype(times.dtype).T[graph.cut]
    # Behind the actions, a place for what is absent: it has ended when the step begins.
    ends = np.zeros((len(graph.cost) + 1, len(times)), dtype=times.dtype)
    widest = max((wave.stop - wave.start for wave in graph.bounds), default=0)
    arrived, free = np.empty((2, widest, len(times)), dtype=times.dtype)
    for wave in graph.bounds:
        # Rows are taken into the same places again and again: twice as quick as new ones. ("raise" would copy once more; "wrap"
        # takes NOTHING for the last place.)
        begun, other = arrived[: wave.stop - wave.start], free[: wave.stop - wave.start]
        ends.take(graph.source[wave], axis=0, out=begun, mode="wrap")
        begun += sent[wave]
        ends.take(graph.before[wave], axis=0, out=other, mode="wrap")
        np.maximum(begun, other, out=begun)
        durations.take(graph.cost[wave], axis=0, out=other, mode="wrap")
        np.add(begun, other, out=ends[wave])
    return np.asarray(ends[graph.last].max(axis=0))


def _of_kinds(times: NDArray[Any]) -> NDArray[Any]:
    """[..., stages x kinds]: how long actions last, of the passes' ``times`` [..., stages, 3]."""
    by_kind = (times[..., 0], times[..., 1], times[..., 2], times[..., 1] + times[..., 2])
    return np.stack(by_kind, axis=-1).reshape(*times.shape[:-2], times.shape[-2] * len(KINDS))


def _durations(times: Sequence[StageTimes]) -> list[float]:
    return [_duration(stage, kind) for stage in times for kind in KINDS]


def _ends(graph: _Graph, durations: Sequence[float], sends: Sequence[float]) -> list[float]:
    """When each action ends."""
    ends: list[float] = []
    for cost, before, source, cut in zip(*graph.lists, strict=True):
        start = ends[before] if before >= 0 else 0.0
        if source >= 0:
            arrival = ends[source] + sends[cut]
            if arrival > start:
                start = arrival
        ends.append(start + durations[cost])
    return ends


def _path_to(graph: _Graph, ends: Sequence[float], sends: Sequence[float], stages: int, at: int) -> CriticalPath:
    """Back from an action, always through what its start waited for."""
    costs, befores, sources, cuts = graph.lists
    passed, transfers = [0] * (stages * len(KINDS)), [0] * stages
    while at != NOTHING:
        passed[costs[at]] += 1
        before, source, cut = befores[at], sources[at], cuts[at]
        if source != NOTHING and (before == NOTHING or ends[source] + sends[cut] > ends[before]):
            transfers[cut] += 1 if cut else 0
            at = source
        else:
            at = before
    forward, inputs, weights, both = (passed[kind :: len(KINDS)] for kind in range(len(KINDS)))
    inputs, weights = ([alone + whole for alone, whole in zip(each, both, strict=True)] for each in (inputs, weights))
    return CriticalPath(tuple(forward), tuple(inputs), tuple(weights), tuple(transfers))
