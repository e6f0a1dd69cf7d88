"""The emitted program equals the plain model: loss, every gradient, three AdamW steps; over a pairwise design of plans.

Two factors at a time, every legal pair of values is in some plan (tests/matrix/pairwise.py), for both examples by turns, plus
models whose names mean nothing, and what else a plan can meet. `make test-wide`: each example, and the dear plans of which each
adds four pairs or fewer, of all pairs one in sixteen. Float64 on gloo.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from codegen import emit
from planner.ir.graph import ModelGraph
from planner.trace import load_model, trace_model
from tests.matrix.build import Row, label, make_plan, rows_of
from tests.matrix.pairwise import Pair, pairs_of, pairwise
from tests.matrix.reference import ARGUMENTS, Reference, batches_of, build_in, give_start, train_plainly, worst_gradient
from tests.matrix.workers import Workers
from tests.wide import wide

MODELS = Path(__file__).parent / "models.py"
STEPS = 3
"""Two of warm-up, and one at the full rate with moments of both."""
SPLIT_BACKWARD = ("interleaved-zero-bubble", "zbv")
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", *SPLIT_BACKWARD)
FACTORS: Mapping[str, tuple[object, ...]] = {
    "tensor": (1, 2, 4),
    "sequence_parallel": (False, True),
    "pipeline": (1, 2, 4),
    "schedule": ("none", *SCHEDULES),
    "data": (1, 2, 4),
    "zero": (0, 1, 2, 3, "mixed"),
    "recompute": ("none", "selective", "full", "mixed"),
    "accumulation": (1, 2, 4),
}


def legal(row: Mapping[str, object]) -> bool:
    """What the planner may decide on eight ranks."""
    tensor, pipeline, data, accumulation = (int(str(row[k])) for k in ("tensor", "pipeline", "data", "accumulation"))
    if tensor * pipeline * data > 8 or (row["sequence_parallel"] and tensor == 1):
        return False
    if (row["schedule"] == "none") != (pipeline == 1) or (pipeline > 1 and accumulation < pipeline):
        return False
    return row["schedule"] not in SPLIT_BACKWARD or (row["zero"] not in (3, "mixed") and row["recompute"] == "none")


DESIGN = pairwise(FACTORS, legal, lambda row: 1.0)
ROWS = rows_of(DESIGN)
CASES = [(("llama", "gpt")[at % 2], row) for at, row in enumerate(ROWS)] + [
    ("nameless", Row(tensor=2, pipeline=2, data=2, accumulation=2, zero="mixed", recompute="mixed", sequence_parallel=True)),
    ("gpt", Row(data=4, zero_group=2, zero=3, accumulation=2)),
    # Pipelines of neighbouring ranks: data ranks are apart, also those of a ZeRO group, and tied parameters near.
    ("gpt", Row(tensor=2, pipeline=2, data=2, zero="mixed", accumulation=2, order="data-pipeline-tensor")),
    # Tensor ranks are farthest apart.
    ("gpt", Row(
        tensor=2, pipeline=2, data=2, zero="mixed", accumulation=2, sequence_parallel=True, order="tensor-data-pipeline",
    )),
    # Four stages of a rank: more than torch's schedules would keep gathered.
    ("gpt", Row(pipeline=2, data=2, zero="mixed", accumulation=4, schedule="interleaved-1f1b", stages_of_rank=4)),
    ("frozen", Row(pipeline=2, accumulation=2)),
    *(("corners", row) for row in (
        Row(), Row(data=3, zero="mixed", accumulation=2), Row(tensor=2, pipeline=2, data=2, zero=1, accumulation=2),
    )),
    *(("odd", row) for row in (
        Row(tensor=2, data=2, zero=3, sequence_parallel=True, recompute="full"),
        Row(tensor=2, pipeline=2, accumulation=2, schedule="zbv"),
    )),
    # A parameter used twice, one use leading to the other, in a backward pass of two parts.
    ("decays", Row(pipeline=2, accumulation=2, schedule="zbv")),
    # Turned views, complex numbers, a product of three tensors, a write into a part, a weight made of two parameters.
    ("turned", Row(pipeline=2, data=2, accumulation=2, schedule="zbv")),
    # Messages that lie otherwise in memory than their values did; two attentions under one mask.
    ("sideways", Row(pipeline=2, accumulation=2, schedule="zbv")),
    ("sideways", Row(pipeline=2, data=2, accumulation=2)),
    ("twice", Row(pipeline=2, accumulation=2, schedule="zbv")),
    # Parameters that are read again further on, collectives between, in the same block and in a later one.
    ("scaled", Row(tensor=2, pipeline=2, accumulation=2, schedule="zbv")),
    # Sums of parameters, whose gradients are one tensor; a parameter as large as what it is added to.
    ("added", Row(pipeline=2, accumulation=4, schedule="interleaved-zero-bubble")),
    ("summed", Row(pipeline=2, accumulation=4, schedule="zbv")),
    ("summed", Row(pipeline=2, accumulation=4)),
    # A stage hands on what it has received.
    ("reading", Row(pipeline=2, accumulation=4, schedule="zbv")),
    # Tokens go where a router sends them.
    ("experts", Row(pipeline=2, data=2, zero=1, accumulation=2)),
    # Gradients begin in two places.
    ("translator", Row(pipeline=4, accumulation=4, microbatch=2)),
    ("mirrored", Row(pipeline=2, data=2, zero=1, accumulation=2)),
    # A conditioning without a sequence beside hidden states that are split.
    ("conditioned", Row(tensor=2, sequence_parallel=True, accumulation=2)),
    # Modules that are called as what a block has of its own.
    ("named", Row(tensor=2, data=2, zero=3, recompute="mixed")),
    # Stages that read tied parameters without training them.
    *(("settled", row) for row in (
        Row(pipeline=2, data=2, zero=1, accumulation=2), Row(tensor=2, pipeline=2, accumulation=2, schedule="zbv"),
    )),
    ("distilled", Row(pipeline=2, data=2, zero=2, accumulation=2, schedule="interleaved-1f1b")),
]
MORE = [(("gpt", "llama")[at % 2], row) for at, row in enumerate(ROWS)] + [
    ("llama", Row(tensor=2, data=4, zero_group=2, zero=1, accumulation=2, microbatch=3)),
    ("llama", Row(pipeline=2, data=4, zero_group=2, zero=2, accumulation=4, schedule="zbv", order="data-pipeline-tensor")),
    ("gpt", Row(tensor=2, data=4, zero_group=2, zero=2, accumulation=2, order="data-tensor-pipeline")),
    ("gpt", Row(tensor=2, pipeline=2, data=2, zero=1, accumulation=4, schedule="zbv", order="tensor-pipeline-data")),
    ("llama", Row(
        tensor=2, pipeline=2, data=2, zero=2, accumulation=4, schedule="interleaved-1f1b", order="pipeline-tensor-data",
    )),
    ("llama", Row(pipeline=2, data=2, zero=2, accumulation=4, schedule="interleaved-zero-bubble", stages_of_rank=4)),
    ("corners", Row(tensor=4, sequence_parallel=True)),
    ("odd", Row(pipeline=4, data=2, zero=1, accumulation=4, schedule="interleaved-1f1b")),
    ("turned", Row(tensor=2, data=2, zero=3, recompute="full")),
    ("twice", Row(tensor=2, data=2, zero=3, recompute="selective")),
    ("scaled", Row(tensor=2, pipeline=2, data=2, zero=2, accumulation=4, schedule="interleaved-zero-bubble")),
    ("summed", Row(data=2, zero=1, accumulation=3)),
    ("summed", Row(pipeline=2, data=2, zero=2, accumulation=2, microbatch=2, schedule="zbv")),
    ("reading", Row(pipeline=2, data=2, zero=2, accumulation=4, schedule="interleaved-1f1b")),
    ("translator", Row(pipeline=2, data=2, zero=2, accumulation=2, schedule="interleaved-1f1b")),
    ("named", Row(pipeline=2, data=2, zero=1, recompute="selective", accumulation=2)),
    ("settled", Row(pipeline=2, data=2, zero=3, accumulation=2)),
    ("settled", Row(pipeline=2, data=2, zero=2, accumulation=2, schedule="interleaved-1f1b")),
    ("distilled", Row(pipeline=2, data=2, zero=1, accumulation=2)),
    ("distilled", Row(tensor=2, pipeline=2, accumulation=2, schedule="zbv")),
]
"""Wide: the second example's turn at each row of the design, and more rows of others."""


