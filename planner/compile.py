"""The compile pipeline, top to bottom: nn.Module -> ModelGraph -> CostedGraph -> Plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hardware_profiles import PROFILE_SUFFIXES, Cluster, ProfileFormatError, resolve_cluster
from hardware_profiles.measure import usable_cores
from planner.clusters import Resize, head_of, resize_of, resized, sizes_up_to
from planner.collection import only_new_collected
from planner.constraints import Constraints
from planner.fields import MOST
from planner.fitting import fitted
from planner.ir.counting import counted
from planner.ir.errors import JobError, PinError, ProfileError
from planner.ir.graph import ModelGraph
from planner.ir.plan import DTYPES, Precision
from planner.job import Job
from planner.objectives import pursue, told
from planner.ops.functions import check_functions
from planner.origins import named_by
from planner.remedies import explain, retold
from planner.search import Request, SearchResult
from planner.search.helper import ahead
from planner.search.refusal import MemoryTooSmall
from planner.tracing import Trace, Wanted, trace_here

SAMPLES_PER_DEVICE = 8  # The default global batch, where none is given.
MANY = 64  # Devices that are worth a second process from the beginning on: its imports go on beside the tracing.
MOST_DEVICES = 10**7  # Beyond any cluster; searches go over the divisors of the number.

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Compiled:
    """A planned job: everything that `plan` writes down. ``cluster``: the part of the job's that the plan uses; ``seconds``:
    where the time went, every part once (see :func:`seconds_of`); ``alternatives``: other plans that were asked for;
    ``facts``: what is known of the objective beside the plan."""

    graph: ModelGraph
    cluster: Cluster
    result: SearchResult
    seconds: Mapping[str, float]
    alternatives: tuple[SearchResult, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def compile_job(job: Job, progress: Progress, trace: Trace = trace_here) -> Compiled:
    """Plan a job, whose model ``trace`` traces. Raises the tree of planner.ir.errors; NoPlanFits where nothing fits."""
    with named_by(job.origins), ExitStack() as stack:
        return _compiled(job, progress, trace, stack)


def _compiled(job: Job, progress: Progress, trace: Trace, stack: ExitStack) -> Compiled:
    begin = time.perf_counter()
    cluster = load_cluster(job.cluster)
    precision = choose_precision(job.precision, cluster)
    batch = job.batch if job.batch is not None else SAMPLES_PER_DEVICE * cluster.devices
    check_job_pins(job, cluster, batch)
    if job.batch is None:
        progress(f"no --batch: {counted(batch, 'sample')}, {SAMPLES_PER_DEVICE} a device")
    if cluster.devices >= MANY and usable_cores() >= 2:
        stack.enter_context(ahead())
    progress(f"tracing {job.model} in {precision}")
    loaded = time.perf_counter()
    graph = trace(Wanted(job.model, job.settings, job.sequence, DTYPES[precision]))
    traced = time.perf_counter()
    for warning in graph.warnings:
        progress(f"warning: {warning}")
    blocks = f"{counted(len(graph.blocks), 'block')} of {counted(len(graph.bodies), 'kind')}"
    progress(f"{graph.parameter_count:,} parameters, {blocks}; solving")
    request = Request(batch, graph.sequence, precision, job.constraints, job.gap, job.time_limit_s, job.optimizer)
    resize = resize_of(job.cluster)
    with only_new_collected():
        found = pursue(job.objective, graph, cluster, request, partial(solve, resize=resize), progress, resize)
    spent = {"load": loaded - begin, "trace": traced - loaded, "search": time.perf_counter() - traced}
    return Compiled(graph, found.cluster, found.result, seconds_of(spent, found.result), found.alternatives, found.facts)


def seconds_of(spent: Mapping[str, float], result: SearchResult) -> dict[str, float]:
    """Seconds of `plan` that add up to all it took: ``load`` (imports, cluster), ``trace`` (torch's imports too, where another
    process traces); of the search that found the plan ``cost`` (placements and prices), ``solve`` and ``replay`` (of memory);
    ``other``: further searches that an objective asked for."""
    own = {name: result.seconds.get(name, 0.0) for name in ("cost", "solve", "replay")}
    other = max(0.0, spent["search"] - sum(own.values()))
    return {"load": spent["load"], "trace": spent["trace"], **own, "other": other}


def solve(
    graph: ModelGraph, cluster: Cluster, request: Request, progress: Progress, *, resize: Resize = resized
) -> SearchResult:
    """Search, and where nothing fits find out why and what would help. Raises PinError or NoPlanFits."""
    deadline = time.perf_counter() + (math.inf if request.time_limit_s is None else request.time_limit_s)
    try:
        return told(fitted(graph, cluster, request, news=partial(_so_far, progress)), cluster, request)
    except MemoryTooSmall as refusal:
        raise retold(explain(refusal, graph, cluster, request, progress, resize, deadline)) from refusal


def _so_far(progress: Progress, step_s: float, gap: float) -> None:
    """A line about a search under way."""
    progress(f"best so far: {step_s:.4g} s a step, at most {gap:.1%} from the optimum; still searching")


def load_cluster(spec: str) -> Cluster:
    """Resolve ``PROFILE:NODES[xDEVICES]`` or a cluster file. Raises ProfileError."""
    try:
        cluster = resolve_cluster(spec)
    except ProfileFormatError as error:
        raise ProfileError(error.where, error.wrong, error.right) from error
    check_functions(cluster.chip.functions, head_of(spec))
    if cluster.devices > MOST_DEVICES:
        if spec.endswith(PROFILE_SUFFIXES):
            raise ProfileError(f"{spec}: nodes", f"makes more than {MOST_DEVICES:,} devices", "give fewer nodes")
        wrong = f"{spec!r} has more than {MOST_DEVICES:,} devices"
        raise ProfileError("cluster", wrong, "write PROFILE:NODES or PROFILE:NODESxDEVICES with fewer nodes")
    return cluster


def choose_precision(asked: Precision | None, cluster: Cluster) -> Precision:
    """What is asked for, else the chip's own training dtype. Raises JobError where the chip has no rate for it."""
    chip = cluster.chip
    if asked is None:
        return next(name for name, dtype in DTYPES.items() if dtype == chip.training_dtype)
    if DTYPES[asked] not in chip.peak_flops:
        known = ", ".join(name for name, dtype in DTYPES.items() if dtype in chip.peak_flops)
        raise JobError("--precision", f"{chip.name} does not compute in {asked}", f"it has {known}")
    return asked


