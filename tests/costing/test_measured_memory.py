"""Predicted memory against the emitted program's real step on the CPU with gloo: what is sent and not waited for counts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from codegen import emit
from hardware_profiles import resolve_cluster
from planner.costing import Pricing
from planner.evaluate import evaluate_plan
from planner.ir.graph import ModelGraph
from planner.ir.plan import DTYPES, Plan, StageMemory
from planner.placement import place_graph
from planner.trace import load_model, trace_model
from tests.matrix.build import Row, make_plan
from tests.matrix.workers import Workers
from tests.oracles.peak_memory import Peak, measure
from tests.wide import wide

SIZES = {"layers": 6, "hidden": 128, "heads": 8, "vocab": 512}
EXACT = 0.02
"""By how much the prediction may exceed the measurement, as a part of it."""


@dataclass(frozen=True)
class Case:
    """A plan of a model, in a precision."""

    model: str
    precision: str
    row: Row

    @property
    def label(self) -> str:
        return f"{self.model}-{self.precision}-{self.row.label}"


CASES = [
    Case("gpt", "fp32", Row(accumulation=2, microbatch=2)),
    wide(Case("llama", "bf16", Row(accumulation=2, microbatch=2))),
    Case("llama", "bf16", Row(accumulation=2, microbatch=2, recompute="full")),
    wide(Case("gpt", "bf16", Row(accumulation=2, microbatch=2, recompute="full"))),
    Case("gpt", "fp32", Row(accumulation=2, microbatch=2, recompute="selective")),
    Case("llama", "fp32", Row(accumulation=1, microbatch=2)),
    wide(Case("llama", "fp32", Row(accumulation=1, microbatch=2, data=2, zero=3))),
    wide(Case("llama", "bf16", Row(accumulation=2, microbatch=2, data=2))),
    Case("llama", "fp32", Row(accumulation=2, microbatch=2, data=2, zero=1)),
    Case("llama", "fp32", Row(accumulation=2, microbatch=2, data=2, zero=2)),
    wide(Case("llama", "bf16", Row(accumulation=2, microbatch=2, data=2, zero=2))),
    Case("llama", "fp32", Row(accumulation=2, microbatch=2, data=2, zero=3)),
    wide(Case("gpt", "bf16", Row(accumulation=2, microbatch=2, data=4, zero=3))),
    wide(Case("llama", "bf16", Row(accumulation=2, microbatch=2, data=4, zero=3, zero_group=2))),
    Case("llama", "fp32", Row(accumulation=2, microbatch=2, tensor=2, sequence_parallel=True)),
    Case("llama", "fp32", Row(accumulation=4, microbatch=2, pipeline=2)),
    Case("llama", "fp32", Row(accumulation=4, microbatch=2, pipeline=2, schedule="gpipe")),
    wide(Case("llama", "bf16", Row(accumulation=4, microbatch=2, pipeline=2, recompute="full"))),
    Case("llama", "fp32", Row(accumulation=4, microbatch=2, pipeline=2, schedule="interleaved-1f1b")),
    Case("llama", "fp32", Row(accumulation=4, microbatch=2, pipeline=2, schedule="zbv")),
    wide(Case("llama", "bf16", Row(accumulation=4, microbatch=2, pipeline=2, data=2, zero=2))),
]


@cache
def graph_of(model: str, dtype: str) -> ModelGraph:
    own = {"ffn_hidden": 320, "kv_heads": 4} if model == "llama" else {"ffn_hidden": 512}
    return trace_model(load_model(f"examples/{model}.py:{model}", {**SIZES, **own}, 128), sequence=128, dtype=dtype)


def plan_of(case: Case) -> tuple[Plan, ModelGraph]:
    graph, row = graph_of(case.model, DTYPES[case.precision]), case.row
    if row.tensor == 1:
        return make_plan(graph, row, precision=case.precision), graph
    cluster = resolve_cluster(f"local-cpu:1x{row.devices}")
    options = place_graph(graph, row.tensor, Pricing(cluster, row.tensor, row.microbatch))
    placements = next(
        option.placements for option in options if row.sequence_parallel == option.sequence_parallel
    )
    return make_plan(graph, row, precision=case.precision, placements=placements), graph


def compare(workers: Workers, case: Case, directory: Path, *, trace: bool = False) -> list[tuple[StageMemory, Peak]]:
    """Prediction and measurement of every pipeline rank (of its data and tensor ranks, the one that holds the most)."""
    plan, graph = plan_of(case)
    prediction = evaluate_plan(plan, graph, resolve_cluster(f"local-cpu:1x{case.row.devices}"))
    emit(plan, graph, directory, prediction=None, plan_yaml="format: 1\n")
    peaks = measure(workers, directory, case.row.devices, trace=trace)
    each = case.row.devices // case.row.pipeline
    return [
        (prediction.stages[rank].memory, max(peaks[rank * each : (rank + 1) * each], key=lambda peak: peak.total))
        for rank in range(case.row.pipeline)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_prediction_covers_the_measured_peak(workers: Workers, case: Case, tmp_path: Path) -> None:
    for rank, (predicted, measured) in enumerate(compare(workers, case, tmp_path / "program")):
        total = predicted.total - resolve_cluster("local-cpu:1x1").chip.reserve_bytes
        ratio = total / measured.total
        assert 1 <= ratio <= 1 + EXACT, (
            f"rank {rank}: predicted {total} bytes, measured {measured.total}: {ratio:.4f}\n{predicted}\n{measured}"
        )
