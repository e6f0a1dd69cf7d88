"""The models of ``benchmarks/zoo`` trained for a step by real ranks: loss and every gradient against the plain model's.

    python benchmarks/zoo_gradients.py [--ranks 2|4] [--model NAME]... [--seed N]

Two ranks: under a pipeline (1F1B with a mixture of recomputation, and zero bubble), ZeRO 3, and three splits of two tensor
ranks with prices drawn at random, so that operations are split in ways that no cost would choose. Four ranks: under mixtures of
those, among them interleaved stages, ZeRO in groups, and four tensor ranks. In float64, in float32 where a model cannot be
traced in that; dropout is switched off. What a model itself computes in float32 differs by about 1e-7. Prints a line for each
plan, writes ``benchmarks/results/zoo_gradients.json`` (four ranks: ``zoo_gradients_4.json``), exits 1 where a gradient is
further off. Needs transformers.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.run_zoo import FILES, SEQUENCE, names_of  # noqa: E402
from codegen import emit  # noqa: E402
from planner.ir.body import Body, Node  # noqa: E402
from planner.ir.errors import ShardwrightError  # noqa: E402
from planner.ir.graph import ModelGraph  # noqa: E402
from planner.ir.placement import BodyPlacement, Conversion, OpStrategy, Placement  # noqa: E402
from planner.ir.types import TensorType  # noqa: E402
from planner.placement import place_graph  # noqa: E402
from planner.trace import load_model, trace_model  # noqa: E402
from planner.trace.export import default_loss  # noqa: E402
from planner.trace.recipes import default_dtype  # noqa: E402
from planner.trace.source import ModelSource  # noqa: E402
from tests.matrix.build import Row, make_plan  # noqa: E402
from tests.matrix.reference import (  # noqa: E402
    ARGUMENTS,
    TOLERANCE,
    batches_of,
    build_in,
    give_start,
    worst_gradient,
)
from tests.matrix.workers import Workers  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
FILE_OF = {2: "zoo_gradients.json", 4: "zoo_gradients_4.json"}
ROWS = {
    2: (
        Row(pipeline=2, accumulation=2, microbatch=2, recompute="mixed"),
        Row(pipeline=2, accumulation=4, microbatch=2, schedule="zbv"),
        Row(data=2, zero=3, accumulation=2, microbatch=2, recompute="selective"),
        Row(tensor=2, accumulation=2, microbatch=2),
        Row(tensor=2, accumulation=2, microbatch=2, recompute="full"),
        Row(tensor=2, sequence_parallel=True, microbatch=2, recompute="selective"),
    ),
    4: (
        Row(tensor=2, pipeline=2, accumulation=4, microbatch=2, schedule="zbv"),
        Row(tensor=2, sequence_parallel=True, pipeline=2, accumulation=2, microbatch=2, schedule="interleaved-1f1b"),
        Row(tensor=2, data=2, zero=3, accumulation=2, microbatch=2, recompute="selective"),
        Row(pipeline=2, data=2, zero=2, accumulation=2, microbatch=2, schedule="interleaved-zero-bubble"),
        Row(pipeline=2, data=2, zero="mixed", accumulation=2, microbatch=2, recompute="mixed"),
        Row(data=4, zero=3, zero_group=2, accumulation=2, microbatch=1, recompute="mixed"),
        Row(tensor=4, microbatch=2),
    ),
}
PRECISIONS = {"float64": "fp64", "float32": "fp32"}
WORST = {"float64": 2e-6, "float32": 2e-3}
"""Of a gradient's largest element, or of a thousandth of the model's."""
WHOLE_COSTS = 300.0
"""So much more an operation on whole tensors costs than one on parts, by which all that can be split is, somehow."""


@dataclass(frozen=True)
class RandomPricing:
    """Prices that mean nothing, the same for the same ``seed``."""

    seed: int

    def node_seconds(self, body: Body, node: Node, strategy: OpStrategy) -> tuple[float, float, float]:
        split = any(placement.state != "replicate" for placement in (*strategy.operands, *strategy.outputs))
        drawn = hashlib.sha256(repr((self.seed, body.name, node.name, strategy)).encode()).digest()
        seconds = 10 ** (4 * int.from_bytes(drawn[:6], "big") / 2**48)
        return seconds * (1 if split else WHOLE_COSTS), 0.0, 0.0

    def strategy_comm_seconds(self, strategy: OpStrategy, *, grows: bool) -> tuple[float, float]:
        return 0.0, 0.0

    def conversion_seconds(self, conversion: Conversion, whole: TensorType) -> tuple[float, float]:
        return 0.0 if conversion.forward == "identity" else 1.0, 0.0

    def parameter_seconds(self, whole: TensorType, placement: Placement) -> float:
        return 0.0


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every probability of dropout at zero, wherever it is written."""
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for name, value in vars(owner).copy().items() if owner is not None else ():
                if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(owner, nn.Dropout))):
                    setattr(owner, name, 0.0)
    return model


