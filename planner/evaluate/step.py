"""The step of a plan.

A step is the simulated pipeline, then what every rank does once:
``step_s = timeline + max over ranks of (once-per-step data traffic + optimizer) + sum of tied gradients``.

Data traffic of ZeRO 0 and 1 runs after the last backward pass and overlaps with nothing; ZeRO 2 and 3 pay theirs in every
micro-batch. So the step time stays a maximum of sums that are linear in the blocks' times, which the solver's cuts need.
"""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.pipeline import Timeline, simulate
from hardware_profiles import Cluster
from planner.evaluate.memory import cautions, rank_memories
from planner.evaluate.stage import StageLoad, stage_load
from planner.evaluate.tied import tied_gradient_seconds
from planner.evaluate.traffic import send_seconds, sums_seconds
from planner.ir.costed import CostedGraph
from planner.ir.errors import InternalError
from planner.ir.graph import ModelGraph
from planner.ir.plan import (
    Breakdown,
    Plan,
    Precision,
    Prediction,
    StagePrediction,
)

DTYPES: dict[Precision, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def option_of(plan: Plan, costed: CostedGraph) -> int:
    """Index of the costed option whose placements the plan follows."""
    for index, placements in enumerate(costed.placements):
        if dict(placements) == dict(plan.placements):
            return index
    raise InternalError("evaluate", "the plan's placements were not costed", "cost the graph with them as an option")


def evaluate(plan: Plan, costed: CostedGraph, cluster: Cluster) -> Prediction:
    """Predict a step of ``plan``. ``costed`` holds its placements, mesh degrees, micro-batch and precision."""
    option = option_of(plan, costed)
    loads = tuple(stage_load(stage, costed, option) for stage in plan.stages)
    crossing = tuple(costed.crossing_bytes[option].get(stage.first, 0) if stage.first else 0 for stage in plan.stages)
    sends = tuple(send_seconds(cluster, plan.mesh, size) for size in crossing)
    mesh, schedule, microbatches = plan.mesh, plan.schedule, plan.batch.accumulation
    line = simulate(
        schedule.name, mesh.pipeline, schedule.virtual, microbatches, tuple(load.times for load in loads), sends
    )
    ranks = [[stage.index for stage in plan.stages_of_rank(rank)] for rank in range(mesh.pipeline)]
    tails = [sum(loads[index].once_s + loads[index].optimizer_s for index in stages) for stages in ranks]
    tied_s = tied_gradient_seconds(plan, costed.graph, cluster) + sums_seconds(cluster, mesh)
    step_s = line.total_s + max(tails) + tied_s
    memory = rank_memories(plan, loads, crossing, costed.batch_bytes * microbatches, cluster)
    tokens = plan.batch.total * plan.sequence
    step_flops = plan.batch.total / plan.batch.micro * _model_flops(costed, option)
    rate = step_flops / step_s / mesh.devices
    return Prediction(
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        model_flops_per_device_s=rate,
        mfu=rate / cluster.chip.peak(DTYPES[plan.precision]),
        peak_memory_bytes=max(item.total for item in memory),
        memory_limit_bytes=cluster.chip.memory_bytes,
        breakdown=_breakdown(plan, loads, ranks, line, sends, tails, tied_s, step_s),
        stages=tuple(
            StagePrediction(
                stage.index, load.times.forward_s, load.times.input_gradient_s + load.times.weight_gradient_s,
                memory[plan.rank_of_stage(stage.index)],
            )
            for stage, load in zip(plan.stages, loads, strict=True)
        ),
        warnings=(*costed.warnings, *cautions(plan)),
    )


def evaluate_plan(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Prediction:
    """Cost a plan's own placements and evaluate it."""
    from planner.costing import cost_graph

    costed = cost_graph(
        graph, cluster, mesh=plan.mesh, microbatch=plan.batch.micro, precision=plan.precision,
        zero_group=plan.zero_group, options=(plan.placements,), accumulation=plan.batch.accumulation,
    )
    return evaluate(plan, costed, cluster)


def _model_flops(costed: CostedGraph, option: int) -> float:
    """Forward and backward of one micro-batch through the whole model, all tensor ranks together."""
    costs = costed.blocks[option]
    return sum(next(iter(costs[block.body].values())).flops for block in costed.graph.blocks)


def _breakdown(
    plan: Plan, loads: Sequence[StageLoad], ranks: Sequence[Sequence[int]], line: Timeline, sends: Sequence[float],
    tails: Sequence[float], tied_s: float, step_s: float,
) -> Breakdown:
    """Where the busiest rank's step goes; what is left is waiting: transfers on the critical path, then bubble."""
    busiest = max(range(len(ranks)), key=lambda rank: line.busy_s[rank] + tails[rank])
    mine = [loads[index] for index in ranks[busiest]]
    count = plan.batch.accumulation
    compute = count * sum(load.compute_s for load in mine)
    recompute = count * sum(load.recompute_s for load in mine)
    tensor = count * sum(load.tensor_comm_s for load in mine)
    data = count * sum(load.data_comm_s for load in mine) + sum(load.once_s for load in mine) + tied_s
    optimizer = sum(load.optimizer_s for load in mine)
    waiting = max(0.0, step_s - compute - recompute - tensor - data - optimizer)
    transfers = sum(n * s for n, s in zip(line.critical_path.transfers, sends, strict=True))
    pipeline = min(waiting, transfers)
    return Breakdown(compute, recompute, tensor, 0.0, 0.0, pipeline, waiting - pipeline, data, optimizer)
