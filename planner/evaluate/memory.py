"""Peak memory of every pipeline rank.

Memory of a rank is the sum over its virtual stages of what persists, plus the worst live profile of the schedule times
what a micro-batch keeps (saved activations, what is sent on, the context's values), plus the largest transient of one
stage, the pipeline's receive buffers, the batch and the chip's reserve. Each term is an upper bound of what the emitted
program holds; the terms need not reach their most at the same moment. Two things are not counted: what the optimizer
makes while it steps (by then activations and working copies are gone), and under zero-bubble schedules the gradients
that wait for the weight part of a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.pipeline import live_profiles
from hardware_profiles import Cluster
from planner.evaluate.stage import StageLoad
from planner.ir.plan import (
    SPLIT_BACKWARD,
    Plan,
    ScheduleName,
    StageMemory,
)


def receive_buffer_bytes(
    schedule: ScheduleName, stage: int, stages: int, microbatches: int, incoming_bytes: int, outgoing_bytes: int
) -> int:
    """Buffers that a stage receives into and keeps: inputs, and gradients of its output.

    Under gpipe and 1f1b they are taken in turns (runtime/schedule.py): an input for each micro-batch in flight and one
    more, two gradients. Other schedules keep torch's one of each for every micro-batch
    (torch/distributed/pipelining/stage.py, ``_setup_forward_recv_info`` and ``_setup_backward_recv_info``).
    """
    if schedule not in ("gpipe", "1f1b"):
        return microbatches * (incoming_bytes + outgoing_bytes)
    in_flight = microbatches if schedule == "gpipe" else min(stages - stage, microbatches)
    return min(in_flight + 1, microbatches) * incoming_bytes + min(2, microbatches) * outgoing_bytes


def rank_memories(
    plan: Plan, loads: Sequence[StageLoad], crossing: Sequence[int], batch_bytes: int, cluster: Cluster
) -> tuple[StageMemory, ...]:
    """Peak memory of every pipeline rank. ``crossing[v]``: bytes of one micro-batch into virtual stage v; ``batch_bytes``:
    a rank's inputs of all micro-batches, which every stage loads."""
    mesh, microbatches = plan.mesh, plan.batch.accumulation
    profiles = live_profiles(plan.schedule.name, mesh.pipeline, plan.schedule.virtual, microbatches)
    result = []
    for rank in range(mesh.pipeline):
        stages = [stage.index for stage in plan.stages_of_rank(rank)]
        mine = [loads[index] for index in stages]
        live = max(sum(n * load.saved_bytes for n, load in zip(p, mine, strict=True)) for p in profiles[rank])
        receive = sum(
            receive_buffer_bytes(
                plan.schedule.name, i, len(loads), microbatches, _received(plan, crossing, i), _received(plan, crossing, i + 1)
            )
            for i in stages
        )
        # One stage runs at a time: its peak and its gathered blocks live together, those of others do not.
        worst = max(mine, key=lambda load: load.transient_bytes + load.gather_bytes)
        result.append(StageMemory(
            parameters=sum(load.parameters_bytes for load in mine),
            gradients=sum(load.gradients_bytes for load in mine),
            optimizer=sum(load.optimizer_bytes for load in mine),
            activations=live + worst.transient_bytes,
            buffers=receive + batch_bytes + worst.gather_bytes + sum(load.constant_bytes for load in mine),
            reserve=cluster.chip.reserve_bytes,
        ))
    return tuple(result)


def _received(plan: Plan, crossing: Sequence[int], cut: int) -> int:
    """Bytes over the cut before virtual stage ``cut``; nothing is sent inside a rank or at the ends."""
    if cut in (0, len(plan.stages)) or plan.rank_of_stage(cut - 1) == plan.rank_of_stage(cut):
        return 0
    return crossing[cut]


def cautions(plan: Plan) -> tuple[str, ...]:
    """What is known to be missing from a prediction."""
    if plan.schedule.name not in SPLIT_BACKWARD:
        return ()
    return (
        f"{plan.schedule.name}: gradients that wait for the weight part of a split backward pass are not counted; on CPUs "
        "measured peaks were 8 to 10% above the prediction (tests/costing/test_measured_memory.py)",
    )
