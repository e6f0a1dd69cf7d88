"""Micro-batches that a schedule keeps alive on every virtual stage, which do not depend on the stages' times.

A micro-batch lives from its forward until its backward, or until its weight gradient where the backward is split. The order on
a rank is fixed, so a rank's peak is the maximum over its live vectors of the counts times the stages' activation bytes.
Interleaved orders (Narayanan 2021, section 2.2; Qi 2023) count in closed form: ``kept`` forwards ahead of the releases, both
of which pass over the virtual stages in turns of ``turn`` micro-batches, forwards from the first, releases from the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cost_models.schedules import Kind, legal, zbv_steps

Profiles = tuple[tuple[int, ...], ...]
"""Pareto-maximal live vectors of one rank: one count for each of its virtual stages, first to last in the model."""
Counts = NDArray[np.int64]
V_TURNS = 4
"""After so many micro-batches a rank, live vectors of zbv repeat."""


def live_profiles(name: str, pipeline: int, virtual: int, microbatches: int) -> tuple[Profiles, ...]:
    """Per pipeline rank, the Pareto-maximal live vectors. An illegal schedule raises ValueError."""
    reason = legal(name, pipeline, virtual, microbatches)
    if reason is not None:
        raise ValueError(reason)
    return _profiles(name, pipeline, virtual, _enough(name, pipeline, microbatches))


def most_alive(name: str, pipeline: int, virtual: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Per pipeline rank, the most micro-batches alive on each of its virtual stages, whenever that is. An illegal schedule
    raises ValueError."""
    if not name.startswith("interleaved"):
        profiles = live_profiles(name, pipeline, virtual, microbatches)
        return tuple(tuple(map(max, zip(*rank, strict=True))) for rank in profiles)
    reason = legal(name, pipeline, virtual, microbatches)
    if reason is not None:
        raise ValueError(reason)
    turn = microbatches // max(1, microbatches // pipeline)
    kept = np.array(interleaved_kept(name, pipeline, virtual, microbatches))[:, None]
    # Between these releases, where a turn of forwards or of releases ends, every count is linear.
    ends = np.arange(virtual + 1) * turn
    last = np.minimum(virtual * microbatches - kept + 1, virtual * turn) - 1
    turns = np.concatenate([np.broadcast_to(ends, (pipeline, virtual + 1)), ends - kept % turn, last], axis=1)
    released = np.clip(turns, 0, last)
    alive = interleaved_live(kept, released, virtual, turn).max(axis=1)
    return tuple(map(tuple, alive.tolist()))


def in_flight(name: str, pipeline: int, virtual: int, microbatches: int) -> tuple[int, ...]:
    """Per pipeline rank, the most (stage, micro-batch) pairs whose activations are kept at once."""
    profiles = live_profiles(name, pipeline, virtual, microbatches)
    return tuple(max(sum(vector) for vector in rank) for rank in profiles)


def _enough(name: str, pipeline: int, microbatches: int) -> int:
    """As few micro-batches with the same live vectors."""
    if name == "1f1b":
        return min(microbatches, pipeline)
    return min(microbatches, V_TURNS * pipeline) if name == "zbv" else microbatches


@lru_cache(maxsize=1024)
def _profiles(name: str, pipeline: int, virtual: int, microbatches: int) -> tuple[Profiles, ...]:
    ranks = range(pipeline)
    if name == "gpipe":
        return tuple(((microbatches,),) for _ in ranks)
    if name == "1f1b":
        return tuple(((min(pipeline - rank, microbatches),),) for rank in ranks)
    if name == "zbv":
        return tuple(
            _maximal(np.array(sorted(_peaks(zbv_steps(rank, pipeline, microbatches), rank)))) for rank in ranks
        )
    # Forwards and releases go round together, so live vectors repeat after a round.
    total = virtual * microbatches
    turn = microbatches // max(1, microbatches // pipeline)
    return tuple(
        _maximal(interleaved_live(kept, np.arange(min(total - kept + 1, virtual * turn)), virtual, turn))
        for kept in interleaved_kept(name, pipeline, virtual, microbatches)
    )


def interleaved_kept(name: str, pipeline: int, virtual: int, microbatches: int) -> list[int]:
    """Per rank, the most (stage, micro-batch) pairs alive: forwards before the first release."""
    split = name == "interleaved-zero-bubble"
    total = virtual * microbatches
    turn = microbatches // max(1, microbatches // pipeline)
    warmups = [min((virtual - 1) * turn + (1 if split else 2) * (pipeline - 1 - rank), total) for rank in range(pipeline)]
    return [min(total, warmup + 1 + (rank if split else 0)) for rank, warmup in enumerate(warmups)]


def interleaved_live(kept: int | Counts, released: Counts, virtual: int, turn: int) -> Counts:
    """[*released, virtual]: micro-batches alive on each virtual stage when so many pairs have been released, ``kept`` are."""
    stages = np.arange(virtual)
    return _passed(kept + released, stages, virtual, turn) - _passed(released, stages[::-1], virtual, turn)


def _passed(pairs: Counts, place: Counts, virtual: int, turn: int) -> Counts:
    """How many of the first ``pairs`` are of the stage whose turn comes at ``place``."""
    rounds, rest = np.divmod(pairs, virtual * turn)
    return np.asarray((rounds * turn)[..., None] + np.clip(rest[..., None] - place * turn, 0, turn))


def _peaks(steps: Sequence[tuple[Kind, int]], rank: int) -> set[tuple[int, int]]:
    """Every pair of counts, of the rank's first and second stage, just before something is released."""
    live = [0, 0]
    peaks: set[tuple[int, int]] = set()
    grown = False
    for kind, stage in steps:
        if kind == "F":
            live[stage != rank] += 1
            grown = True
        elif kind == "W":
            if grown:
                peaks.add((live[0], live[1]))
                grown = False
            live[stage != rank] -= 1
    return peaks


def _maximal(vectors: Counts) -> Profiles:
    distinct = np.unique(vectors, axis=0)
    left = distinct[np.argsort(-distinct.sum(axis=1), kind="stable")]
    kept: list[tuple[int, ...]] = []
    while len(left):
        kept.append(tuple(left[0].tolist()))
        left = left[(left > left[0]).any(axis=1)]
    return tuple(sorted(kept))
