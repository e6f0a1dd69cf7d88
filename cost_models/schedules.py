"""Pipeline schedules as the order of actions on every rank, exactly as torch 2.13's schedules execute them.

Source of every order: ``torch/distributed/pipelining/schedules.py`` (classes named at each function). An input
gradient and its weight gradient stay two actions even back to back, as in torch's runtime, so the gradient is sent
between them.

A virtual stage k lives on pipeline rank k mod pipeline; under zbv the stages go down the ranks and come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "I", "W", "B")
Orders = tuple[tuple["Action", ...], ...]

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv")


@dataclass(frozen=True, slots=True)
class Action:
    """Forward (F), full backward (B), input gradient (I) or weight gradient (W) of a micro-batch on a virtual stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """Torch's text: ``2F0`` is the forward of micro-batch 0 on stage 2."""
        return f"{self.stage}{self.kind}{self.microbatch}"


def rank_of_stage(name: str, pipeline: int, stage: int) -> int:
    """Pipeline rank of a virtual stage: round robin, or a V for zbv."""
    if name == "zbv" and stage >= pipeline:
        return 2 * pipeline - 1 - stage
    return stage % pipeline


def stages_of_rank(name: str, pipeline: int, virtual: int, rank: int) -> tuple[int, ...]:
    """Virtual stages of a pipeline rank, first to last in the model."""
    return tuple(stage for stage in range(pipeline * virtual) if rank_of_stage(name, pipeline, stage) == rank)


def turn_length(pipeline: int, microbatches: int) -> int:
    """Micro-batches after which an interleaved rank turns to another of its stages: those of a round (Narayanan 2021, section
    2.2: as many as ranks; torch/distributed/pipelining/schedules.py: a round takes more where they are no multiple)."""
    return microbatches // max(1, microbatches // pipeline)


