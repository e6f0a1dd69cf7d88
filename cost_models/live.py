"""Micro-batches that a schedule keeps alive on every virtual stage, which do not depend on the stages' times.

A micro-batch lives from its forward until its backward, or until its weight gradient where the backward is split: then it
waits for that from its input gradient on, but on the first stage of the model, which has no input gradient to make. A stage's
parameters have gradients from its first release on. The order on a rank is fixed, so what a rank holds is most at one of a
few instants, whatever its stages hold: a sum over linear counts is most at an end of them.
Interleaved orders (Narayanan 2021, section 2.2; Qi 2023) count in closed form: ``kept`` forwards ahead of the releases, both
of which pass over the virtual stages in turns of ``turn`` micro-batches, forwards from the first, releases from the last.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cost_models.schedules import KINDS, Steps, legal, turn_length, zbv_steps

Counts = NDArray[np.int64]
LIVE, BEGUN, WAITING = 0, 1, 2
"""What an instant says of every stage: :func:`instants`, second axis."""
V_TURNS = 4
"""After so many micro-batches a rank, live vectors of zbv repeat."""


def instants(name: str, pipeline: int, virtual: int, microbatches: int) -> tuple[Counts, ...]:
    """Per pipeline rank, [instants, 3, virtual stages] (first to last in the model): micro-batches alive, 1 where there are
    gradients, and micro-batches that wait for their weight gradient. Whatever one of each is worth, no instant is worth more
    than the best of these. An illegal schedule raises ValueError."""
    reason = legal(name, pipeline, virtual, microbatches)
    if reason is not None:
        raise ValueError(reason)
    return _instants(name, pipeline, virtual, _enough(name, pipeline, microbatches))


def both_at_once(pipeline: int, virtual: int, microbatches: int) -> bool:
    """Whether there is, on every rank, an instant when all its stages have gradients and a live micro-batch. Where there is one
    round of micro-batches only, the last stages are done when the first ones begin."""
    return virtual == 1 or microbatches >= 2 * pipeline


def most_alive(name: str, pipeline: int, virtual: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Per pipeline rank, the most micro-batches alive on each of its virtual stages, whenever that is. An illegal schedule
    raises ValueError."""
    if not name.startswith("interleaved"):
        found = instants(name, pipeline, virtual, microbatches)
        return tuple(tuple(rank[:, LIVE].max(axis=0).tolist()) for rank in found)
    reason = legal(name, pipeline, virtual, microbatches)
    if reason is not None:
        raise ValueError(reason)
    turn = turn_length(pipeline, microbatches)
    kept = np.array(interleaved_kept(name, pipeline, virtual, microbatches))[:, None]
    # Between these releases, where a turn of forwards or of releases ends, every count is linear.
    ends = np.arange(virtual + 1) * turn
    last = np.minimum(virtual * microbatches - kept + 1, virtual * turn) - 1
    turns = np.concatenate([np.broadcast_to(ends, (pipeline, virtual + 1)), ends - kept % turn, last], axis=1)
    released = np.clip(turns, 0, last)
    alive = interleaved_live(kept + released, released, virtual, turn).max(axis=1)
    return tuple(map(tuple, alive.tolist()))


def in_flight(name: str, pipeline: int, virtual: int, microbatches: int) -> tuple[int, ...]:
    """Per pipeline rank, the most (stage, micro-batch) pairs whose activations are kept at once."""
    return tuple(int(rank[:, LIVE].sum(axis=1).max()) for rank in instants(name, pipeline, virtual, microbatches))


def _enough(name: str, pipeline: int, microbatches: int) -> int:
    """As few micro-batches with the same live vectors."""
    if name == "1f1b":
        return min(microbatches, pipeline)
    return min(microbatches, V_TURNS * pipeline) if name == "zbv" else microbatches


@lru_cache(maxsize=1024)
def _instants(name: str, pipeline: int, virtual: int, microbatches: int) -> tuple[Counts, ...]:
    ranks = range(pipeline)
    if name in ("gpipe", "1f1b"):
        counts = [microbatches if name == "gpipe" else min(pipeline - rank, microbatches) for rank in ranks]
        return tuple(np.array([[[count], [1], [0]]]) for count in counts)
    if name == "zbv":
        return tuple(_maximal(_zbv_instants(zbv_steps(rank, pipeline, microbatches), rank)) for rank in ranks)
    return tuple(map(_maximal, _interleaved(name, pipeline, virtual, microbatches)))


