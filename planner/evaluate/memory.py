"""Peak memory of every pipeline rank.

Memory of a rank is the sum over its virtual stages of what persists, plus what it holds at the worst instant of the schedule
(saved activations, what is sent on and the context's values of each micro-batch alive; gradients of stages whose backward
passes have begun), plus the largest transient of one stage, the pipeline's receive buffers, the batch and the chip's reserve.
Each term is an upper bound of what the emitted program holds; the terms need not reach their most at the same moment. Under
zero-bubble schedules a micro-batch keeps more while it waits for the weight part of its backward pass. Not counted is what the
optimizer makes while it steps (by then activations and working copies are gone). This is what a search compares plans by; a
plan that is shown has its memory replayed (:func:`replayed`), where nothing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from cost_models.live import BEGUN, LIVE, WAITING, Counts, instants
from cost_models.receives import receive_slots
from hardware_profiles import DEFAULT_ENGINE, Cluster, Engine
from planner.costing.engine_states import update_bytes
from planner.costing.kernels import as_run
from planner.evaluate.replay import Peaks, peaks
from planner.evaluate.stage import StageLoad
from planner.ir.graph import ModelGraph
from planner.ir.plan import (
    Plan,
    Prediction,
    ScheduleName,
    StageMemory,
)

GIB, MIB = 2**30, 2**20
EMITTED = "torch-eager"
"""The engine of emitted programs."""
ON_THEIR_WAY = 2
"""Gradients that an interleaved rank has sent and that may not have arrived, beyond one for each micro-batch that is gone."""


def receive_buffer_bytes(
    schedule: ScheduleName, stage: int, stages: int, microbatches: int, incoming_bytes: int, outgoing_bytes: int,
    virtual: int = 1,
) -> int:
    """Buffers that a stage receives into and keeps: inputs, and gradients of its output, each taken in turns
    (:func:`cost_models.receives.receive_slots`). ``virtual``: of ``stages``, those of one rank. 1F1B holds one activation and
    one gradient that it has sent besides (torch/distributed/pipelining/schedules.py, ``Schedule1F1B``: ``send_work``);
    interleaved 1F1B, of all stages of a rank, two gradients more than micro-batches have gone (:mod:`cost_models.sends`)."""
    inputs, gradients = receive_buffers(schedule, stages // virtual, virtual, microbatches)[stage]
    return inputs * incoming_bytes + gradients * outgoing_bytes


@lru_cache(maxsize=4096)
def receive_buffers(schedule: ScheduleName, pipeline: int, virtual: int, microbatches: int) -> tuple[tuple[int, int], ...]:
    """By virtual stage, how many :func:`receive_buffer_bytes` counts of inputs and of gradients."""
    sent = int(schedule == "1f1b" and microbatches > 1)
    ahead = [sent] * (pipeline * virtual)
    if schedule == "interleaved-1f1b":
        first = min(1, virtual - 1) * pipeline
        ahead[first : first + pipeline] = [ON_THEIR_WAY] * pipeline
    slots = receive_slots(schedule, pipeline, virtual, microbatches)
    return tuple((inputs + back, gradients + sent) for (inputs, gradients), back in zip(slots, ahead, strict=True))


def rank_memories(
    plan: Plan, loads: Sequence[StageLoad], crossing: Sequence[int], batch_bytes: int, cluster: Cluster,
    engine: Engine = DEFAULT_ENGINE,
) -> tuple[StageMemory, ...]:
    """Peak memory of every pipeline rank. ``crossing[v]``: bytes of one micro-batch into virtual stage v; ``batch_bytes``:
    a rank's inputs of all micro-batches, which every stage loads. An engine with buffers of its own has its gradients all step
    long and receives into the storages that the block keeps anyway: one each way is on its way."""
    mesh, microbatches = plan.mesh, plan.batch.accumulation
    found = instants(plan.schedule.name, mesh.pipeline, plan.schedule.virtual, microbatches)
    result = []
    for rank in range(mesh.pipeline):
        stages = [stage.index for stage in plan.stages_of_rank(rank)]
        mine = [loads[index] for index in stages]
        live, gradients = _at_worst(found[rank], mine, engine)
        name, virtual, count = (
            (plan.schedule.name, plan.schedule.virtual, microbatches) if engine.keeps == "operations" else ("1f1b", 1, 1)
        )
        receive = sum(
            receive_buffer_bytes(
                name, i, len(loads), count, _received(plan, crossing, i), _received(plan, crossing, i + 1), virtual
            )
            for i in stages
        )
        # One stage runs at a time: its peak and its gathered blocks live together; of others' only the last reduction's buffer.
        worst = max(mine, key=lambda load: load.transient_bytes + load.gather_bytes - load.lasting_bytes)
        lasting = sum(load.lasting_bytes for load in mine) - worst.lasting_bytes
        activations, gathered = live + worst.transient_bytes, worst.gather_bytes + lasting
        if engine.keeps == "compiled" and microbatches == len(mine) == 1:
            activations, gathered = max(0, worst.lone_bytes - gradients), 0
        held = StageMemory(
            parameters=sum(load.parameters_bytes for load in mine),
            gradients=gradients,
            optimizer=sum(load.optimizer_bytes for load in mine),
            activations=activations,
            buffers=receive + batch_bytes + gathered + sum(load.constant_bytes for load in mine),
            reserve=0,
        )
        zero = max(decision.zero for index in stages for decision in plan.stages[index].decisions)
        made = update_bytes(sum(load.gradients_bytes for load in mine), held.optimizer, zero, plan.precision, engine)
        result.append(replace(held, reserve=cluster.chip.reserve_bytes + made))
    return tuple(result)


def _at_worst(found: Counts, loads: Sequence[StageLoad], engine: Engine) -> tuple[int, int]:
    """Bytes of a rank's live micro-batches and of its gradients at that of the instants ``found`` when they are most."""
    live = found[:, LIVE] @ np.array([load.saved_bytes for load in loads])
    live = live + found[:, WAITING] @ np.array([load.waiting_bytes for load in loads])
    begun = found[:, BEGUN] if engine.keeps == "operations" else np.ones_like(found[:, BEGUN])
    gradients = begun @ np.array([load.gradients_bytes for load in loads])
    at = int((live + gradients).argmax())
    return int(live[at]), int(gradients[at])