def _adds_little(at: int) -> bool:
    """Whether a plan of the design starts four processes or more for four pairs or fewer that no earlier plan holds."""
    before = frozenset[Pair]().union(*(pairs_of(row) for row in DESIGN[:at]))
    return ROWS[at].devices >= 4 and len(pairs_of(DESIGN[at]) - before) <= 4


RARE = [
    *(CASES[at] for at in range(len(ROWS)) if _adds_little(at)),
    ("sideways", Row(pipeline=2, data=2, accumulation=2)), ("summed", Row(pipeline=2, accumulation=4)),
]
"""Of these cases, the wide ones."""


@cache
def graph_of(model: str) -> ModelGraph:
    return trace_model(load_model(f"{MODELS}:{model}", {}, None), sequence=20 if "gpt" in model else 24, dtype="float64")


def built_in_float64(model: str) -> nn.Module:
    return build_in(load_model(f"{MODELS}:{model}", {}, None), torch.float64)


@cache
def reference_of(model: str, batch: int) -> Reference:
    """The plain model, trained in this process on the same batches from the same start."""
    graph, plain = graph_of(model), built_in_float64(model)
    give_start(plain, graph)
    batches = batches_of(graph, batch)
    return train_plainly(plain, [batches.at(step) for step in range(STEPS)])


