"""The one evaluator: what a plan costs, whoever made it.

A step is the simulated pipeline, then what every rank does once:
``step_s = timeline + max over ranks of (once-per-step data traffic + optimizer) + sum of tied gradients``.

Data traffic of ZeRO 0 and 1 runs after the last backward pass and overlaps with nothing; ZeRO 2 and 3 pay theirs in every
micro-batch. So the step time stays a maximum of sums that are linear in the blocks' times, which the solver's cuts need.

Memory of a rank is the sum over its virtual stages of what persists, plus the worst live profile of the schedule times
what a micro-batch keeps (saved activations, what is sent on, the context's values), plus the largest transient of one
stage, the pipeline's receive buffers, the batch and the chip's reserve. Each term is an upper bound of what the emitted
program holds; the terms need not reach their most at the same moment. Two things are not counted: what the optimizer
makes while it steps (by then activations and working copies are gone), and under zero-bubble schedules the gradients
that wait for the weight part of a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_models.collectives import collective_s, point_to_point_s, span_of
from cost_models.pipeline import StageTimes, Timeline, live_profiles, simulate
from hardware_profiles import Cluster
from planner.ir.costed import BlockCost, CostedGraph, StateCost
from planner.ir.errors import InternalError
from planner.ir.graph import ModelGraph, Parameter
from planner.ir.placement import Placement, local_type
from planner.ir.plan import (
    SPLIT_BACKWARD,
    Breakdown,
    Mesh,
    Plan,
    Precision,
    Prediction,
    ScheduleName,
    StageMemory,
    StagePlan,
    StagePrediction,
)

DTYPES: dict[Precision, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One virtual stage on one rank. Seconds of one micro-batch; ``once_s`` and ``optimizer_s`` once a step; bytes.

    ``times`` hold everything that the schedule sees, the parts say what they are made of. ``transient_bytes``: the largest
    peak of a block; ``gather_bytes``: the two largest shares of ZeRO's transient copies. ``saved_bytes``: all that one
    micro-batch keeps.
    """

    times: StageTimes
    compute_s: float
    recompute_s: float
    tensor_comm_s: float
    data_comm_s: float
    once_s: float
    optimizer_s: float
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    constant_bytes: int
    saved_bytes: int
    transient_bytes: int
    gather_bytes: int


def forward_seconds(cost: BlockCost, state: StateCost) -> float:
    """All that a block's forward pass of one micro-batch takes."""
    return cost.forward_s + cost.forward_comm_s + state.forward_comm_s


def input_gradient_seconds(cost: BlockCost, state: StateCost) -> float:
    """All of a block's backward pass but the weight gradients."""
    repeated = cost.recompute_s + cost.recompute_comm_s
    return cost.input_gradient_s + cost.backward_comm_s + repeated + state.backward_comm_s


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


def sums_seconds(cluster: Cluster, mesh: Mesh) -> float:
    """The all-reduces of single numbers that a step makes whatever its plan: the loss' weight over the data axis, loss and
    gradient norm over the world (runtime/loop.py, ``gradients``)."""
    spans = [span_of(cluster, mesh.data, mesh.context * mesh.tensor), span_of(cluster, mesh.devices, 1)]
    return sum(collective_s("all_reduce", span, 16) for span in spans if span.size > 1)


def send_seconds(cluster: Cluster, mesh: Mesh, size_bytes: float) -> float:
    """Seconds to send ``size_bytes`` to the next pipeline rank: the slowest of all pairs of neighbours."""
    stride = mesh.data * mesh.context * mesh.tensor
    if mesh.pipeline == 1 or size_bytes <= 0:
        return 0.0
    ranks = {pipeline * stride for pipeline in range(mesh.pipeline - 1)}
    return max(point_to_point_s(cluster, stride, size_bytes, rank) for rank in ranks)


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
        warnings=(*costed.warnings, *_cautions(plan)),
    )


def _cautions(plan: Plan) -> tuple[str, ...]:
    """What is known to be missing from a prediction."""
    if plan.schedule.name not in SPLIT_BACKWARD:
        return ()
    return (
        f"{plan.schedule.name}: gradients that wait for the weight part of a split backward pass are not counted; on CPUs "
        "measured peaks were 8 to 10% above the prediction (tests/costing/test_measured_memory.py)",
    )


