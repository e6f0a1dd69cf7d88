"""Small models of some eighty families: traced, emitted under six plans, rehearsed, and compared with what was predicted.

    python benchmarks/run_zoo.py [--precision fp32|bf16] [--model NAME]...

Calls must be equal, memory equal to the byte or a little above, as in ``benchmarks/ledger.py``. Prints a line for every rank
that parts, and what could not be planned; writes ``benchmarks/results/zoo.json`` or ``zoo_bf16.json``. Needs transformers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402

from codegen import emit  # noqa: E402
from hardware_profiles import resolve_cluster  # noqa: E402
from planner.costing import Pricing  # noqa: E402
from planner.evaluate.heap import CATEGORIES  # noqa: E402
from planner.evaluate.replay import peaks  # noqa: E402
from planner.ir.errors import ShardwrightError  # noqa: E402
from planner.ir.graph import ModelGraph  # noqa: E402
from planner.ir.placement import BodyPlacement  # noqa: E402
from planner.ledger import predict_rank, representatives  # noqa: E402
from planner.placement import place_graph  # noqa: E402
from planner.placement.space import DIVIDED_STATE  # noqa: E402
from planner.trace import load_model, trace_model  # noqa: E402
from tests.matrix.build import Row, make_plan  # noqa: E402
from tests.rehearse.programs import NO_MEMORY  # noqa: E402
from tests.rehearse.server import Server  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
FILE_OF = {"fp32": "zoo.json", "bf16": "zoo_bf16.json"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
FILES = ("texts", "images", "diffusion", "signals", "recent", "pictures", "unlike")
RANDOM = ("draws",)
"""Of models whose numbers no other run has."""
SEQUENCE = 32
PIPELINE = Row(pipeline=2, accumulation=4, microbatch=2)
ROWS = (PIPELINE, Row(data=2, zero=3, accumulation=2, recompute="full"))
SPLIT = Row(pipeline=2, accumulation=4, microbatch=2, schedule="zbv")
TENSOR = (
    Row(tensor=2, pipeline=2, accumulation=2, microbatch=2),
    Row(tensor=2, data=2, sequence_parallel=True, zero=1, accumulation=2, recompute="selective"),
)
SPLIT_TENSOR = Row(tensor=2, pipeline=2, accumulation=2, microbatch=2, schedule="zbv")
CLUSTER = resolve_cluster("dgx-h100:1")


def rows_of(graph: ModelGraph) -> Iterator[Row]:
    """The plans of a model: what it has blocks for, and no split backward pass where gradients begin in two places."""
    if len(graph.blocks) >= 2:
        yield PIPELINE
    if len(graph.blocks) >= 4 and len(graph.strands) == 1:
        yield from (SPLIT, SPLIT_TENSOR)
    yield ROWS[1]
    yield from TENSOR if len(graph.blocks) >= 2 else TENSOR[1:]


def placements_of(graph: ModelGraph, row: Row) -> Mapping[str, BodyPlacement] | None:
    """The quickest that divide the parameters; None where there are none."""
    pricing = Pricing(CLUSTER, row.tensor, row.microbatch)
    options = place_graph(graph, row.tensor, pricing, split=row.sequence_parallel, prices=(DIVIDED_STATE,))
    return options[0].placements if options else None


def compare(graph: ModelGraph, row: Row, precision: str, server: Server) -> Iterator[dict[str, Any]]:
    """Each rank that stands for others: calls of which the counts differ, bytes by category, predicted and rehearsed."""
    placements = placements_of(graph, row) if row.tensor > 1 else None
    if row.tensor > 1 and placements is None:
        return
    plan = make_plan(graph, row, precision=precision, placements=placements)
    ranks = representatives(plan)
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "program"
        emit(plan, graph, program, prediction=None, plan_yaml="format: 1\n")
        rehearsed = server.rehearse(program, ranks)
    each = plan.mesh.devices // plan.mesh.pipeline
    predicted = peaks(plan, graph)
    for rank, found in zip(ranks, rehearsed, strict=True):
        said, calls = predicted[rank // each].at, predict_rank(plan, graph, rank, NO_MEMORY).calls
        yield {
            "plan": row.label, "rank": rank,
            "calls": {
                str(call): [calls.get(call, 0), found.calls.get(call, 0)]
                for call in sorted({*calls, *found.calls}) if calls.get(call, 0) != found.calls.get(call, 0)
            },
            "parts": {c: [said[c], found.memory_bytes[c]] for c in CATEGORIES if said[c] != found.memory_bytes[c]},
            "total": [sum(said.values()), sum(found.memory_bytes.values())],
        }


def examine(file: str, name: str, precision: str, server: Server) -> dict[str, Any]:
    try:
        source = load_model(f"{ROOT / 'benchmarks' / 'zoo' / file}.py:make", {"name": name}, None)
        graph = trace_model(source, sequence=SEQUENCE, dtype=DTYPES[precision])
        ranks = [rank for row in rows_of(graph) for rank in compare(graph, row, precision, server)]
    except ShardwrightError as error:
        return {"refused": str(error)}
    except AssertionError as error:  # of the server: a program's step fails
        return {"failed": str(error)}
    return {"blocks": len(graph.blocks), "kinds": len(graph.bodies), "ranks": ranks}


def show(name: str, found: dict[str, Any]) -> None:
    said = found.get("refused") or found.get("failed")
    if said:
        print(f"{name}: {said}", flush=True)
        return
    parts = [rank for rank in found["ranks"] if rank["parts"] or rank["calls"]]
    print(f"{name}: {found['blocks']} blocks of {found['kinds']} kinds, {len(found['ranks']) - len(parts)} of "
          f"{len(found['ranks'])} ranks equal to the byte", flush=True)
    for rank in parts:
        said, real = rank["total"]
        apart = f"{rank['parts']} {rank['calls'] or ''}"
        print(f"    {rank['plan']} rank {rank['rank']}: {said / real:.4f} of {real:,} bytes; {apart}", flush=True)


def names_of(file: str) -> tuple[str, ...]:
    return tuple(importlib.import_module(f"benchmarks.zoo.{file}").NAMES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", help="only these")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="fp32")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    server = Server()
    results: dict[str, Any] = {}
    try:
        for file in (*FILES, *RANDOM):
            for name in names_of(file):
                if not options.model or name in options.model:
                    results[name] = examine(file, name, options.precision, server)
                    show(name, results[name])
    finally:
        server.stop()
    ranks = [rank for found in results.values() for rank in found.get("ranks", ())]
    print(f"{len(results)} models, {sum('ranks' in found for found in results.values())} planned; "
          f"{sum(not rank['parts'] for rank in ranks)} of {len(ranks)} ranks equal to the byte, "
          f"{sum(not rank['calls'] for rank in ranks)} in every call")
    if not options.model:
        (RESULTS / FILE_OF[options.precision]).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
