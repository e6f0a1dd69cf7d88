"""Pipeline schedules as the order of actions on every rank, exactly as torch 2.13's schedules execute them.

Source of every order: ``torch/distributed/pipelining/schedules.py`` (classes named at each function). An input
gradient and its weight gradient stay two actions even back to back, as in torch's runtime, so the gradient is sent
between them.

A virtual stage k lives on pipeline rank k mod pipeline; under zbv the stages go down the ranks and come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["F", "B", "I", "W"]
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
    ranks = range(pipeline)
    if name == "gpipe":
        return tuple(_gpipe(rank, microbatches) for rank in ranks)
    if name == "1f1b":
        return tuple(_one_forward_one_backward(rank, pipeline, microbatches) for rank in ranks)
    if name == "zbv":
        return tuple(_zbv(rank, pipeline, microbatches) for rank in ranks)
    split = name == "interleaved-zero-bubble"
    return tuple(_interleaved(rank, pipeline, virtual, microbatches, split) for rank in ranks)


def _gpipe(rank: int, microbatches: int) -> tuple[Action, ...]:
    """Fill, then drain (Huang 2019); ``ScheduleGPipe``, which drains oldest first."""
    forwards = tuple(Action("F", rank, index) for index in range(microbatches))
    return forwards + tuple(Action("B", rank, index) for index in range(microbatches))


def _one_forward_one_backward(rank: int, pipeline: int, microbatches: int) -> tuple[Action, ...]:
    """PipeDream-Flush (Narayanan 2019, 2021); ``Schedule1F1B``: pipeline - rank forwards, then backward and forward."""
    warmup = min(microbatches, pipeline - rank)
    order = [Action("F", rank, index) for index in range(warmup)]
    for index in range(microbatches):
        order.append(Action("B", rank, index))
        if warmup + index < microbatches:
            order.append(Action("F", rank, warmup + index))
    return tuple(order)


def _interleaved(rank: int, pipeline: int, virtual: int, microbatches: int, split: bool) -> tuple[Action, ...]:
    """Narayanan 2021, section 2.2 (``ScheduleInterleaved1F1B``); split into input and weight gradients it is ZB1P of
    Qi 2023 (``ScheduleInterleavedZeroBubble``): a weight gradient follows ``rank`` backwards later."""
    per_round = microbatches // max(1, microbatches // pipeline)
    total = virtual * microbatches
    warmup = min((virtual - 1) * per_round + (1 if split else 2) * (pipeline - 1 - rank), total)
    count = _Counter()
    order: list[Action] = []
    pending: list[int] = []
    for step in range(total + warmup):
        if step < total:
            stage = step // per_round % virtual * pipeline + rank
            order.append(count.take("F", stage))
        if step < warmup:
            continue
        stage = (virtual - 1 - (step - warmup) // per_round % virtual) * pipeline + rank
        order.append(count.take("I" if split else "B", stage))
        pending.append(stage)
        if split and step - warmup >= rank:
            order.append(count.take("W", pending.pop(0)))
    if split:
        order.extend(count.take("W", stage) for stage in pending)
    return tuple(order)


class _Counter:
    """Numbers the micro-batches of each (kind, stage) as they are taken."""

    def __init__(self) -> None:
        self._next: dict[tuple[Kind, int], int] = {}

    def take(self, kind: Kind, stage: int) -> Action:
        index = self._next.get((kind, stage), 0)
        self._next[kind, stage] = index + 1
        return Action(kind, stage, index)


def _zbv(rank: int, pipeline: int, microbatches: int) -> tuple[Action, ...]:
    """Qi 2023, section 6 (``ScheduleZBVZeroBubble``)."""
    count = _Counter()
    taken = (count.take(*step) for step in _zbv_steps(rank, pipeline, max(2 * pipeline - 1, microbatches)))
    return tuple(action for action in taken if action.microbatch < microbatches)


def zbv_steps(rank: int, pipeline: int, microbatches: int) -> list[tuple[Kind, int]]:
    """What a rank does under zbv, on which virtual stage. Micro-batches come in order."""
    if microbatches < 2 * pipeline - 1:
        return [(action.kind, action.stage) for action in _zbv(rank, pipeline, microbatches)]
    return _zbv_steps(rank, pipeline, microbatches)


def _zbv_steps(rank: int, pipeline: int, drawn: int) -> list[tuple[Kind, int]]:
    """For enough micro-batches to fill the V; those that do not exist are cut."""
    down, up = rank, 2 * pipeline - 1 - rank
    steps: list[tuple[Kind, int]] = [("F", down)] * (2 * (pipeline - rank) - 1)
    steps += [("F", up), ("F", down)] * rank
    steps += [("F", up), ("I", up), ("W", up)] * (pipeline - rank)
    went_down, went_up = 2 * pipeline - rank - 1, pipeline
    while went_up < went_down or went_down < drawn:
        if went_down < drawn:
            steps.append(("F", down))
            went_down += 1
        steps += (("I", down), ("W", down), ("F", up), ("I", up), ("W", up))
        went_up += 1
    steps += [("I", down), ("I", up)] * rank
    steps += [("I", down), ("W", down)] * (pipeline - rank)
    for stage in (up, down):
        steps += [("W", stage)] * (steps.count(("I", stage)) - steps.count(("W", stage)))
    return steps
