"""Plans found freely against the configurations that experts published, under one evaluator.

    python benchmarks/against_experts.py [--families TEXT] [--devices A B] [--jobs N] [--time-limit S] [--resume]

Every fully configured run of the packaged tables is a configuration of a job (model, cluster, batch, sequence, precision).
Every configuration is evaluated as it is, every job is planned freely once, all for the engine that programs are emitted for,
at the same precision, memory replayed as `plan` does it: what is compared is the decisions. Runs with experts are left out:
their model is no file that could be planned. Programs cannot be emitted with context parallelism, so no plan has it; runs that
have are compared all the same. ``results/against_experts.json`` beside this file is
written job by job (``--resume`` keeps what it has), ``results/against_experts.md`` at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from hardware_profiles import Cluster
from planner.commands.validate import DATA, RUNS
from planner.evaluate import evaluate_plan
from planner.fitting import fitted
from planner.ir.errors import ShardwrightError
from planner.ir.graph import ModelGraph
from planner.ir.plan import DTYPES, Mesh, Plan, Prediction
from planner.ir.repeat import repeat_blocks
from planner.search import Request
from planner.search.candidates import Candidate, enumerate_candidates
from planner.search.engine import ENGINE
from planner.validate.jobs import ModelShape, RowJob
from planner.validate.prepare import TRACED_LAYERS, PreparedRow, prepare_rows, trace_shape
from planner.validate.rows import Row, read_rows

RESULTS = Path(__file__).parent / "results"
MUCH = 1.5
"""Ratios above this are listed with where the seconds went."""
LONGER = 4
"""A job whose plan is slower than the published one is planned again with so many times the seconds."""


@dataclass(frozen=True)
class Published:
    """A published configuration. ``step_s`` is None where the evaluator refuses it (``why``); ``searched``: whether its mesh,
    micro-batch, schedule and shard group are a candidate of the search."""

    row: str
    said: str
    step_s: float | None
    fits: bool
    searched: bool
    breakdown_s: dict[str, float]
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """One job. ``step_s`` is None where the search found nothing (``why``); ``seconds``: of the whole planning; ``quickly_s``:
    the step found with the ordinary limit, where that was slower than the published one and the job was planned again."""

    rows: tuple[str, ...]
    family: str
    devices: int
    batch: int
    published: tuple[Published, ...]
    said: str
    step_s: float | None
    gap: float | None
    breakdown_s: dict[str, float]
    seconds: float
    time_limit_s: float
    why: str = ""
    quickly_s: float | None = None

    @property
    def best(self) -> Published | None:
        """The quickest published configuration that fits."""
        fitting = [item for item in self.published if item.fits and item.step_s is not None]
        return min(fitting, key=lambda item: item.step_s or 0.0, default=None)

    @property
    def ratio(self) -> float | None:
        """The quickest published step over ours."""
        return None if self.best is None or self.best.step_s is None or not self.step_s else self.best.step_s / self.step_s


def main() -> None:
    """Compare, print and write."""
    options = _options()
    rows = [row for name in RUNS for row in read_rows(DATA / name) if row.configured and options.families in row.family]
    least, most = options.devices
    rows = [row for row in rows if least <= (row.devices or 0) <= most]
    dense = [row for row in rows if row.expert == 1 and not row.experts]
    compared = _read(RESULTS / "against_experts.json") if options.resume else []
    known = {item.rows for item in compared}
    prepared = prepare_rows(dense)
    jobs = list(_jobs(prepared.rows))[: options.jobs]
    for done, configurations in enumerate(jobs, start=1):
        if tuple(item.row.row_id for item in configurations) in known:
            continue
        compared.append(compare(configurations, options.time_limit))
        print(f"[{done}/{len(jobs)}] {_line(compared[-1])}", file=sys.stderr, flush=True)
        if (compared[-1].ratio or 1.0) < 1.0:
            longer = compare(configurations, LONGER * options.time_limit)
            compared[-1] = replace(longer, quickly_s=compared[-1].step_s)
        _write(compared)
    text = _table(compared, rows, dense, [(item.row.row_id, item.why) for item in prepared.skipped])
    (RESULTS / "against_experts.md").write_text(text)
    print(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plans found freely against published configurations.")
    parser.add_argument("--families", default="", help="only families whose name has this text")
    parser.add_argument("--devices", type=int, nargs=2, default=(1, 1 << 30), help="only clusters of so many devices: from, to")
    parser.add_argument("--jobs", type=int, default=None, help="at most so many jobs, spread over the engines")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of solving, each job")
    parser.add_argument("--resume", action="store_true", help="keep the jobs that the results have")
    return parser.parse_args()


def _jobs(rows: Iterable[PreparedRow]) -> Iterator[list[PreparedRow]]:
    """Configurations of the same job together; one job of each engine, small clusters first, then the next of each."""
    jobs: dict[tuple[object, ...], list[PreparedRow]] = {}
    for item in rows:
        job = item.job
        key = (_whole(item.job), job.layers, job.cluster.fingerprint, job.batch.total, job.sequence, job.precision)
        jobs.setdefault(key, []).append(item)
    engines: dict[str, list[list[PreparedRow]]] = {}
    for configurations in sorted(jobs.values(), key=lambda members: members[0].job.mesh.devices):
        engines.setdefault(configurations[0].job.engine.partition("+")[0], []).append(configurations)
    for turn in range(max(map(len, engines.values()), default=0)):
        for members in engines.values():
            if turn < len(members):
                yield members[turn]


def _whole(job: RowJob) -> ModelShape:
    """What is traced where every rank has whole samples."""
    return replace(job.shape, sequence=job.sequence)


def _whole_graph(configurations: Sequence[PreparedRow]) -> ModelGraph:
    """A job's graph, of whole samples."""
    for item in configurations:
        if item.job.mesh.context == 1:
            return item.counted.graph
    job = configurations[0].job
    return repeat_blocks(trace_shape(_whole(job), TRACED_LAYERS, DTYPES[job.precision]).on_accelerator, job.layers)


