"""`shardwright rehearse`: what the plan predicts beside what the emitted program does, on fake tensors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.ir.errors import Disagreement, InputError

if TYPE_CHECKING:
    from planner.bundle import Bundle
    from planner.ledger import RankLedger

_AGAIN = "emit it again with `shardwright emit`"
_FAILS = f"where it was changed since, {_AGAIN}; as it was emitted, report it"
_SIDES = ("plan.yaml", "plan.graph.json", "plan.cluster.yaml", "train.py", "runtime/rehearsal.py")


@dataclass(frozen=True)
class Comparison:
    """Both sides of some ranks' ledgers, in the same order. ``reserve_bytes``: modelled, and not seen by a rehearsal."""

    predicted: tuple[RankLedger, ...]
    rehearsed: tuple[RankLedger, ...]
    reserve_bytes: tuple[int, ...]


def rehearse(
    program: Annotated[Path, typer.Argument(metavar="PROGRAM", help="A directory that `shardwright emit` wrote.")],
    rank: Annotated[int | None, typer.Option(help="The rank to rehearse (default: 0).")] = None,
    all_: Annotated[bool, typer.Option("--all", help="One rank of every pipeline stage.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on standard output.")] = False,
) -> None:
    """Run a program's real training step on fake tensors; compare it with what its plan predicts (exit 1: they part)."""
    from planner.ledger import compare

    bundle = _bundle(program)
    both = _compare(program, bundle, _ranks(bundle, rank, all_))
    parted = [difference for pair in zip(both.predicted, both.rehearsed, strict=True) for difference in compare(*pair)]
    if json_:
        print(json.dumps(_report(both, agree=not parted)))
    else:
        from planner.ledger.show import render
        from planner.show import print_page

        print_page(render(both.predicted, both.rehearsed, both.reserve_bytes, parted))
    if parted:
        raise typer.Exit(Disagreement.exit_code)


def _bundle(program: Path) -> Bundle:
    """The plan that a program was emitted from. Raises InputError where the directory is no such program."""
    from planner.bundle import read

    if not program.is_dir():
        wrong = "is no folder" if program.exists() else "is not there"
        raise InputError(str(program), wrong, "give the folder that `shardwright emit` wrote")
    for name in _SIDES:
        if not (program / name).is_file():
            raise InputError(str(program), f"holds no {name}", _AGAIN)
    return read(program / "plan.yaml")


def _ranks(bundle: Bundle, rank: int | None, all_: bool) -> tuple[int, ...]:
    from planner.ledger import representatives

    devices = bundle.plan.mesh.devices
    if all_ and rank is not None:
        raise InputError("--rank", "is given together with --all", "one of them")
    if rank is not None and not 0 <= rank < devices:
        raise InputError("--rank", f"is {rank}", f"a rank from 0 to {devices - 1}")
    return representatives(bundle.plan) if all_ else (rank or 0,)


def _compare(program: Path, bundle: Bundle, ranks: Sequence[int]) -> Comparison:
    from planner.ledger import Place, predict_rank

    plan = bundle.plan
    memories = [
        next(
            item.memory for stage, item in zip(plan.stages, bundle.prediction.stages, strict=True)
            if plan.rank_of_stage(stage.index) == Place.of(rank, plan.mesh).pipeline
        )
        for rank in ranks
    ]
    predicted = tuple(
        predict_rank(plan, bundle.graph, rank, memory) for rank, memory in zip(ranks, memories, strict=True)
    )
    chip = bundle.cluster.chip
    rehearsed = run(program, ranks, None if chip.is_host else chip.memory_bytes - max(memory.reserve for memory in memories))
    return Comparison(predicted, rehearsed, tuple(memory.reserve for memory in memories))


def run(program: Path, ranks: Sequence[int], capacity: int | None) -> tuple[RankLedger, ...]:
    """Rehearse ranks of a program with its own copy of the runtime, in as many processes as there are processors.
    ``capacity``: bytes of an accelerator that torch's allocator can have, whose kernels then keep what they keep; None: the
    program runs on a CPU.

    Raises Disagreement where the program's step fails.
    """
    from hardware_profiles.measure import usable_cores

    workers = min(len(ranks), max(1, int(usable_cores())))
    processes = [
        subprocess.Popen(
            [
                sys.executable, "-m", "runtime.rehearsal",
                *(["--kernels=cpu"] if capacity is None else ["--kernels=cuda", f"--capacity={capacity}"]),
                *(f"--rank={rank}" for rank in ranks[first::workers]),
            ],
            cwd=program, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for first in range(workers)
    ]
    answers = [process.communicate() for process in processes]
    found: dict[int, RankLedger] = {}
    for process, (out, problem) in zip(processes, answers, strict=True):
        if process.returncode:
            raise Disagreement(str(program), f"its step fails: {_cause(problem) or process.returncode}", _FAILS)
        for item in _answer(program, out):
            found[item["rank"]] = _ledger(item, on_accelerator=capacity is not None)
    return tuple(found[rank] for rank in ranks)


def _answer(program: Path, out: str) -> list[dict[str, Any]]:
    """What a process found. Raises Disagreement where the program has ended it before, as one that succeeds."""
    try:
        return list(json.loads(out.splitlines()[-1])["ranks"])
    except (IndexError, ValueError, KeyError, TypeError):
        raise Disagreement(str(program), "its step fails: it ends Python before the step is over", _FAILS) from None


def _cause(problem: str) -> str:
    """The first exception of a chain of tracebacks, in one line; torch puts the rank before every line."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in problem.splitlines()]
    return next((line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception)\b", line)), lines[-1] if lines else "")


def _ledger(item: Mapping[str, Any], *, on_accelerator: bool) -> RankLedger:
    """A rank's answer. On a host there is no caching allocator."""
    from planner.ledger import Call, RankLedger

    calls = {Call(row["kind"], row["axis"], row["group"], row["bytes"]): row["count"] for row in item["collectives"]}
    return RankLedger(
        item["rank"], item["stage"], calls, item["memory_bytes"], item["streams_bytes"],
        item["reserved_bytes"] if on_accelerator else None, item["flushes"] if on_accelerator else 0,
    )


def _report(both: Comparison, *, agree: bool) -> dict[str, object]:
    """The contract's object, and what an accelerator's allocator reserves."""
    ranks = [
        {**_rows(done), **_reserved(done.reserved_bytes), **({} if done.reserved_bytes is None else {"flushes": done.flushes})}
        for done in both.rehearsed
    ]
    predicted = [
        {**_rows(said), "reserve_bytes": reserve, **_reserved(done.reserved_bytes and said.streams_bytes)}
        for said, done, reserve in zip(both.predicted, both.rehearsed, both.reserve_bytes, strict=True)
    ]
    return {"ranks": ranks, "predicted": predicted, "agree": agree}


def _reserved(value: int | None) -> dict[str, int]:
    return {} if value is None else {"reserved_bytes": value}


def _rows(ledger: RankLedger) -> dict[str, object]:
    return {
        "rank": ledger.rank, "stage": ledger.stage,
        "collectives": [
            {"kind": call.kind, "axis": call.axis, "group": call.group, "bytes": call.size_bytes, "count": count}
            for call, count in sorted(ledger.calls.items())
        ],
        "memory_bytes": dict(ledger.memory_bytes),
    }
