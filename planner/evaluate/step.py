"""The step of a plan.

A step is the simulated pipeline, then what every rank does once:
``step_s = timeline + max over ranks of (once-per-step data traffic + optimizer) + sum of tied gradients``.

Data traffic of ZeRO 0 and 1 runs with or after the last backward pass; ZeRO 2 and 3 pay theirs in every micro-batch. How much
of either hides behind compute is the engine's (cost_models/overlap.py): a maximum of two forms that are linear in the blocks'
times. So the step time stays a maximum of linear sums, which the solver's cuts need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cost_models.overlap import Overlap
from cost_models.pipeline import Timeline, simulate
from hardware_profiles import Cluster, Engine
from hardware_profiles import engine as engine_called
from planner.evaluate.memory import rank_memories, replayed
from planner.evaluate.stage import StageLoad, stage_load
from planner.evaluate.tied import tied_gradient_seconds
from planner.evaluate.traffic import blocked_times, send_seconds, sums_seconds
from planner.ir.costed import CostedGraph
from planner.ir.errors import InternalError
from planner.ir.graph import ModelGraph
from planner.ir.plan import (
    DTYPES,
    SPLIT_BACKWARD,
    Breakdown,
    Plan,
    Prediction,
    StagePrediction,
)

if TYPE_CHECKING:
    from planner.costing import GraphWork


def option_of(plan: Plan, costed: CostedGraph) -> int:
    """Index of the costed option whose placements the plan follows."""
    for index, placements in enumerate(costed.placements):
        if dict(placements) == dict(plan.placements):
            return index
    raise InternalError("evaluate", "the plan's placements were not costed", "cost the graph with them as an option")


def evaluate(plan: Plan, costed: CostedGraph, cluster: Cluster, engine: Engine | None = None) -> Prediction:
    """Predict a step of ``plan``. ``costed`` holds its placements, mesh degrees, micro-batch and precision; ``engine``: by
    default the one that the plan names."""
    option = option_of(plan, costed)
    engine = engine_called(plan.engine) if engine is None else engine
    split = plan.schedule.name in SPLIT_BACKWARD
    loads = tuple(stage_load(stage, costed, option, engine, split=split) for stage in plan.stages)
    crossing = tuple(costed.crossing_bytes[option].get(stage.first, 0) if stage.first else 0 for stage in plan.stages)
    taken = tuple(
        engine.sends_exposed * send_seconds(cluster, plan.mesh, size, _whole_bytes(plan, costed, stage.first, engine))
        for stage, size in zip(plan.stages, crossing, strict=True)
    )
    sends = tuple((1 - engine.sends_blocking) * seconds for seconds in taken)
    mesh, schedule, microbatches = plan.mesh, plan.schedule, plan.batch.accumulation
    times = blocked_times(plan, tuple(load.times for load in loads), tuple(engine.sends_blocking * s for s in taken))
    line = simulate(schedule.name, mesh.pipeline, schedule.virtual, microbatches, times, sends)
    ranks = [[stage.index for stage in plan.stages_of_rank(rank)] for rank in range(mesh.pipeline)]
    passes = last_passes(mesh.pipeline, schedule.virtual, microbatches)
    tails = [_tail_seconds([loads[index] for index in stages], engine, passes) for stages in ranks]
    tied_s = tied_gradient_seconds(plan, costed.graph, cluster) + sums_seconds(cluster, mesh) + engine.step_s
    step_s = line.total_s + max(tails) + tied_s
    memory = rank_memories(plan, loads, crossing, costed.batch_bytes * microbatches, cluster, engine)
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
        warnings=(*costed.warnings, *_unseen_chip(cluster, DTYPES[plan.precision])),
    )


def evaluate_plan(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Prediction:
    """Count a plan's own placements, price them for its engine and evaluate it."""
    from planner.costing import as_run, measure_graph

    levels = tuple(dict.fromkeys(decision.recompute for stage in plan.stages for decision in stage.decisions))
    mesh, engine = plan.mesh, engine_called(plan.engine)
    counted = measure_graph(
        as_run(graph, cluster.chip), mesh.tensor, plan.batch.micro, (plan.placements,), levels, mesh.context, engine
    )
    return replayed(evaluate_counted(plan, counted, cluster, engine), plan, graph, cluster)


def evaluate_counted(plan: Plan, counted: GraphWork, cluster: Cluster, engine: Engine) -> Prediction:
    """Price what was counted of the plan's placements and evaluate it: what is left to do when only rates change."""
    from planner.costing import price_graph
    from planner.costing.extrapolated import extrapolations

    stages = tuple(dict.fromkeys(decision.zero for stage in plan.stages for decision in stage.decisions))
    costed = price_graph(
        counted, cluster, mesh=plan.mesh, precision=plan.precision, zero_group=plan.zero_group,
        accumulation=plan.batch.accumulation, engine=engine, stages=stages,
    )
    prediction = evaluate(plan, costed, cluster, engine)
    return replace(prediction, warnings=(*prediction.warnings, *extrapolations(counted, cluster)))


def last_passes(pipeline: int, virtual: int, microbatches: int) -> int:
    """Micro-batches whose backward passes are left when the first gradients of a rank are complete: one, or a round of them
    where virtual stages end one after the other."""
    return min(pipeline, microbatches) if virtual > 1 else 1


def _tail_seconds(loads: Sequence[StageLoad], engine: Engine, passes: int) -> float:
    """What a rank does once a step after its last backward pass, behind whose last ``passes`` a part of the traffic hides."""
    once_s = sum(load.once_s for load in loads)
    backward_s = passes * sum(load.backward_s for load in loads)
    exposed = Overlap(engine.gradients_hidden, engine.gradients_floor).exposed_s(backward_s, once_s)
    return exposed + sum(load.optimizer_s for load in loads)


def _unseen_chip(cluster: Cluster, dtype: str) -> tuple[str, ...]:
    """What is said of a chip that no measured run is of: its rates are its datasheet's and its class'."""
    if "class" not in cluster.sources.get(f"chip.gemm.{dtype}.maximum", ""):
        return ()
    return (f"{cluster.chip.name}: no measured run is of this chip: predicted from its datasheet and the rates of its class",)


def _whole_bytes(plan: Plan, costed: CostedGraph, cut: int, engine: Engine) -> int | None:
    """Bytes that cross a cut of all tensor ranks together, if the engine parts what they hold alike."""
    if not engine.sends_scattered or plan.mesh.tensor == 1 or not cut:
        return None
    types = costed.graph.activation_types
    return sum(types[name].size_bytes(costed.microbatch) for name in costed.graph.crossing(cut))


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
    optimizer = sum(load.optimizer_s for load in mine)
    data = count * sum(load.data_comm_s for load in mine) + tails[busiest] - optimizer + tied_s
    context = count * sum(load.context_comm_s for load in mine)
    expert = count * sum(load.expert_comm_s for load in mine)
    waiting = max(0.0, step_s - compute - recompute - tensor - expert - context - data - optimizer)
    transfers = sum(n * s for n, s in zip(line.critical_path.transfers, sends, strict=True))
    pipeline = min(waiting, transfers)
    return Breakdown(compute, recompute, tensor, expert, context, pipeline, waiting - pipeline, data, optimizer)
