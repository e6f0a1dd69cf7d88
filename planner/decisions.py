"""A plan's decisions as a reader compares them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby

from planner.ir.placement import sequence_parallel
from planner.ir.plan import Plan, Prediction, StageMemory


def largest_rank(prediction: Prediction) -> StageMemory:
    """The memory of the rank that holds the most."""
    return max(prediction.stages, key=lambda stage: stage.memory.total).memory


def decisions_of(plan: Plan) -> dict[str, str]:
    """Every decision, by the name that constraints have for it; of many layers how many took what."""
    layers = [decision for stage in plan.stages for decision in stage.decisions]
    return {
        **{axis: str(degree) for axis, degree in plan.mesh.degrees.items()}, "axis_order": plan.mesh.order,
        "microbatch": str(plan.batch.micro), "accumulation": str(plan.batch.accumulation), "schedule": plan.schedule.name,
        "virtual": str(plan.schedule.virtual), "zero_group": str(plan.zero_group),
        "sequence_parallel": str(sequence_parallel(plan.placements)).lower(),
        "zero": _counted(Counter(str(layer.zero) for layer in layers)),
        "recompute": _counted(Counter(layer.recompute for layer in layers)),
        "stages": ", ".join(_run(blocks, sum(1 for _ in same)) for blocks, same in groupby(
            stage.last - stage.first for stage in plan.stages
        )),
    }


def _run(blocks: int, stages: int) -> str:
    """Blocks of neighbouring stages that have as many."""
    return str(blocks) if stages == 1 else f"{blocks} x{stages}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} x{count}" for name, count in sorted(counts.items()))
