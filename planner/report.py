"""The one JSON object that plan, show and check print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from planner.bundle import Bundle
from planner.search import SearchResult


def report(bundle: Bundle, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Seconds, bytes and FLOP/s. ``seconds``: where the command's time went; its parts add up to ``total``."""
    plan, prediction, certificate = bundle.plan, bundle.prediction, bundle.certificate
    return {
        "model": {"name": plan.model, "parameters": bundle.graph.parameter_count, "fingerprint": plan.model_fingerprint},
        "cluster": {"name": plan.cluster, "devices": bundle.cluster.devices},
        "mesh": plan.mesh.degrees,
        "batch": {"global": plan.batch.total, "micro": plan.batch.micro, "accumulation": plan.batch.accumulation},
        "schedule": asdict(plan.schedule),
        "stages": [_stage(bundle, index) for index in range(len(plan.stages))],
        "predicted": {
            "step_s": prediction.step_s,
            "tokens_per_s": prediction.tokens_per_s,
            "model_flops_per_device_s": prediction.model_flops_per_device_s,
            "mfu": prediction.mfu,
            "peak_memory_bytes": prediction.peak_memory_bytes,
            "breakdown_s": {name: float(value) for name, value in asdict(prediction.breakdown).items()},
        },
        "search": {
            "optimality_gap": certificate.gap_of(prediction.step_s),
            "lower_bound_s": certificate.lower_bound_s,
            "candidates": certificate.candidates,
            "solved": certificate.solved,
            "seconds": dict(seconds),
        },
    }


def alternative(result: SearchResult, path: Path) -> dict[str, Any]:
    """Another plan beside the best one, in short; its own file has the rest."""
    plan, prediction = result.plan, result.prediction
    return {
        "path": str(path), "mesh": plan.mesh.degrees, "axis_order": plan.mesh.order,
        "batch": {"global": plan.batch.total, "micro": plan.batch.micro, "accumulation": plan.batch.accumulation},
        "schedule": asdict(plan.schedule), "zero_group": plan.zero_group,
        "predicted": {
            "step_s": prediction.step_s, "tokens_per_s": prediction.tokens_per_s, "mfu": prediction.mfu,
            "peak_memory_bytes": prediction.peak_memory_bytes,
        },
        "search": {
            "optimality_gap": result.optimality_gap, "lower_bound_s": result.lower_bound_s, "candidates": result.candidates,
            "solved": result.solved,
        },
    }


def _stage(bundle: Bundle, index: int) -> dict[str, Any]:
    stage, predicted = bundle.plan.stages[index], bundle.prediction.stages[index]
    held = asdict(predicted.memory)
    cached = held.pop("cached")
    return {
        "index": stage.index,
        "layers": [block.name for block in bundle.graph.blocks[stage.first : stage.last]],
        "zero": {str(level): count for level, count in sorted(Counter(d.zero for d in stage.decisions).items())},
        "recompute": dict(sorted(Counter(d.recompute for d in stage.decisions).items())),
        "forward_s": float(predicted.forward_s),
        "backward_s": float(predicted.backward_s),
        "memory_bytes": {**held, "total": predicted.memory.total},
        "cached_bytes": cached,
    }