def run(workers: Workers, directory: Path, world: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and norms of every step, and the first step's gradients, of an emitted program."""
    metrics, gradients = directory / "metrics.jsonl", directory / "gradients.pt"
    outcomes = workers.run(directory, world, [
        *ARGUMENTS, "--steps", str(STEPS), "--metrics", str(metrics), "--dump-gradients", str(gradients),
    ])
    failed = [outcome for outcome in outcomes if outcome.code]
    assert not failed, failed[0].error
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["loss"] for line in lines], [line["grad_norm"] for line in lines], torch.load(gradients)


def assert_equal_to_plain(workers: Workers, model: str, row: Row, directory: Path) -> None:
    plan = make_plan(graph_of(model), row)
    emit(plan, graph_of(model), directory, prediction=None, plan_yaml="format: 1\n")
    reference = reference_of(model, plan.batch.total)
    losses, norms, gradients = run(workers, directory, row.devices)
    name, error = worst_gradient(gradients, reference.gradients)
    assert error <= 1, f"the gradient of {name} is {error:.3g} tolerances off"
    assert losses == pytest.approx(list(reference.losses), rel=1e-10)
    assert norms == pytest.approx(list(reference.norms), rel=1e-9)


def test_the_design_is_pairwise_and_large_enough() -> None:
    covered = set().union(*(pairs_of(row) for row in DESIGN))
    assert ("tensor", 4, "zero", 3) in covered and ("pipeline", 4, "schedule", "zbv") in covered
    assert len(DESIGN) >= 24 and {row.devices for row in ROWS} >= {1, 2, 4, 8}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "row"), [
    *(wide(*case) if case in RARE else case for case in CASES), *(wide(*case) for case in MORE),
], ids=label)
def test_program_equals_plain_model(workers: Workers, model: str, row: Row, tmp_path: Path) -> None:
    assert_equal_to_plain(workers, model, row, tmp_path / "program")
