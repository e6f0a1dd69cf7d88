"""The compile pipeline, top to bottom: nn.Module -> ModelGraph -> CostedGraph -> Plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from hardware_profiles import Cluster, ProfileFormatError, resolve_cluster
from planner.evaluate import DTYPES
from planner.ir.errors import JobError, PinError, ProfileError
from planner.ir.graph import ModelGraph
from planner.ir.plan import Precision
from planner.job import Job
from planner.search import Pins, Request, SearchResult, parse_pins, search
from planner.trace import load_model, trace_model

SAMPLES_PER_DEVICE = 8  # The default global batch, where none is given.

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Compiled:
    """A planned job: everything that `plan` writes down."""

    graph: ModelGraph
    cluster: Cluster
    result: SearchResult
    trace_s: float


def compile_job(job: Job, progress: Progress) -> Compiled:
    """Plan a job. Raises the tree of planner.ir.errors; NoPlanFits where nothing fits."""
    pins = parse_pins(job.pins)
    cluster = load_cluster(job.cluster)
    precision = choose_precision(job.precision, cluster)
    batch = job.batch if job.batch is not None else SAMPLES_PER_DEVICE * cluster.devices
    check_pins(pins, cluster.devices, batch)
    if job.batch is None:
        progress(f"no --batch: {batch} samples, {SAMPLES_PER_DEVICE} a device")
    source = load_model(job.model, job.settings, job.sequence)
    progress(f"tracing {job.model} in {precision}")
    start = time.perf_counter()
    graph = trace_model(source, sequence=job.sequence, dtype=DTYPES[precision])
    trace_s = time.perf_counter() - start
    for warning in graph.warnings:
        progress(f"warning: {warning}")
    progress(f"{graph.parameter_count:,} parameters, {len(graph.blocks)} blocks of {len(graph.bodies)} kinds; solving")
    request = Request(batch, graph.sequence, precision, pins, job.gap, job.time_limit_s, job.optimizer)
    return Compiled(graph, cluster, search(graph, cluster, request), trace_s)


def load_cluster(spec: str) -> Cluster:
    """Resolve ``PROFILE:NODES[xDEVICES]`` or a cluster file. Raises ProfileError."""
    try:
        return resolve_cluster(spec)
    except ProfileFormatError as error:
        raise ProfileError(error.where, error.wrong, error.right) from error


def choose_precision(asked: Precision | None, cluster: Cluster) -> Precision:
    """What is asked for, else the chip's own training dtype. Raises JobError where the chip has no rate for it."""
    chip = cluster.chip
    if asked is None:
        return next(name for name, dtype in DTYPES.items() if dtype == chip.training_dtype)
    if DTYPES[asked] not in chip.peak_flops:
        known = ", ".join(name for name, dtype in DTYPES.items() if dtype in chip.peak_flops)
        raise JobError("--precision", f"{chip.name} does not compute in {asked}", f"it has {known}")
    return asked


def check_pins(pins: Pins, devices: int, batch: int) -> None:
    """Refuse degrees that cannot divide the devices or the batch, before anything is traced. Raises PinError."""
    axes = {name: getattr(pins, name) for name in ("pipeline", "data", "tensor") if getattr(pins, name) is not None}
    for name, degree in axes.items():
        if devices % degree:
            fitting = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
            raise PinError(f"--pin {name}", f"{degree} does not divide the {devices} devices", f"one of {fitting}")
    product = math.prod(axes.values())
    if devices % product or (len(axes) == 3 and product != devices):
        factors = " x ".join(f"{name}={degree}" for name, degree in axes.items())
        right = "a product that is theirs" if len(axes) == 3 else "a product that divides them"
        raise PinError(f"--pin {next(reversed(axes))}", f"{factors} = {product} does not fit the {devices} devices", right)
    samples = (pins.data or 1) * (pins.microbatch or 1)
    if batch % samples:
        name = "data" if batch % (pins.data or 1) else "microbatch"
        factors = " x ".join(f"{n}={getattr(pins, n)}" for n in ("data", "microbatch") if getattr(pins, n) is not None)
        wrong = f"{factors} does not divide the batch of {batch}"
        raise PinError(f"--pin {name}", wrong, f"another degree, or --batch {-(-batch // samples) * samples}")
