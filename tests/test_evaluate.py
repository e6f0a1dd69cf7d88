"""The evaluator against sums done by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hardware_profiles import DEFAULT_ENGINE
from planner.evaluate import evaluate, receive_buffer_bytes
from planner.evaluate.memory import _short_of_cache
from planner.ir.errors import InternalError
from planner.ir.plan import Batch, BlockDecision, Breakdown, Mesh, Plan, Schedule, StageMemory, StagePlan
from tests.search.made import make_cluster, make_costed, make_graph


def _plan(placements: object, stages: tuple[tuple[int, int], ...], schedule: str, data: int, virtual: int = 1) -> Plan:
    decision = BlockDecision(0 if data == 1 else 1, "none")
    pipeline = len(stages) // virtual
    return Plan(
        "made", "", "made", "", "fp32", 4, Mesh(pipeline=pipeline, data=data), Batch(4 * data, 1, 4),
        Schedule(schedule, virtual), data,  # type: ignore[arg-type]
        tuple(StagePlan(i, a, b, (decision,) * (b - a)) for i, (a, b) in enumerate(stages)),
        placements,  # type: ignore[arg-type]
    )


def test_without_a_pipeline_a_step_is_all_micro_batches_and_the_tail() -> None:
    costed = make_costed(make_graph("ab"), 1)
    prediction = evaluate(_plan(costed.placements[0], ((0, 2),), "1f1b", 1), costed, make_cluster(1, 10_000))
    pairs = [(costed.blocks[0][name]["none"], costed.states[0][name][0]) for name in "ab"]
    micro = sum(c.forward_s + c.backward_s + c.forward_comm_s + c.backward_comm_s for c, _ in pairs)
    once = sum(s.once_comm_s + s.optimizer_s for _, s in pairs)
    assert prediction.step_s == pytest.approx(4 * micro + once)
    persistent = sum(s.parameters_bytes + s.gradients_bytes + s.optimizer_bytes for _, s in pairs)
    transient = max(max(c.forward_peak_bytes, c.backward_peak_bytes) for c, _ in pairs)
    saved = sum(c.saved_bytes + c.buffer_bytes for c, _ in pairs)
    assert prediction.peak_memory_bytes == persistent + saved + transient


@pytest.mark.parametrize(
    ("schedule", "stages", "virtual"),
    [("1f1b", ((0, 2), (2, 4)), 1), ("gpipe", ((0, 1), (1, 4)), 1), ("interleaved-1f1b", ((0, 1), (1, 2), (2, 3), (3, 4)), 2),
     ("zbv", ((0, 1), (1, 2), (2, 3), (3, 4)), 2)],
)
def test_the_breakdown_sums_to_the_step(schedule: str, stages: tuple[tuple[int, int], ...], virtual: int) -> None:
    costed = make_costed(make_graph("eaab"), 3, zeros=(0, 1), crossing=8)
    prediction = evaluate(_plan(costed.placements[0], stages, schedule, 2, virtual), costed, make_cluster(4, 10_000))
    parts = [getattr(prediction.breakdown, name) for name in Breakdown.__dataclass_fields__]
    assert sum(parts) == pytest.approx(prediction.step_s)
    assert min(parts) >= 0.0


def test_the_first_rank_of_1f1b_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    costed = make_costed(make_graph("aa"), 5, crossing=8)
    prediction = evaluate(_plan(costed.placements[0], ((0, 1), (1, 2)), "1f1b", 1), costed, make_cluster(2, 10_000))
    cost = costed.blocks[0]["a"]["none"]
    transient = max(cost.forward_peak_bytes, cost.backward_peak_bytes)
    sent = costed.crossing_bytes[0][1]
    assert prediction.stages[0].memory.activations == 2 * (cost.saved_bytes + sent) + transient
    assert prediction.stages[1].memory.activations == cost.saved_bytes + transient
    assert prediction.stages[0].memory.buffers == cost.buffer_bytes + 3 * sent
    assert prediction.stages[1].memory.buffers == cost.buffer_bytes + 3 * sent


def test_an_engine_that_frees_what_it_has_sent_keeps_only_what_blocks_keep() -> None:
    costed = make_costed(make_graph("aa"), 5, crossing=8)
    plan = _plan(costed.placements[0], ((0, 1), (1, 2)), "1f1b", 1)
    kept, freed = (
        evaluate(plan, costed, make_cluster(2, 10_000), replace(DEFAULT_ENGINE, outputs_kept=share)) for share in (1.0, 0.0)
    )
    sent = costed.crossing_bytes[0][1]
    assert kept.stages[0].memory.activations - freed.stages[0].memory.activations == 2 * sent > 0
    assert kept.stages[1] == freed.stages[1]
    assert kept.step_s == freed.step_s


@pytest.mark.parametrize(("schedule", "virtual", "stage", "inputs", "gradients"), [
    ("1f1b", 1, 0, 6, 3), ("1f1b", 1, 2, 4, 3), ("1f1b", 1, 3, 3, 3), ("gpipe", 1, 2, 16, 2), ("interleaved-1f1b", 2, 1, 4, 2),
    ("interleaved-1f1b", 2, 2, 6, 2), ("interleaved-zero-bubble", 2, 1, 5, 3), ("zbv", 2, 3, 2, 3), ("zbv", 2, 1, 4, 0),
    ("zbv", 2, 2, 0, 4),
])
def test_receive_buffers(schedule: str, virtual: int, stage: int, inputs: int, gradients: int) -> None:
    """What the runtime takes in turns (tests/runtime counts it), under 1F1B one more that is sent each way, of an interleaved
    rank's second stage two gradients; none for what zbv's turn hands over."""
    assert receive_buffer_bytes(schedule, stage, 4, 16, 100, 0, virtual) == inputs * 100  # type: ignore[arg-type]
    assert receive_buffer_bytes(schedule, stage, 4, 16, 0, 100, virtual) == gradients * 100  # type: ignore[arg-type]


def test_batch_and_context_are_held_by_every_rank() -> None:
    plain = make_costed(make_graph("aa"), 5, crossing=8)
    given = replace(plain, context_bytes=7, batch_bytes=3)
    plan = _plan(plain.placements[0], ((0, 1), (1, 2)), "1f1b", 1)
    pairs = [evaluate(plan, costed, make_cluster(2, 10_000)).stages for costed in (plain, given)]
    for alive, before, after in zip((2, 1), *pairs, strict=True):
        assert after.memory.activations - before.memory.activations == alive * 7
        assert after.memory.buffers - before.memory.buffers == 4 * 3


def test_placements_that_were_not_costed_are_our_defect() -> None:
    costed = make_costed(make_graph("aa"), 5)
    plan = replace(_plan(costed.placements[0], ((0, 2),), "1f1b", 1), placements={})
    with pytest.raises(InternalError, match="not costed"):
        evaluate(plan, costed, make_cluster(1, 10_000))


def test_a_cache_that_will_be_wanting_is_told() -> None:
    """It is no reason for a plan not to fit."""
    gib = 2**30
    roomy, short, over = (
        StageMemory(total * gib, 0, 0, 0, 0, 0, cached) for total, cached in ((70, 10 * gib), (70, 15 * gib), (81, 0))
    )
    assert _short_of_cache([roomy, roomy], 80 * gib, 80 * gib) == []
    (warning,) = _short_of_cache([roomy, short], 80 * gib, 80 * gib)
    assert "rank 1" in warning and "15.0 GiB beside" in warning and "5.0 GiB more than there is" in warning
    assert short.total == 70 * gib
    (little,) = _short_of_cache([roomy], 80 * gib - 1, 80 * gib - 1)
    assert "0.1 GiB more than there is" in little
    assert _short_of_cache([roomy, over], 80 * gib, 80 * gib) == []  # That does not fit, and says so.


def test_the_headroom_that_a_warning_asks_for_ends_it() -> None:
    """A plan that keeps it has room for the cache, which head-room is there for."""
    gib = 2**30
    short = StageMemory(70 * gib, 0, 0, 0, 0, 0, 15 * gib - 1)
    (warning,) = _short_of_cache([short], 80 * gib, 80 * gib)
    asked = float(re.search(r"--headroom ([0-9.]+)GiB", warning)[1])  # type: ignore[index]
    limit_bytes = 80 * gib - round(asked * gib)
    assert short.total > limit_bytes  # Or it would be the plan again.
    kept = replace(short, parameters=limit_bytes)
    assert _short_of_cache([kept], limit_bytes, 80 * gib) == []