def check_job_pins(job: Job, cluster: Cluster, batch: int) -> None:
    """As :func:`check_pins`; where the fewest devices are asked for, pins have to fit one of the sizes."""
    sizes = [cluster.devices]
    if job.objective.name == "devices":
        sizes += [nodes * per_node for nodes, per_node in sizes_up_to(cluster)]
    refused: PinError | None = None
    for devices in sizes:
        try:
            return check_pins(job.constraints, devices, batch)
        except PinError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def check_pins(constraints: Constraints, devices: int, batch: int) -> None:
    """Refuse degrees that cannot divide the devices or the batch, before anything is traced. Raises PinError."""
    pinned = {name: constraints.degree(name) for name in ("pipeline", "data", "tensor", "microbatch")}
    where = {condition.name: condition.field for condition in constraints.conditions}
    axes = {name: degree for name, degree in pinned.items() if degree is not None and name != "microbatch"}
    for name, degree in axes.items():
        if devices % degree:
            fitting = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
            raise PinError(where[name], f"{degree} does not divide the {devices} devices", f"one of {fitting}")
    product = math.prod(axes.values())
    if devices % product or (len(axes) == 3 and product != devices):
        factors = " x ".join(f"{name}={degree}" for name, degree in axes.items())
        right = "a product that is theirs" if len(axes) == 3 else "a product that divides them"
        raise PinError(where[next(reversed(axes))], f"{factors} = {product} does not fit the {devices} devices", right)
    data, micro = pinned["data"], pinned["microbatch"]
    samples = (data or 1) * (micro or 1)
    if batch % samples:
        name = "data" if batch % (data or 1) else "microbatch"
        factors = " x ".join(f"{n}={pinned[n]}" for n in ("data", "microbatch") if pinned[n] is not None)
        wrong = f"{factors} does not divide the batch of {batch}"
        larger = -(-batch // samples) * samples
        raise PinError(where[name], wrong, "another degree" + (f", or --batch {larger}" if larger <= MOST else ""))