@dataclass
class Subject:
    """A model as it is, and its graph."""

    source: ModelSource
    graph: ModelGraph

    def train_plainly(self, total: int) -> tuple[float, Mapping[str, Tensor]]:
        """Loss and gradients of one batch."""
        batch, dtype = batches_of(self.graph, total).at(0), getattr(torch, self.graph.dtype)
        model = build_in(self.source, dtype).train()
        give_start(model, self.graph)
        asked = {name: batch[name] for name in inspect.signature(model.forward).parameters if name in batch}
        with default_dtype(dtype):
            loss = (self.source.loss or _mean)(model(**asked), batch)
        loss.backward()
        return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _mean(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    loss, weight = default_loss(outputs, batch)
    return loss / weight


def trace(file: str, name: str) -> Subject:
    """In float64, else in float32. Raises ShardwrightError where that fails too."""
    source = load_model(f"{ROOT / 'benchmarks' / 'zoo' / file}.py:make", {"name": name}, None)
    source = replace(source, build=lambda build=source.build: without_dropout(build()))  # type: ignore[misc]
    try:
        return Subject(source, trace_model(source, sequence=SEQUENCE, dtype="float64"))
    except ShardwrightError:
        return Subject(source, trace_model(source, sequence=SEQUENCE, dtype="float32"))


def placements_of(graph: ModelGraph, row: Row, seed: int) -> Mapping[str, BodyPlacement] | None:
    options = place_graph(graph, row.tensor, RandomPricing(seed), split=row.sequence_parallel, prices=(0.0,))
    return options[0].placements if options else None


def rows_of(graph: ModelGraph, ranks: int) -> Iterator[Row]:
    """What a model has blocks for, without a split backward pass where gradients begin in two places."""
    for row in ROWS[ranks]:
        enough = row.pipeline == 1 or len(graph.blocks) >= row.pipeline * row.virtual
        if enough and (row.schedule not in ("zbv", "interleaved-zero-bubble") or len(graph.strands) == 1):
            yield row


def examine(subject: Subject, row: Row, seed: int, workers: Workers) -> dict[str, Any]:
    graph = subject.graph
    placements = placements_of(graph, row, seed) if row.tensor > 1 else None
    if row.tensor > 1 and placements is None:
        return {"left_out": "no such placement"}
    plan = make_plan(graph, row, precision=PRECISIONS[graph.dtype], placements=placements)
    loss, expected = subject.train_plainly(plan.batch.total)
    with tempfile.TemporaryDirectory() as directory:
        program, metrics, gradients = (Path(directory) / name for name in ("program", "metrics", "gradients"))
        emit(plan, graph, program, prediction=None, plan_yaml="format: 1\n")
        outcomes = workers.run(program, row.devices, [
            *ARGUMENTS, "--steps", "1", "--metrics", str(metrics), "--dump-gradients", str(gradients),
        ])
        failed = next((outcome.error for outcome in outcomes if outcome.code), None)
        if failed is not None:
            return {"failed": failed}
        line = json.loads(metrics.read_text().splitlines()[0])
        name, tolerances = worst_gradient(torch.load(gradients), expected)
    off = tolerances * TOLERANCE
    return {"loss": abs(line["loss"] / loss - 1), "gradient": off, "parameter": name, "right": off <= WORST[graph.dtype]}


def train_all(wanted: list[str] | None, ranks: int, seed: int, workers: Workers) -> Iterator[tuple[str, dict[str, Any]]]:
    """What became of each model."""
    asked = [(file, name) for file in FILES for name in names_of(file) if not wanted or name in wanted]
    for file, name in asked:
        try:
            subject = trace(file, name)
        except ShardwrightError as error:
            print(f"{name}: {error}", flush=True)
            yield name, {"refused": str(error)}
            continue
        found = {}
        for at, row in enumerate(rows_of(subject.graph, ranks)):
            found[row.label] = examine(subject, row, seed + at, workers)
            print(f"{name} {subject.graph.dtype} {row.label}: {found[row.label]}", flush=True)
        yield name, {"dtype": subject.graph.dtype, "plans": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, choices=sorted(ROWS), default=2)
    parser.add_argument("--model", action="append", help="only these")
    parser.add_argument("--seed", type=int, default=1, help="of the prices")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    workers = Workers(options.ranks)
    results = dict(train_all(options.model, options.ranks, options.seed, workers))
    workers.stop()
    ran = [found for each in results.values() for found in each.get("plans", {}).values() if "left_out" not in found]
    right = sum(found.get("right", False) for found in ran)
    print(f"{len(results)} models, {right} of {len(ran)} plans have the plain model's gradients")
    if not options.model:
        (RESULTS / FILE_OF[options.ranks]).write_text(json.dumps(results, indent=1) + "\n")
    return 0 if right == len(ran) else 1


if __name__ == "__main__":
    sys.exit(main())