def compare(configurations: Sequence[PreparedRow], time_limit_s: float) -> Comparison:
    """A job's published configurations against the plan found freely."""
    first = configurations[0]
    job, graph = first.job, _whole_graph(configurations)
    cluster = _filled(job.cluster, job.mesh.devices)
    request = Request(job.batch.total, job.sequence, job.precision, time_limit_s=time_limit_s)
    searched = {shape for candidate in enumerate_candidates(graph, cluster, request) for shape in _shapes(candidate)}
    published = tuple(_published(item, cluster, searched) for item in configurations)
    begin, why = time.perf_counter(), ""
    try:
        result = fitted(graph, cluster, request)
    except ShardwrightError as error:
        result, why = None, str(error)
    return Comparison(
        tuple(item.row.row_id for item in configurations), first.row.family, job.mesh.devices, job.batch.total, published,
        said="" if result is None else _said(result.plan), step_s=None if result is None else result.prediction.step_s,
        gap=None if result is None else result.optimality_gap,
        breakdown_s={} if result is None else _seconds(result.prediction),
        seconds=time.perf_counter() - begin, time_limit_s=time_limit_s, why=why,
    )


def _filled(cluster: Cluster, devices: int) -> Cluster:
    """As many devices as the job has; where they do not fill its nodes (256 in racks of 72), as many of each."""
    if cluster.devices == devices:
        return cluster
    each, rest = divmod(devices, cluster.nodes)
    assert not rest and cluster.levels[0].size == cluster.devices_per_node
    first, *others = cluster.levels
    levels = [replace(first, size=each), *(replace(level, size=min(level.size, devices)) for level in others)]
    return replace(cluster, devices_per_node=each, levels=tuple(levels))


Shape = tuple[Mesh, int, int, str, int, int]
"""Of a plan: mesh, micro-batch, accumulation, schedule, virtual stages, ZeRO group."""


def _shapes(candidate: Candidate) -> Iterator[Shape]:
    """The shapes of plans that a candidate stands for."""
    for group in candidate.groups:
        yield candidate.mesh, candidate.micro, candidate.accumulation, candidate.schedule, candidate.virtual, group


def _published(item: PreparedRow, cluster: Cluster, searched: Set[Shape]) -> Published:
    """A configuration under the engine that plans are made for, of a rank's part of the sequence. ``searched``: the shapes of
    the plans that it competes with."""
    plan = replace(item.plan, engine=ENGINE)
    mesh, batch, schedule = plan.mesh, plan.batch, plan.schedule
    name = "1f1b" if mesh.pipeline == 1 else schedule.name
    alike = {(mesh, batch.micro, batch.accumulation, name, schedule.virtual, group) for group in (plan.zero_group, mesh.data)}
    known = not alike.isdisjoint(searched)
    try:
        seen = evaluate_plan(plan, item.counted.graph, cluster)
    except ShardwrightError as error:
        return Published(item.row.row_id, _said(plan), None, False, known, {}, str(error))
    return Published(item.row.row_id, _said(plan), seen.step_s, seen.fits, known, _seconds(seen))


def _seconds(prediction: Prediction) -> dict[str, float]:
    return {name: round(value, 6) for name, value in asdict(prediction.breakdown).items() if value > 0}


