"""Plans found freely against the configurations that experts published, under one evaluator.

    python benchmarks/against_experts.py [--families TEXT] [--devices A B] [--jobs N] [--time-limit S]

Every fully configured run of the packaged tables is a job (model, cluster, batch, precision) and a configuration. The
configuration is evaluated as it is, the job is planned freely, both for the engine that programs are emitted for, at the same
precision, their memory replayed as `plan` does it: what is compared is the decisions. Runs over context or expert parallelism
are left out, because programs cannot be emitted with them. Prints the table, the largest ratio first, and writes
``results/against_experts.json`` beside this file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hardware_profiles import Cluster
from planner.commands.validate import DATA, RUNS
from planner.evaluate import evaluate_plan, replayed
from planner.fitting import fitted
from planner.ir.errors import ShardwrightError
from planner.ir.graph import ModelGraph
from planner.ir.plan import Plan, Prediction
from planner.search import Request
from planner.search.engine import ENGINE
from planner.validate.prepare import PreparedRow, prepare_rows
from planner.validate.rows import read_rows, scored_rows

RESULTS = Path(__file__).parent / "results" / "against_experts.json"


@dataclass(frozen=True)
class Comparison:
    """One job. ``expert_s`` is None where the expert's configuration does not fit under the engine, ``ours_s`` where the search
    found nothing; ``ratio``: the expert's step over ours."""

    family: str
    row: str
    devices: int
    batch: int
    expert: str
    expert_s: float | None
    ours: str
    ours_s: float | None
    gap: float | None
    seconds: float
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.expert_s is None or self.ours_s is None else self.expert_s / self.ours_s


def main() -> None:
    """Compare, print and write."""
    options = _options()
    rows = [row for name in RUNS for row in scored_rows(read_rows(DATA / name)) if options.families in row.family]
    least, most = options.devices
    rows = [row for row in rows if least <= (row.devices or 0) <= most]
    prepared = prepare_rows(row for row in rows if row.context == row.expert == 1 and not row.experts)
    jobs = list(_jobs(prepared.rows))[: options.jobs]
    compared = []
    for done, configurations in enumerate(jobs, start=1):
        item = compare(configurations, options.time_limit)
        compared.append(item)
        print(f"[{done}/{len(jobs)}] {_line(item)}", file=sys.stderr, flush=True)
        _write(compared)
    compared.sort(key=lambda item: item.ratio or 0.0, reverse=True)
    print("\n".join(_line(item) for item in compared))
    known = [item.ratio for item in compared if item.ratio is not None]
    worse = sum(ratio < 1.0 for ratio in known)
    print(f"{len(compared)} jobs, {len(known)} compared: ours is slower in {worse}; {len(prepared.skipped)} runs not prepared")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plans found freely against published configurations.")
    parser.add_argument("--families", default="", help="only families whose name has this text")
    parser.add_argument("--devices", type=int, nargs=2, default=(1, 1 << 30), help="only clusters of so many devices: from, to")
    parser.add_argument("--jobs", type=int, default=None, help="at most so many jobs, spread over the engines")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of solving, each job")
    return parser.parse_args()


def _jobs(rows: Iterable[PreparedRow]) -> Iterator[list[PreparedRow]]:
    """Configurations of the same job together; one job of each engine, small clusters first, then the next of each."""
    jobs: dict[tuple[object, ...], list[PreparedRow]] = {}
    for item in rows:
        job = item.job
        key = (job.shape, job.layers, job.cluster.fingerprint, job.batch.total, job.precision)
        jobs.setdefault(key, []).append(item)
    engines: dict[str, list[list[PreparedRow]]] = {}
    for configurations in sorted(jobs.values(), key=lambda members: members[0].job.mesh.devices):
        engines.setdefault(configurations[0].job.engine.partition("+")[0], []).append(configurations)
    for turn in range(max(map(len, engines.values()), default=0)):
        for members in engines.values():
            if turn < len(members):
                yield members[turn]


def compare(configurations: list[PreparedRow], time_limit_s: float) -> Comparison:
    """The quickest configuration of a job that fits, against the plan found freely."""
    first = configurations[0]
    graph, cluster, job = first.counted.graph, first.job.cluster, first.job
    experts = [_evaluated(item, graph, cluster) for item in configurations]
    fitting = [pair for pair in experts if pair is not None and pair[1].fits]
    best = min(fitting, key=lambda pair: pair[1].step_s, default=None)
    begin = time.perf_counter()
    request = Request(job.batch.total, job.sequence, job.precision, time_limit_s=time_limit_s)
    note = "" if best is not None else f"the published configuration does not fit, or cannot run, under {ENGINE}"
    try:
        result = fitted(graph, cluster, request)
    except ShardwrightError as error:
        result, note = None, str(error)
    return Comparison(
        family=first.row.family, row=first.row.row_id, devices=job.mesh.devices, batch=job.batch.total,
        expert=_said((best or experts[0] or (first.plan,))[0]), expert_s=None if best is None else best[1].step_s,
        ours="" if result is None else _said(result.plan), ours_s=None if result is None else result.prediction.step_s,
        gap=None if result is None else result.optimality_gap, seconds=time.perf_counter() - begin, note=note,
    )


def _evaluated(item: PreparedRow, graph: ModelGraph, cluster: Cluster) -> tuple[Plan, Prediction] | None:
    """A configuration under the engine that plans are made for; None where the evaluator refuses it."""
    plan = replace(item.plan, engine=ENGINE)
    try:
        return plan, replayed(evaluate_plan(plan, graph, cluster), plan, graph, cluster)
    except ShardwrightError:
        return None


def _said(plan: Plan) -> str:
    """A configuration in a few words."""
    middle = plan.stages[len(plan.stages) // 2].decisions
    mesh, layer = plan.mesh, middle[len(middle) // 2]
    return (
        f"pp{mesh.pipeline} dp{mesh.data} tp{mesh.tensor} mb{plan.batch.micro} {plan.schedule.name} v{plan.schedule.virtual} "
        f"zero{layer.zero} {layer.recompute}"
    )


def _line(item: Comparison) -> str:
    seconds = ["-" if value is None else f"{value:.4g} s" for value in (item.expert_s, item.ours_s)]
    ratio = "-" if item.ratio is None else f"{item.ratio:.3f}"
    gap = "-" if item.gap is None else f"{100 * item.gap:.1f}%"
    return (
        f"{item.row}: expert {item.expert} {seconds[0]}; ours {item.ours} {seconds[1]} (gap {gap}, {item.seconds:.0f} s); "
        f"ratio {ratio}{'; ' + item.note if item.note else ''}"
    )


def _write(compared: list[Comparison]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps([{**asdict(item), "ratio": item.ratio} for item in compared], indent=1) + "\n")


if __name__ == "__main__":
    main()
