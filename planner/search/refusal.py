"""Saying why nothing fits: the plan of least memory, what binds it, and the cheapest change that would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from cost_models.memory import state_bytes
from hardware_profiles import Cluster
from planner.evaluate import evaluate
from planner.ir.costed import CostedGraph
from planner.ir.errors import NoPlanFits, PinError
from planner.ir.graph import ModelGraph
from planner.ir.plan import BlockDecision, Plan, Prediction, StageMemory, StagePlan
from planner.search.candidates import Candidate, enumerate_candidates
from planner.search.chain import Chain
from planner.search.columns import Shape
from planner.search.pins import Pins
from planner.search.request import Request
from planner.search.solve import Fingerprints, Task, chains_of

GIB = 2**30
MOST_TRIED = 400
_CHEAPEST_FIRST = (
    "microbatch", "recompute", "zero", "zero_group", "sequence_parallel", "virtual", "schedule", "tensor", "data", "pipeline",
)
Costing = Callable[[Candidate], CostedGraph | None]


@dataclass(frozen=True)
class _Least:
    plan: Plan
    prediction: Prediction

    @property
    def excess(self) -> int:
        return self.prediction.peak_memory_bytes - self.prediction.memory_limit_bytes


def refuse(
    candidates: Sequence[Candidate], prices: Costing, graph: ModelGraph, cluster: Cluster, request: Request,
    names: Fingerprints,
) -> None:
    """Raise NoPlanFits about the plan that needs the least memory."""
    least = least_memory(candidates, prices, cluster, request, names)
    if least is None:
        raise NoPlanFits("--pin", "no placement is feasible under these pins", "another tensor degree")
    stages = least.prediction.stages
    worst = max(stages, key=lambda stage: stage.memory.total)
    category = max(
        (field.name for field in fields(StageMemory)), key=lambda name: int(getattr(worst.memory, name))
    )
    mesh = least.plan.mesh
    wrong = (
        f"no plan fits: the least memory (pipeline {mesh.pipeline} x data {mesh.data} x tensor {mesh.tensor}) needs "
        f"{worst.memory.total / GIB:.2f} GiB on the rank of stage {worst.index}, {category} "
        f"{getattr(worst.memory, category) / GIB:.2f} GiB of it; the limit is "
        f"{least.prediction.memory_limit_bytes / GIB:.2f} GiB, {least.excess} bytes too few"
    )
    raise NoPlanFits("memory", wrong, _remedy(prices, graph, cluster, request, names))


def least_memory(
    candidates: Sequence[Candidate], prices: Costing, cluster: Cluster, request: Request, names: Fingerprints
) -> _Least | None:
    """The plan of least peak memory among even cuts, full recomputation and the widest ZeRO, of the most promising
    candidates. (A heuristic: it explains, it proves nothing.)"""
    promising = sorted(candidates, key=lambda c: (c.micro, -c.zero_group, c.virtual, c.accumulation))[:MOST_TRIED]
    best: _Least | None = None
    for candidate in promising:
        costed = prices(candidate)
        for chain in () if costed is None else chains_of(costed, candidate, request):
            task = Task(candidate, chain, cluster, request, names)
            plan = task.plan(_frugal_stages(chain, Shape(
                candidate.schedule, candidate.mesh.pipeline, candidate.virtual, candidate.accumulation, 0
            )))
            prediction = evaluate(plan, chain.costed, cluster)
            if best is None or prediction.peak_memory_bytes < best.prediction.peak_memory_bytes:
                best = _Least(plan, prediction)
    return best


def _frugal_stages(chain: Chain, shape: Shape) -> tuple[StagePlan, ...]:
    """Even cuts by number of blocks; each block keeps as little as it can."""
    blocks = chain.costed.graph.blocks
    bounds = [len(blocks) * stage // shape.stages for stage in range(shape.stages + 1)]
    decisions = [_frugal(chain, block.body) for block in blocks]
    return tuple(
        StagePlan(stage, bounds[stage], bounds[stage + 1], tuple(decisions[bounds[stage] : bounds[stage + 1]]))
        for stage in range(shape.stages)
    )


def _frugal(chain: Chain, body: str) -> BlockDecision:
    costs, states = chain.costed.blocks[chain.option][body], chain.costed.states[chain.option][body]
    fixed = dict(chain.allowed.fixed_zero).get(body)
    levels = [level for level in chain.allowed.recompute if level in costs]
    stages = [fixed] if fixed is not None else [zero for zero in chain.allowed.zero if zero in states]
    level = min(levels, key=lambda name: costs[name].saved_bytes)
    zero = min(stages, key=lambda z: states[z].parameters_bytes + states[z].gradients_bytes + states[z].optimizer_bytes)
    return BlockDecision(zero, level)


def _remedy(
    prices: Costing, graph: ModelGraph, cluster: Cluster, request: Request, names: Fingerprints
) -> str:
    """The first single change, cheapest first, under which the plan of least memory fits."""
    for pins, words in _looser(request.pins):
        changed = replace(request, pins=pins)
        try:
            candidates = enumerate_candidates(graph, cluster, changed)
        except PinError:
            continue
        least = least_memory(candidates, prices, cluster, changed, names)
        if least is not None and least.excess <= 0:
            return f"it would fit {words}: {_difference(request.pins, least.plan)}"
    return _more_chips(graph, cluster, request)


def _more_chips(graph: ModelGraph, cluster: Cluster, request: Request) -> str:
    """How many nodes the state alone asks for, split over all of them; activations come on top."""
    state = state_bytes(graph.parameter_count, request.precision, 3, 1)
    held = state.parameters + state.gradients + state.optimizer
    capacity = cluster.chip.memory_bytes - cluster.chip.reserve_bytes
    nodes = max(cluster.nodes + 1, -(-held // (capacity * cluster.devices_per_node)))
    return (
        f"parameters, gradients and optimizer alone take {held / GIB:.0f} GiB: give it at least {nodes} nodes of this kind, "
        "or chips with more memory, a smaller model or a shorter sequence"
    )


def _looser(pins: Pins) -> Iterator[tuple[Pins, str]]:
    for name in _CHEAPEST_FIRST:
        if getattr(pins, name) is not None:
            yield replace(pins, **{name: None}), f"without the pin {name}={getattr(pins, name)}"


def _difference(pins: Pins, plan: Plan) -> str:
    """The plan's value of every pin that it does not keep."""
    decision = plan.stages[0].decisions[0]
    values = {
        "microbatch": plan.batch.micro, "recompute": decision.recompute, "zero": decision.zero,
        "zero_group": plan.zero_group, "virtual": plan.schedule.virtual, "schedule": plan.schedule.name,
        "tensor": plan.mesh.tensor, "data": plan.mesh.data, "pipeline": plan.mesh.pipeline,
    }
    changed = [f"{k}={v}" for k, v in values.items() if getattr(pins, k) is not None and getattr(pins, k) != v]
    return ", ".join(changed) or "sequence_parallel the other way"