def evaluate_plan(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Prediction:
    """Cost a plan's own placements and evaluate it."""
    from planner.costing import cost_graph

    costed = cost_graph(
        graph, cluster, mesh=plan.mesh, microbatch=plan.batch.micro, precision=plan.precision,
        zero_group=plan.zero_group, options=(plan.placements,), accumulation=plan.batch.accumulation,
    )
    return evaluate(plan, costed, cluster)


def stage_load(stage: StagePlan, costed: CostedGraph, option: int) -> StageLoad:
    """Sum the blocks of a virtual stage."""
    pairs = []
    for block, decision in zip(costed.graph.blocks[stage.first : stage.last], stage.decisions, strict=True):
        cost = costed.blocks[option][block.body][decision.recompute]
        pairs.append((cost, costed.states[option][block.body][decision.zero]))
    weight_s = sum(cost.weight_gradient_s for cost, _ in pairs)
    # What a stage sends stays alive with its micro-batch (PipelineStage.fwd_cache).
    sent = costed.crossing_bytes[option].get(stage.last, 0)
    return StageLoad(
        times=StageTimes(
            sum(forward_seconds(*pair) for pair in pairs) + costed.context_s,
            sum(input_gradient_seconds(*pair) for pair in pairs),
            weight_s,
        ),
        compute_s=sum(cost.forward_s + cost.backward_s for cost, _ in pairs) + costed.context_s,
        recompute_s=sum(cost.recompute_s for cost, _ in pairs),
        tensor_comm_s=sum(c.forward_comm_s + c.backward_comm_s + c.recompute_comm_s for c, _ in pairs),
        data_comm_s=sum(state.forward_comm_s + state.backward_comm_s for _, state in pairs),
        once_s=sum(state.once_comm_s for _, state in pairs),
        optimizer_s=sum(state.optimizer_s for _, state in pairs),
        parameters_bytes=sum(state.parameters_bytes for _, state in pairs),
        gradients_bytes=sum(state.gradients_bytes for _, state in pairs),
        optimizer_bytes=sum(state.optimizer_bytes for _, state in pairs),
        constant_bytes=sum(cost.buffer_bytes for cost, _ in pairs),
        saved_bytes=sum(cost.saved_bytes for cost, _ in pairs) + costed.context_bytes + sent,
        transient_bytes=max((max(cost.forward_peak_bytes, cost.backward_peak_bytes) for cost, _ in pairs), default=0),
        gather_bytes=sum(sorted(state.gather_bytes for _, state in pairs)[-2:]),
    )


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


def tied_parameters(graph: ModelGraph) -> list[tuple[Parameter, tuple[int, ...]]]:
    """The parameters that several blocks use, with the blocks' indices."""
    owners: dict[str, list[int]] = {}
    for index, block in enumerate(graph.blocks):
        for fqn in {bound for _, bound in block.parameters}:
            owners.setdefault(fqn, []).append(index)
    return [(p, tuple(owners[p.fqn])) for p in graph.parameters if len(owners.get(p.fqn, ())) > 1]


def tied_gradient_seconds(plan: Plan, graph: ModelGraph, cluster: Cluster) -> float:
    """Sum of the gradients of parameters whose copies live on different pipeline ranks, after the backward pass."""
    if plan.mesh.pipeline == 1:
        return 0.0
    total = 0.0
    stage_of = {block: stage for stage in plan.stages for block in range(stage.first, stage.last)}
    for parameter, owners in tied_parameters(graph):
        ranks = sorted({plan.rank_of_stage(stage_of[block].index) for block in owners})
        if len(ranks) < 2 or not parameter.trainable:
            continue
        stage = stage_of[owners[0]]
        zero = stage.decisions[owners[0] - stage.first].zero
        placement = parameter_placement(graph, plan, owners[0], parameter.fqn)
        elements = local_type(parameter.type, placement, plan.mesh.tensor).elements()
        total += tied_sum_seconds(cluster, plan.mesh, plan.precision, elements, zero, plan.zero_group, tuple(ranks))
    return total


def tied_sum_seconds(
    cluster: Cluster, mesh: Mesh, precision: Precision, elements: int, zero: int, zero_group: int, ranks: tuple[int, ...]
) -> float:
    """All-reduce of one tied gradient (fp32, or fp64; the own shard where ZeRO shards it) over its pipeline ranks."""
    size = elements * (8 if precision == "fp64" else 4) / (zero_group if zero else 1)
    stride = (ranks[-1] - ranks[0]) // (len(ranks) - 1) * mesh.data * mesh.context * mesh.tensor
    return collective_s("all_reduce", span_of(cluster, len(ranks), stride), size)


def parameter_placement(graph: ModelGraph, plan: Plan, block: int, fqn: str) -> Placement:
    """How the plan places a parameter of one block."""
    body = graph.body_of[graph.blocks[block].body]
    local = next(name for name, bound in graph.blocks[block].parameters if bound == fqn)
    names = [parameter.name for parameter in body.parameters]
    return plan.placements[body.name].parameters[names.index(local)]


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
