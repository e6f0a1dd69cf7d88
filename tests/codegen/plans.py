"""Plans by hand: everything replicated, or with the placements that a test gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from planner.ir.body import Body
from planner.ir.costed import Recompute
from planner.ir.graph import ModelGraph
from planner.ir.placement import REPLICATE, BodyPlacement, NodePlacement, OpStrategy
from planner.ir.plan import Batch, BlockDecision, Mesh, Plan, Precision, Schedule, ScheduleName, StagePlan
from planner.trace import load_model, trace_model

ROOT = Path(__file__).parents[2]
SMALL = {"layers": 3, "hidden": 32, "heads": 4, "vocab": 64}


def traced(example: str, sequence: int = 16, dtype: str = "float32", **settings: object) -> ModelGraph:
    """The graph of ``examples/<example>.py``."""
    source = load_model(f"{ROOT}/examples/{example}.py:{example}", {**SMALL, **settings}, sequence)
    return trace_model(source, sequence=sequence, dtype=dtype)


def replicated(body: Body, degree: int = 1) -> BodyPlacement:
    """Every rank does everything."""
    nodes = tuple(
        NodePlacement(n.name, OpStrategy("replicate", (REPLICATE,) * len(n.operands), (REPLICATE,) * len(n.types)))
        for n in body.nodes if n.base != "getitem"
    )
    return BodyPlacement(
        body.name, degree, (REPLICATE,) * len(body.inputs), (REPLICATE,) * len(body.parameters), nodes,
        (REPLICATE,) * len(body.outputs),
    )


def plan_of(
    graph: ModelGraph, *, pipeline: int = 1, data: int = 1, tensor: int = 1, zero: int = 0,
    recompute: Sequence[Recompute] = ("none",), cuts: Sequence[int] = (), schedule: ScheduleName = "1f1b",
    virtual: int = 1, precision: Precision = "fp32", total: int = 4, micro: int = 1,
    placements: Mapping[str, BodyPlacement] | None = None,
) -> Plan:
    """A plan; ``recompute`` is repeated over the blocks, ``cuts`` are the first blocks of the stages after the first."""
    edges = [0, *cuts, len(graph.blocks)]
    stages = tuple(
        StagePlan(index, first, last, tuple(
            BlockDecision(zero, recompute[at % len(recompute)]) for at in range(first, last)
        ))
        for index, (first, last) in enumerate(pairwise(edges))
    )
    return Plan(
        model=graph.name, model_fingerprint="", cluster="local-cpu:1x8", cluster_fingerprint="", precision=precision,
        sequence=graph.sequence, mesh=Mesh(pipeline=pipeline, data=data, tensor=tensor),
        batch=Batch(total, micro, total // (data * micro)), schedule=Schedule(schedule, virtual), zero_group=data,
        stages=stages, placements=placements or {body.name: replicated(body, tensor) for body in graph.bodies},
    )
