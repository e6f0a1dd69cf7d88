"""Receive buffers in turns: as many as torch's order of actions needs, and as the planner counts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as torchs

from cost_models.receives import receive_slots
from cost_models.schedules import actions, legal, rank_of_stage, stages_of_rank
from runtime.receives import LAST, slots_in_order
from runtime.stage import _apart
from tests.runtime.cases import gradient_error, receive_buffers
from tests.runtime.group import ProcessPool
from tests.runtime.toy_program import Toy

KINDS = {
    "F": torchs.FORWARD, "B": torchs.FULL_BACKWARD, "I": torchs.BACKWARD_INPUT, "W": torchs.BACKWARD_WEIGHT,
}
SHAPES = [
    (name, pipeline, virtual, microbatches)
    for name in ("interleaved-1f1b", "interleaved-zero-bubble", "zbv")
    for pipeline in (2, 3, 4, 6, 8)
    for virtual in (1, 2, 3, 5)
    for microbatches in sorted({1, *(pipeline * halves // 2 for halves in (1, 2, 3, 4, 8)), pipeline + 1, 2 * pipeline + 2})
    if legal(name, pipeline, virtual, microbatches) is None
]


@cache
def ordered(name: str, pipeline: int, virtual: int, microbatches: int) -> Mapping[int, list[Any]]:
    """Every rank's actions with sends and receives, by torch's own functions."""
    rows = {
        rank: torchs._add_reduce_grad(torchs._add_unshard_reshard(
            [torchs._Action(action.stage, KINDS[action.kind], action.microbatch) for action in row]
        ), microbatches)
        for rank, row in enumerate(actions(name, pipeline, virtual, microbatches))
    }
    return torchs._add_send_recv(
        rows, stage_to_rank=lambda stage: rank_of_stage(name, pipeline, stage), num_stages=pipeline * virtual
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zero-bubble", "zbv"])
def test_the_planner_counts_what_a_program_takes(name: str) -> None:
    """And no order needs more than the rule gives, so the program has as many as the plan says."""
    for _, pipeline, virtual, microbatches in (shape for shape in SHAPES if shape[0] == name):
        order = ordered(name, pipeline, virtual, microbatches)
        planned = receive_slots(name, pipeline, virtual, microbatches)
        for rank, row in order.items():
            own = stages_of_rank(name, pipeline, virtual, rank)
            for stage in own:
                taken, counted = list(slots_in_order(row, name, pipeline, rank, stage, microbatches)), list(planned[stage])
                assert (taken[0] == 0) == (stage - 1 in own) and (taken[1] == 0) == (stage + 1 in own)
                if stage == 0:
                    taken[0] = counted[0]  # neither receives
                if stage + 1 == pipeline * virtual:
                    taken[1] = counted[1]
                assert taken == counted, (pipeline, virtual, microbatches, stage)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_buffer_is_written_while_it_is_in_use(shape: tuple[str, int, int, int]) -> None:
    name, pipeline, _, microbatches = shape
    for rank, row in ordered(*shape).items():
        for stage in {action.stage_index for action in row}:
            slots = slots_in_order(row, name, pipeline, rank, stage, microbatches)
            for receives, count in zip((torchs.RECV_F, torchs.RECV_B), slots, strict=True):
                mine = [action for action in row if action.stage_index == stage]
                assert count or not any(action.computation_type == receives for action in mine)
                used: dict[int, int] = {}
                for action in mine if count else ():
                    place = (action.microbatch_index or 0) % count
                    if action.computation_type == receives:
                        assert place not in used, f"stage {stage}: {action} writes over micro-batch {used[place]}"
                        used[place] = action.microbatch_index
                    elif action.computation_type in LAST:
                        used.pop(place, None)


def test_a_buffer_waits_for_the_next_stage_of_its_rank() -> None:
    """It may have been handed what this stage received: where it is done later, no buffer is taken twice."""
    (row,) = (row for rank, row in ordered("zbv", 2, 2, 6).items() if rank == 1)
    few, _ = slots_in_order(row, "zbv", 2, 1, 1, 6)
    assert few < 6
    at = {(action.stage_index, action.computation_type, action.microbatch_index): at for at, action in enumerate(row)}
    first, second = at[2, torchs.BACKWARD_WEIGHT, 0], at[1, torchs.BACKWARD_WEIGHT, 0]
    row = list(row)
    row[first], row[second] = row[second], row[first]
    assert slots_in_order(row, "zbv", 2, 1, 1, 6)[0] == 6


@pytest.mark.slow
@pytest.mark.parametrize("toy", [
    Toy(pipeline=2, microbatches=16, schedule="interleaved-1f1b", virtual=2),
    Toy(pipeline=4, microbatches=16, batch=32, schedule="interleaved-zero-bubble", zero=(2, 0, 1, 1, 2, 2)),
    Toy(pipeline=2, data=2, microbatches=8, schedule="zbv", zero=(2, 0, 1, 1, 2, 2)),
], ids=lambda toy: toy.schedule)
def test_gradients_are_exact_with_few_buffers(pool: ProcessPool, toy: Toy) -> None:
    ranks = toy.pipeline * toy.data
    virtual = 2 if toy.schedule == "zbv" else toy.virtual
    planned = receive_slots(toy.schedule, toy.pipeline, virtual, toy.microbatches)
    for rank, kept in enumerate(pool.run(ranks, receive_buffers, toy)):
        own = stages_of_rank(toy.schedule, toy.pipeline, virtual, rank // toy.data)
        last = toy.pipeline * virtual - 1
        assert kept == (
            sum(planned[stage][0] for stage in own if stage > 0), sum(planned[stage][1] for stage in own if stage < last)
        )
    for report in pool.run(ranks, gradient_error, toy):
        assert max(report) < 1e-12


def test_a_gradient_that_is_sent_on_is_not_where_it_was_received() -> None:
    received = torch.ones(4)
    passed, made = _apart((received[:2], None, torch.zeros(3)), (received, None))[::2]
    assert passed is not None and torch.equal(passed, received[:2])
    assert passed.untyped_storage().data_ptr() != received.untyped_storage().data_ptr()
    assert torch.equal(made, torch.zeros(3))