def _said(plan: Plan) -> str:
    """A configuration in a few words."""
    middle = plan.stages[len(plan.stages) // 2].decisions
    mesh, layer = plan.mesh, middle[len(middle) // 2]
    context = f"cp{mesh.context} " if mesh.context > 1 else ""
    group = "" if layer.zero < 2 or plan.zero_group == mesh.data else f"/{plan.zero_group}"
    return (
        f"pp{mesh.pipeline} dp{mesh.data} {context}tp{mesh.tensor} "
        f"mb{plan.batch.micro} {plan.schedule.name} v{plan.schedule.virtual} "
        f"zero{layer.zero}{group} {layer.recompute}"
    )


def _line(item: Comparison) -> str:
    best = item.best or item.published[0]
    seconds = ["-" if value is None else f"{value:.4g} s" for value in (best.step_s, item.step_s)]
    ratio = "-" if item.ratio is None else f"{item.ratio:.3f}"
    gap = "-" if item.gap is None else f"{100 * item.gap:.1f}%"
    why = item.why or ("" if item.best else best.why or "does not fit")
    return (
        f"{best.row}: expert {best.said} {seconds[0]}; ours {item.said} {seconds[1]} (gap {gap}, {item.seconds:.0f} s); "
        f"ratio {ratio}{'; ' + why if why else ''}"
    )


def _read(path: Path) -> list[Comparison]:
    if not path.exists():
        return []
    stored = json.loads(path.read_text())
    return [
        Comparison(**{
            **item, "rows": tuple(item["rows"]), "published": tuple(Published(**each) for each in item["published"]),
        })
        for item in stored
    ]


def _write(compared: Sequence[Comparison]) -> None:
    RESULTS.mkdir(exist_ok=True)
    partial = RESULTS / "against_experts.json.partial"
    partial.write_text("[\n" + ",\n".join(json.dumps(asdict(item)) for item in compared) + "\n]\n")
    partial.replace(RESULTS / "against_experts.json")


def _table(
    compared: Sequence[Comparison], rows: Sequence[Row], dense: Sequence[Row], skipped: Sequence[tuple[str, str]]
) -> str:
    """The results as a page: counts, where ours is slower, where it is much quicker, every job."""
    known = sorted((item for item in compared if item.ratio is not None), key=lambda item: -(item.ratio or 0.0))
    configurations = [each for item in compared for each in item.published]
    fitting = [each for each in configurations if each.fits]
    slower = [item for item in known if item.ratio is not None and item.ratio < 1.0]
    again = [item for item in known if item.quickly_s is not None]
    much = [item for item in known if item.ratio is not None and item.ratio > MUCH]
    ratios = [item.ratio or 0.0 for item in known]
    lines = [
        "# Plans found freely against published configurations",
        "",
        f"`python benchmarks/against_experts.py --time-limit {min(item.time_limit_s for item in compared):g}`. "
        f"Fully configured runs: {len(rows)}; left out, with experts: {len(rows) - len(dense)}; "
        f"not prepared: {len(skipped)}. Jobs: {len(compared)}, with {len(configurations)} configurations, of which "
        f"{len(fitting)} fit under the engine of emitted programs; {len(known)} jobs have at least one that does.",
        "",
        f"Ours is slower in {len(slower)} of {len(known)} jobs; ratio (the quickest published step over ours) from "
        f"{min(ratios, default=0):.3f} to {max(ratios, default=0):.3f}, median {median(ratios) if ratios else 0:.3f}; "
        f"above {MUCH}: {len(much)}.",
        "",
    ]
    lines += [f"Planned again with {LONGER} times the seconds, because ours was slower: {len(again)}.", ""]
    lines += [f"- {item.rows[0]}: {item.quickly_s:.4g} s at first, then {item.step_s:.4g} s" for item in again]
    lines += [""] if again else []
    lines += ["## Where ours is slower", "", *([f"- {_explained(item)}" for item in slower] or ["None."]), ""]
    families = Counter(item.family for item in much)
    most = [next(item for item in much if item.family == name) for name in families]
    lines += [
        f"## Where ours is more than {MUCH} times quicker", "", "Of every family how many jobs, and the largest ratio:", "",
        *(f"- {families[item.family]} of {item.family}. {_explained(item)}" for item in most), "",
    ]
    beyond = [each for each in configurations if not each.searched]
    lines += [
        "## Published configurations that are no candidate of the search", "",
        "Context parallelism, which programs cannot have, or virtual stages and axes that the search does not reach:", "",
        *(f"- {each.row}: {each.said}{'' if each.fits else ' (does not fit)'}" for each in beyond), "",
    ]
    nothing = [item for item in compared if item.ratio is None]
    quicker = sum(1 for item in nothing if item.step_s and item.step_s <= min(each.step_s or 0.0 for each in item.published))
    lines += [
        "## Jobs without a comparison", "",
        f"No published configuration fits under the engine of emitted programs. Ours fits, and is quicker all the same in "
        f"{quicker} of {len(nothing)}.", "", *(f"- {_line(item)}" for item in nothing), "",
    ]
    lines += ["## Every job", ""]
    lines += ["| row | devices | the expert's | s | ours | s | ratio | gap |", "|---|---|---|---|---|---|---|---|"]
    for item in known:
        best = item.best
        assert best is not None
        lines.append(
            f"| `{best.row}` | {item.devices} | {best.said} | {best.step_s:.4g} | {item.said} | {item.step_s:.4g} "
            f"| {item.ratio:.3f} | {100 * (item.gap or 0):.1f}% |"
        )
    return "\n".join(lines) + "\n"


def _explained(item: Comparison) -> str:
    """A job with where the seconds of both went."""
    best = item.best
    assert best is not None
    both = []
    for breakdown in (best.breakdown_s, item.breakdown_s):
        both.append(", ".join(f"{name.removesuffix('_s')} {value:.3g}" for name, value in breakdown.items()))
    space = "" if best.searched else " (no candidate of the search)"
    return f"{_line(item)}{space}. Expert: {both[0]}. Ours: {both[1]}."


if __name__ == "__main__":
    main()
