"""How many receive buffers a pipeline stage takes in turns; torch keeps one for every micro-batch of a step.

A micro-batch has its buffer from the moment that its receive is posted until its last pass on the stage is over (the backward
pass, or the weight part of one that is split): until then autograd may keep what was received, or a view of it. torch's
schedules with several stages a rank work through one list of actions, receives among them, so the list says how many
micro-batches have a buffer at once, and in which order. Nothing else reads a buffer by then: what a stage passes on unchanged
has arrived before its gradient comes back, and gradients that are sent on never share its memory
(:class:`runtime.stage.ZeroStage`). Two stages of the same rank hand values to each other and need no buffers for them; the one
that is handed an activation has to be done with the micro-batch before the other, in whose buffer it may lie.

What a stage gets is a rule of a few numbers, so that a plan can say it too; it is raised where the list needs more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.pipelining.schedules import (
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
)

LAST = (FULL_BACKWARD, BACKWARD_WEIGHT)


def in_flight(name: str, stage: int, stages: int, microbatches: int) -> int:
    """Micro-batches whose forward a stage has done and whose backward not, at most, under gpipe or 1f1b."""
    return microbatches if name == "gpipe" else min(stages - stage, microbatches)


def slots_of_single(name: str, stage: int, stages: int, microbatches: int) -> tuple[int, int]:
    """Buffers for activations and for gradients of a rank's only stage, under gpipe or 1f1b: an activation for each
    micro-batch in flight and one more, two gradients."""
    return in_flight(name, stage, stages, microbatches) + 1, 2


def slots_in_order(order: Sequence[Any], name: str, pipeline: int, rank: int, stage: int, microbatches: int) -> tuple[int, int]:
    """Buffers for activations and for gradients of a stage under a schedule with several stages a rank.

    ``order``: torch's actions of the pipeline ``rank``, with receives. An activation for each micro-batch in flight and one
    more; two gradients, and where backward passes are split one for each rank before this (their weight parts wait for so many
    input gradients), under zbv one more. Under the interleaved schedules rounds come early where they go from the last rank to
    the first, or back: two rounds of activations on the first and one of gradients on the last, at least. None of what stages
    of this rank hand over.
    """
    turn = microbatches // max(1, microbatches // pipeline)
    own = {action.stage_index for action in order}
    activations = _most([action for action in order if action.stage_index == stage], FORWARD) + 1
    gradients = 2 + (0 if name == "interleaved-1f1b" else rank) + (name == "zbv")
    if name != "zbv":
        activations = max(activations, 2 * turn) if rank == 0 else activations
        gradients = max(gradients, turn) if rank == pipeline - 1 else gradients
    if not _done_before(order, stage + 1, stage):
        activations = microbatches
    return (
        0 if stage - 1 in own else _at_least(order, stage, RECV_F, min(activations, microbatches), microbatches),
        0 if stage + 1 in own else _at_least(order, stage, RECV_B, min(gradients, microbatches), microbatches),
    )


def _done_before(order: Sequence[Any], first: int, second: int) -> bool:
    """Whether the ``first`` stage is done with each micro-batch before the ``second``, where both are of this rank."""
    done = [
        {action.microbatch_index: at for at, action in enumerate(order)
         if action.stage_index == stage and action.computation_type in LAST}
        for stage in (first, second)
    ]
    return not all(done) or all(at < done[1][microbatch] for microbatch, at in done[0].items())


def _at_least(order: Sequence[Any], stage: int, begins: Any, slots: int, microbatches: int) -> int:
    """``slots``, or as many as the order has in use at once; one for each micro-batch where they do not go round in turns, or
    where nothing is received. ``begins``: the kind of action with which a buffer is in use."""
    mine = [action for action in order if action.stage_index == stage]
    begun = [action.microbatch_index for action in mine if action.computation_type == begins]
    ended = [action.microbatch_index for action in mine if action.computation_type in LAST]
    if not begun or begun != sorted(begun) or ended != sorted(ended):
        return microbatches
    return max(slots, _most(mine, begins))


def _most(mine: Sequence[Any], begins: Any) -> int:
    """Of a stage's actions: most micro-batches at once between the action that begins and their last pass."""
    now = most = 0
    for action in mine:
        now += action.computation_type == begins
        most = max(most, now)
        now -= action.computation_type in LAST
    return most