def _interleaved(name: str, pipeline: int, virtual: int, microbatches: int) -> Counts:
    """[ranks, instants, 3, virtual], just before releases: those where a turn of forwards, of input gradients or of releases
    begins or ends. Between these all counts are linear."""
    turn, total, ranks = turn_length(pipeline, microbatches), virtual * microbatches, np.arange(pipeline)
    kept = np.array(interleaved_kept(name, pipeline, virtual, microbatches))[:, None]
    # Forwards and releases go round together, so live vectors repeat after a round; in the second one all have gradients.
    first = np.where(total - kept >= 2 * virtual * turn - 1, virtual * turn, 0)
    last = min(total, 2 * virtual * turn) - 1
    turns, ahead = np.broadcast_to(np.arange(2 * virtual + 1) * turn, (pipeline, 2 * virtual + 1)), ranks[:, None] + 1
    ends = [turns - 1, turns, turns - kept % turn, total - kept]
    if name == "interleaved-zero-bubble":
        ends += turns - ahead % turn, total - ahead
    released = np.clip(np.concatenate(ends, axis=1), first, last)
    live = interleaved_live(np.minimum(kept + released, total), released, virtual, turn)
    begun = _passed(released + 1, np.arange(virtual)[::-1], virtual, turn) > 0
    return np.stack([live, begun, interleaved_waiting(name, ranks, released, virtual, microbatches, turn)], axis=2)


def interleaved_kept(name: str, pipeline: int, virtual: int, microbatches: int) -> list[int]:
    """Per rank, the most (stage, micro-batch) pairs alive: forwards before the first release."""
    split = name == "interleaved-zero-bubble"
    total = virtual * microbatches
    turn = turn_length(pipeline, microbatches)
    warmups = [min((virtual - 1) * turn + (1 if split else 2) * (pipeline - 1 - rank), total) for rank in range(pipeline)]
    return [min(total, warmup + 1 + (rank if split else 0)) for rank, warmup in enumerate(warmups)]


def interleaved_live(forwards: Counts, released: Counts, virtual: int, turn: int) -> Counts:
    """[*released, virtual]: micro-batches alive on each virtual stage after so many pairs' forwards and releases."""
    stages = np.arange(virtual)
    return _passed(forwards, stages, virtual, turn) - _passed(released, stages[::-1], virtual, turn)


def interleaved_waiting(
    name: str, ranks: Counts, released: Counts, virtual: int, microbatches: int, turn: int
) -> Counts:
    """[ranks, released, virtual]: micro-batches that wait on each virtual stage just before the release after so many
    (``released`` [releases] or [ranks, releases]): where the backward pass is split, input gradients are one pair ahead of it
    then, and one more for each rank before this one."""
    released = np.broadcast_to(released, (len(ranks), released.shape[-1]))
    if name != "interleaved-zero-bubble":
        return np.zeros((*released.shape, virtual), dtype=np.int64)
    halfway, places = np.minimum(ranks[:, None] + 1 + released, virtual * microbatches), np.arange(virtual)[::-1]
    waiting = _passed(halfway, places, virtual, turn) - _passed(released, places, virtual, turn)
    waiting[ranks == 0, :, 0] = 0
    return waiting


def _passed(pairs: Counts, place: Counts, virtual: int, turn: int) -> Counts:
    """How many of the first ``pairs`` are of the stage whose turn comes at ``place``."""
    rounds, rest = np.divmod(pairs, virtual * turn)
    return np.asarray((rounds * turn)[..., None] + np.clip(rest[..., None] - place * turn, 0, turn))


def _zbv_instants(steps: Steps, rank: int) -> Counts:
    """[instants, 3, 2]: of the rank's first and second stage, just before each release."""
    on = (steps.stage != rank)[:, None] == (False, True)
    forwards, inputs, releases = ((steps.kind == KINDS.index(kind))[:, None] & on for kind in "FIW")
    released = releases.cumsum(axis=0)
    live, waiting = (begun.cumsum(axis=0) - released + releases for begun in (forwards, inputs))
    waiting[:, 0] *= rank > 0
    return np.asarray(np.stack([live, released > 0, waiting], axis=1)[releases.any(axis=1)])


def _maximal(found: Counts) -> Counts:
    """[instants, 2, stages]: those that no other has more than in everything, once each; not to be written to."""
    rows = found.reshape(len(found), -1)
    left = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    kept: list[list[int]] = []
    while len(left):
        kept.append(left[0].tolist())
        left = left[(left > left[0]).any(axis=1)]
    result = np.array(sorted(kept)).reshape(-1, *found.shape[1:])
    result.flags.writeable = False
    return result
