"""Every plan of the test matrix, predicted and rehearsed: calls must be equal, memory equal to the byte or a little above.

    python benchmarks/ledger.py [--precision P]... [--model NAME] [--rehearsed FILE]

Rows of tests/matrix, on every model of it, in float64, float32 and bfloat16 (as far as torch has that): the first rank of every
pipeline stage, and the last rank of all for its calls (it holds the least). Two processes rehearse; each plan takes one to
three seconds. Prints what parts and writes ``benchmarks/results/ledger.json``. ``--rehearsed`` keeps what was rehearsed in a
file and uses it again: for work on the prediction alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from codegen import emit  # noqa: E402
from planner.evaluate.replay import peaks  # noqa: E402
from planner.ir.graph import ModelGraph  # noqa: E402
from planner.ir.placement import REPLICATE, BodyPlacement, shard  # noqa: E402
from planner.ir.plan import Plan  # noqa: E402
from planner.ledger import Call, RankLedger, predict_rank, representatives  # noqa: E402
from planner.ledger.compare import TOLERANCE  # noqa: E402
from planner.trace import load_model, trace_model  # noqa: E402
from tests.matrix.build import Row, make_plan, place_as_megatron  # noqa: E402
from tests.matrix.programs import DTYPES  # noqa: E402
from tests.matrix.test_matrix import CASES, MODELS, ROWS  # noqa: E402
from tests.rehearse.programs import NO_MEMORY  # noqa: E402
from tests.rehearse.server import Server  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "ledger.json"
PRECISIONS = ("fp64", "fp32", "bf16")
NO_BF16 = {"turned"}
"""Models of complex numbers, which torch has no bfloat16 of."""
PROCESSES = 2
MORE = (
    Row(data=4, zero_group=2, zero=3, accumulation=2),
    Row(tensor=2, data=4, zero_group=2, zero=1, accumulation=2, microbatch=3),
    Row(pipeline=2, data=4, zero_group=2, zero=2, accumulation=4, schedule="zbv"), Row(accumulation=16),
    Row(pipeline=2, schedule="zbv", accumulation=8, microbatch=2), Row(pipeline=4, accumulation=8),
    Row(data=4, zero_group=1, zero=2, accumulation=2),
)
"""Shard groups smaller than the data axis, several samples, many micro-batches: no factors of the matrix."""
FROZEN = (
    Row(data=2, zero=3, accumulation=2), Row(data=2, zero=1, accumulation=3), Row(data=2, zero=2), Row(accumulation=2),
    Row(data=2, zero=3, recompute="mixed", accumulation=2), Row(data=2, pipeline=2, zero=3, accumulation=2),
    Row(data=2, pipeline=2, zero=2, accumulation=2, schedule="gpipe"), Row(data=2, pipeline=4, zero=3, accumulation=4),
    Row(data=2, pipeline=2, zero=1, accumulation=2, schedule="interleaved-1f1b"),
)
"""Of the model whose first blocks are not trained."""
SPLIT = (
    Row(pipeline=2, accumulation=2, schedule="interleaved-zero-bubble"), Row(pipeline=2, accumulation=4, schedule="zbv"),
    Row(tensor=2, pipeline=2, accumulation=2, schedule="interleaved-zero-bubble", microbatch=2),
    Row(tensor=2, pipeline=2, accumulation=2, schedule="zbv"),
    Row(pipeline=2, data=2, zero=2, accumulation=2, schedule="zbv"),
    Row(pipeline=2, data=2, zero=2, accumulation=6, schedule="interleaved-zero-bubble"),
)
"""Backward passes in two parts, of models with parameters without dims, and with values that are passed on."""
ODD = (
    *(("corners", row) for row in (
        Row(pipeline=4, tensor=2, sequence_parallel=True, schedule="gpipe", accumulation=8),
        Row(tensor=2, sequence_parallel=True, recompute="full", microbatch=3),
    )),
    *(("odd", row) for row in (
        Row(pipeline=2, accumulation=6, microbatch=2), Row(pipeline=2, data=2, zero=3, accumulation=2, recompute="full"),
        Row(tensor=2, accumulation=2, microbatch=2),
    )),
)
"""Peaks that move, collectives that an inlined expression repeats, tensors that do not lie straight."""


@dataclass(frozen=True)
class Case:
    """One plan."""

    model: str
    precision: str
    row: Row

    @property
    def label(self) -> str:
        return f"{self.model} {self.precision} {self.row.label}-group{self.row.zero_group}-samples{self.row.microbatch}"


def cases() -> Iterator[Case]:
    """Each once."""
    rows = [*CASES, *((model, row) for model in ("gpt", "llama") for row in (*ROWS, *MORE))]
    rows += [("frozen", row) for row in FROZEN] + [(model, row) for model in ("corners", "odd") for row in SPLIT] + list(ODD)
    every = dict.fromkeys(Case(model, precision, row) for precision in PRECISIONS for model, row in rows)
    yield from (case for case in every if not (case.precision == "bf16" and case.model in NO_BF16))


@cache
def graph_of(model: str, precision: str) -> ModelGraph:
    source = load_model(f"{MODELS}:{model}", {}, None)
    return trace_model(source, sequence=20 if "gpt" in model else 24, dtype=DTYPES[precision])


@cache
def placements_of(model: str, precision: str, degree: int, split: bool) -> Mapping[str, BodyPlacement]:
    return place_as_megatron(graph_of(model, precision), degree, shard(1) if split else REPLICATE)


def plan_of(case: Case) -> Plan:
    """The plan that the matrix makes of it."""
    placements = placements_of(case.model, case.precision, case.row.tensor, case.row.sequence_parallel)
    return make_plan(graph_of(case.model, case.precision), case.row, precision=case.precision, placements=placements)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare predicted and rehearsed ledgers over the test matrix.")
    parser.add_argument("--precision", action="append", choices=PRECISIONS)
    parser.add_argument("--model")
    parser.add_argument("--rehearsed", type=Path)
    options = parser.parse_args()
    chosen = [
        case for case in cases() if case.precision in (options.precision or PRECISIONS) and options.model in (None, case.model)
    ]
    rehearsed = _rehearse(chosen, options.rehearsed)
    table = [_compare(case, _ledgers(rehearsed[case.label])) for case in chosen]
    for row in table:
        for said in row["parted"]:
            print(f"{row['plan']}: {said}")
    report = {"summary": _summary(table), "parted": [row for row in table if row["parted"]]}
    print(json.dumps(report["summary"], indent=1))
    if not (options.precision or options.model):
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(1 if report["parted"] else 0)


def _rehearse(chosen: list[Case], kept: Path | None) -> dict[str, Any]:
    """By case, what the programs of its ranks do."""
    known: dict[str, Any] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    lock, servers = threading.Lock(), [Server() for _ in range(PROCESSES)]

    def one(server: Server, case: Case) -> None:
        with tempfile.TemporaryDirectory() as directory:
            with lock:
                plan = plan_of(case)
                emit(plan, graph_of(case.model, case.precision), Path(directory), prediction=None, plan_yaml="format: 1\n")
            ranks = dict.fromkeys((*representatives(plan), plan.mesh.devices - 1))
            ledgers = server.rehearse(Path(directory), list(ranks))
        with lock:
            known[case.label] = [_written(ledger) for ledger in ledgers]
            if kept:
                kept.write_text(json.dumps(known))

    def some(server: Server, mine: list[Case]) -> None:
        for case in mine:
            one(server, case)
        server.stop()

    left = [case for case in chosen if case.label not in known]
    with ThreadPoolExecutor(PROCESSES) as pool:
        done = [pool.submit(some, server, left[at::PROCESSES]) for at, server in enumerate(servers)]
        for future in done:
            future.result()
    return known


def _written(ledger: RankLedger) -> dict[str, Any]:
    calls = [[call.kind, call.axis, call.group, call.size_bytes, count] for call, count in sorted(ledger.calls.items())]
    return {
        "rank": ledger.rank, "stage": ledger.stage, "calls": calls, "memory_bytes": dict(ledger.memory_bytes),
        "streams_bytes": ledger.streams_bytes,
    }


def _ledgers(items: list[dict[str, Any]]) -> list[RankLedger]:
    return [
        RankLedger(
            item["rank"], item["stage"], {Call(*row[:4]): row[4] for row in item["calls"]}, item["memory_bytes"],
            item["streams_bytes"],
        )
        for item in items
    ]


def _compare(case: Case, ledgers: list[RankLedger]) -> dict[str, Any]:
    """How one plan's prediction parts from its ranks' rehearsals."""
    plan, graph = plan_of(case), graph_of(case.model, case.precision)
    parted, equal, streams, first = [], 0, 0, set(representatives(plan))
    predicted = peaks(plan, graph)
    calls = 0
    for ledger in ledgers:
        said = predict_rank(plan, graph, ledger.rank, NO_MEMORY).calls
        calls += len(ledger.calls)
        parted += [
            f"rank {ledger.rank}, {call}: predicted {said.get(call, 0)}, rehearsed {ledger.calls.get(call, 0)}"
            for call in sorted({*said, *ledger.calls}) if said.get(call, 0) != ledger.calls.get(call, 0)
        ]
        if ledger.rank not in first:
            continue
        at: Mapping[str, int] = dict(predicted[ledger.stage].at.items())
        apart = {name: at[name] - size for name, size in ledger.memory_bytes.items() if at[name] != size}
        equal += not apart
        cached, beside = predicted[ledger.stage].cached_bytes, ledger.streams_bytes - sum(ledger.memory_bytes.values())
        streams += cached == beside
        if cached != beside:
            parted.append(f"rank {ledger.rank}, of streams: predicted {cached}, rehearsed {beside}")
        worst = any(not 0 <= more <= TOLERANCE * ledger.memory_bytes[name] for name, more in apart.items())
        if apart:
            total = sum(ledger.memory_bytes.values())
            parted.append(f"rank {ledger.rank}, of {total} bytes{' beyond the tolerance' if worst else ''}: {apart}")
    return {
        "plan": case.label, "ranks": len(first), "equal_memory": equal, "equal_streams": streams, "calls": calls,
        "parted": parted,
    }


def _summary(table: list[dict[str, Any]]) -> dict[str, int]:
    return {
        "plans": len(table), "ranks": sum(row["ranks"] for row in table),
        "ranks_with_equal_memory": sum(row["equal_memory"] for row in table),
        "ranks_with_equal_streams": sum(row["equal_streams"] for row in table),
        "kinds_of_calls": sum(row["calls"] for row in table),
        "parted_calls": sum("Call(" in said for row in table for said in row["parted"]),
        "ranks_beyond_the_tolerance": sum("beyond" in said for row in table for said in row["parted"]),
    }


if __name__ == "__main__":
    main()