def legal(name: str, pipeline: int, virtual: int, microbatches: int) -> str | None:
    """Why torch cannot run this schedule, in the user's words; None if it can."""
    if name not in SCHEDULES:
        return f"schedule {name} is unknown; use one of {', '.join(SCHEDULES)}"
    if min(pipeline, virtual, microbatches) < 1:
        return "pipeline, virtual and micro-batches are at least 1"
    if name in ("gpipe", "1f1b"):
        if virtual != 1:
            return f"{name} has one stage a rank, not virtual={virtual}"
        if name == "1f1b" and microbatches < pipeline:
            return f"1f1b needs at least as many micro-batches as stages: {microbatches} < {pipeline}"
        return None
    if pipeline < 2:
        return f"{name} needs at least 2 pipeline ranks"
    if name == "zbv":
        return None if virtual == 2 else f"zbv has exactly two stages a rank, not virtual={virtual}"
    if name == "interleaved-1f1b" and virtual < 2:
        return "interleaved-1f1b needs at least two stages a rank"
    rounds = max(1, microbatches // pipeline)
    if microbatches % rounds:
        return f"{name} needs micro-batches in {rounds} equal rounds: {microbatches} is no multiple of {rounds}"
    return None


def actions(name: str, pipeline: int, virtual: int, microbatches: int) -> Orders:
    """The actions of every pipeline rank, in order. Illegal combinations raise ValueError with :func:`legal`'s
    reason."""
    reason = legal(name, pipeline, virtual, microbatches)
    if reason is not None:
        raise ValueError(reason)
    return _actions(name, pipeline, virtual, microbatches)


@lru_cache(maxsize=256)
def _actions(name: str, pipeline: int, virtual: int, microbatches: int) -> Orders:
    listed = (
        zip(steps.kind.tolist(), steps.stage.tolist(), steps.microbatch.tolist(), strict=True)
        for steps in all_steps(name, pipeline, virtual, microbatches)
    )
    return tuple(tuple(Action(KINDS[kind], stage, micro) for kind, stage, micro in rank) for rank in listed)


@dataclass(frozen=True)
class Steps:
    """The actions of a rank in order, [actions]: ``kind``, an index into :data:`KINDS`, ``stage`` and ``microbatch``."""

    kind: NDArray[np.int64]
    stage: NDArray[np.int64]
    microbatch: NDArray[np.int64]

    @staticmethod
    def of(kind: NDArray[np.int64], stage: NDArray[np.int64]) -> Steps:
        """Each (kind, stage) takes the micro-batches in order."""
        key = kind * (stage.max(initial=0) + 1) + stage
        order = np.argsort(key, kind="stable")
        starts = np.flatnonzero(np.append(True, np.diff(key[order]) != 0))
        number = np.empty(len(key), dtype=np.int64)
        number[order] = np.arange(len(key)) - np.repeat(starts, np.diff(np.append(starts, len(key))))
        return Steps(kind, stage, number)

    @staticmethod
    def listed(steps: Sequence[tuple[Kind, int]]) -> Steps:
        """Of kinds and stages one by one."""
        kinds, stages = zip(*steps, strict=True)
        return Steps.of(np.array([KINDS.index(kind) for kind in kinds]), np.array(stages))


@lru_cache(maxsize=256)
def all_steps(name: str, pipeline: int, virtual: int, microbatches: int) -> tuple[Steps, ...]:
    """What :func:`actions` says of a legal schedule, rank by rank."""
    ranks = range(pipeline)
    if name == "gpipe":
        return tuple(Steps.listed(_gpipe(rank, microbatches)) for rank in ranks)
    if name == "1f1b":
        return tuple(Steps.listed(_one_forward_one_backward(rank, pipeline, microbatches)) for rank in ranks)
    if name == "zbv":
        return tuple(zbv_steps(rank, pipeline, microbatches) for rank in ranks)
    split = name == "interleaved-zero-bubble"
    return tuple(_interleaved(rank, pipeline, virtual, microbatches, split) for rank in ranks)


def _gpipe(rank: int, microbatches: int) -> list[tuple[Kind, int]]:
    """Fill, then drain (Huang 2019); ``ScheduleGPipe``, which drains oldest first."""
    steps: list[tuple[Kind, int]] = [("F", rank)] * microbatches
    steps += [("B", rank)] * microbatches
    return steps


def _one_forward_one_backward(rank: int, pipeline: int, microbatches: int) -> list[tuple[Kind, int]]:
    """PipeDream-Flush (Narayanan 2019, 2021); ``Schedule1F1B``: pipeline - rank forwards, then backward and forward."""
    warmup = min(microbatches, pipeline - rank)
    steps: list[tuple[Kind, int]] = [("F", rank)] * warmup
    steps += [("B", rank), ("F", rank)] * (microbatches - warmup)
    steps += [("B", rank)] * warmup
    return steps


def _interleaved(rank: int, pipeline: int, virtual: int, microbatches: int, split: bool) -> Steps:
    """Narayanan 2021, section 2.2 (``ScheduleInterleaved1F1B``); split into input and weight gradients it is ZB1P of
    Qi 2023 (``ScheduleInterleavedZeroBubble``): a weight gradient follows ``rank`` backwards later."""
    per_round = turn_length(pipeline, microbatches)
    total = virtual * microbatches
    warmup = min((virtual - 1) * per_round + (1 if split else 2) * (pipeline - 1 - rank), total)
    turn = np.arange(total)
    forward = turn // per_round % virtual * pipeline + rank
    backward = (virtual - 1 - turn // per_round % virtual) * pipeline + rank
    # Side by side what a rank does in a turn; negative: nothing.
    turns = np.full((total + warmup + (rank if split else 0), 3), -1)
    turns[:total, 0] = forward
    turns[warmup : total + warmup, 1] = backward
    if split:
        turns[warmup + rank :, 2] = backward
    kinds = np.array([KINDS.index("F"), KINDS.index("I" if split else "B"), KINDS.index("W")])
    done = turns >= 0
    return Steps.of(np.broadcast_to(kinds, turns.shape)[done], turns[done])


def zbv_steps(rank: int, pipeline: int, microbatches: int) -> Steps:
    """What a rank does under zbv: Qi 2023, section 6 (``ScheduleZBVZeroBubble``)."""
    codes = np.frombuffer(_zbv_text(rank, pipeline, max(2 * pipeline - 1, microbatches)).encode(), np.uint8)
    up = codes < ord("a")
    kinds = np.zeros(128, dtype=np.int64)
    kinds[[ord(letter) for kind in "FIW" for letter in (kind, kind.lower())]] = np.repeat([KINDS.index(k) for k in "FIW"], 2)
    steps = Steps.of(kinds[codes], np.where(up, 2 * pipeline - 1 - rank, rank))
    there = steps.microbatch < microbatches
    return Steps(steps.kind[there], steps.stage[there], steps.microbatch[there])


def _zbv_text(rank: int, pipeline: int, drawn: int) -> str:
    """For enough micro-batches to fill the V, a letter an action: small on the way down, large on the way up."""
    went_down = 2 * pipeline - rank - 1
    steady = max(0, drawn - went_down)
    text = "f" * (2 * (pipeline - rank) - 1) + "Ff" * rank + "FIW" * (pipeline - rank)
    text += "fiwFIW" * steady + "iwFIW" * (max(went_down, drawn) - pipeline - steady)
    text += "iI" * rank + "iw" * (pipeline - rank)
    return text + "".join(last * (text.count(before) - text.count(last)) for before, last in ("IW", "iw"))