def _received(plan: Plan, crossing: Sequence[int], cut: int) -> int:
    """Bytes over the cut before virtual stage ``cut``; nothing is sent inside a rank or at the ends."""
    if cut in (0, len(plan.stages)) or plan.rank_of_stage(cut - 1) == plan.rank_of_stage(cut):
        return 0
    return crossing[cut]


def replayed(prediction: Prediction, plan: Plan, graph: ModelGraph, cluster: Cluster) -> Prediction:
    """The prediction with memory as the emitted program's step takes it, event by event (:mod:`planner.evaluate.replay`),
    where the program is one that `emit` writes; the bounds of :func:`rank_memories` elsewhere."""
    if plan.engine != EMITTED or plan.mesh.context > 1 or plan.mesh.expert > 1:
        return prediction
    memories = tuple(_measured(peak, cluster) for peak in peaks(plan, as_run(graph, cluster.chip)))
    return replace(
        prediction, peak_memory_bytes=max(memory.total for memory in memories),
        warnings=(
            *prediction.warnings, *_beyond_sums(prediction, memories),
            *_short_of_cache(memories, prediction.memory_limit_bytes, cluster.chip.memory_bytes),
        ),
        stages=tuple(
            replace(stage, memory=memories[plan.rank_of_stage(stage.index)]) for stage in prediction.stages
        ),
    )


def _beyond_sums(prediction: Prediction, memories: Sequence[StageMemory]) -> list[str]:
    """A warning where a plan fits by its replay, and not by the sums that a search holds plans to."""
    limit_bytes, most = prediction.memory_limit_bytes, max(memory.total for memory in memories)
    if prediction.fits or most > limit_bytes:
        return []
    return [
        f"fits by its memory as replayed, {most / MIB:,.1f} MiB of {limit_bytes / MIB:,.1f}, not by the sums that the search "
        f"holds plans to, {prediction.peak_memory_bytes / MIB:,.1f}: a certificate is of plans whose sums fit"
    ]


def _short_of_cache(memories: Sequence[StageMemory], limit_bytes: int, device_bytes: int) -> list[str]:
    """A warning where a rank fits and its allocator's cache beside does not, for which head-room is there too. An H200 with too
    little for that spent a quarter of its steps so (docs/memory.md). ``limit_bytes``: of a plan; ``device_bytes``: what a
    device has."""
    rank, worst = max(enumerate(memories), key=lambda item: item[1].total + item[1].cached)
    wanting = worst.total + worst.cached - device_bytes
    if wanting <= 0 or worst.total > limit_bytes:
        return []
    return [
        f"pipeline rank {rank} fits, but torch's caching allocator would keep {worst.cached / GIB:.1f} GiB beside that, "
        f"{_tenths(wanting)} GiB more than there is: it gives memory back and asks for it again in every step, up to a "
        f"quarter of a step on an H200; --headroom {_tenths(worst.cached)}GiB asks for a plan that leaves room for so much"
    ]


def _tenths(size_bytes: int) -> str:
    """GiB, rounded up."""
    return f"{math.ceil(10 * size_bytes / GIB) / 10:.1f}"


def _measured(peak: Peaks, cluster: Cluster) -> StageMemory:
    """A rank's peak, and what no rehearsal sees of it.

    GPipe waits for its sends at the end of a phase, 1F1B for one of them later than it could (torch 2.13,
    torch/distributed/pipelining/schedules.py), and until then the work keeps the tensor (gloo: ``SendWork``; NCCL:
    ``TensorShelf`` of ProcessGroupNCCL.hpp). The fake process group of a rehearsal keeps none.
    """
    at = peak.at
    return StageMemory(
        at["parameters"], at["gradients"], at["optimizer"], at["activations"], at["buffers"],
        cluster.chip.reserve_bytes + peak.held_bytes, 0 if cluster.chip.is_host else peak.cached_bytes,
    )
