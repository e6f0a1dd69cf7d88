"""The command line: `shardwright`, the same as `python -m planner`."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.collection import leave_at_exit, no_collection
from planner.commands.profile import profile
from planner.commands.rehearse import rehearse
from planner.commands.validate import validate
from planner.commands.why import why
from planner.ir.errors import InternalError, JobError, ShardwrightError
from planner.streams import OutputError, ReaderGone, leave_output, watch_streams

if TYPE_CHECKING:
    from planner.bundle import Bundle
    from planner.compile import Compiled
    from planner.ir.plan import Prediction

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Plan, inspect and emit parallel training programs for PyTorch.",
)

PlanPath = Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="A plan.yaml that `shardwright plan` wrote.")]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on standard output.")]


@dataclass
class _Session:
    """What holds for every command. ``debug``: let errors come out as Python's tracebacks; ``command``: what was called, as
    errors name it."""

    debug: bool = False
    command: str = "shardwright"


def _progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    context.obj.debug = debug
    if version:
        from importlib.metadata import version as version_of

        print(f"shardwright {version_of('shardwright')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
    else:
        context.obj.command += f" {context.invoked_subcommand}"


@app.command()
@no_collection()
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL|JOB.yaml", help="path/file.py:callable, hf:PATH, or a JOB.yaml.")],
    cluster: Annotated[str | None, typer.Option(help="PROFILE:NODES[xDEVICES] or a cluster's YAML.")] = None,
    batch: Annotated[int | None, typer.Option(help="Global batch in samples (default: 8 a device).")] = None,
    seq: Annotated[int | None, typer.Option(help="Sequence length in tokens.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or fp64 (default: the chip's own).")] = None,
    set_: Annotated[list[str] | None, typer.Option(
        "--set", help="K=V: a keyword argument of the callable, or a field of the config.")] = None,
    pin: Annotated[list[str] | None, typer.Option(
        help="Limit a decision: tensor=8, 'pipeline<=4', 'recompute in [none,selective]', 'layers.*: zero=3'.")] = None,
    forbid: Annotated[list[str] | None, typer.Option(help="Forbid a combination: 'schedule=zbv, tensor>=4'.")] = None,
    headroom: Annotated[str | None, typer.Option(help="Memory of every device that is kept free: 10% or 4GiB.")] = None,
    objective: Annotated[str | None, typer.Option(help="time (default), memory, or devices: the fewest.")] = None,
    within: Annotated[str | None, typer.Option(help="Least memory within this part of the best time: 10%.")] = None,
    max_step_s: Annotated[float | None, typer.Option(help="What the fewest devices must reach, in seconds.")] = None,
    min_tokens_per_s: Annotated[float | None, typer.Option(help="What the fewest devices must reach.")] = None,
    top: Annotated[int, typer.Option(help="So many of the best plans: plan.yaml, plan.2.yaml, ...")] = 1,
    pareto: Annotated[bool, typer.Option("--pareto", help="The front between time and memory.")] = False,
    gap: Annotated[float, typer.Option(help="Stop within this part of the optimum.")] = 0.001,
    time_limit: Annotated[float, typer.Option(help="Seconds of each search; the honest gap is reported.")] = 60.0,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the plan is written.")] = Path("plan.yaml"),
    json_: Json = False,
) -> None:
    """Trace a model and find its best plan on a cluster."""
    start = time.perf_counter()
    from planner.tracing import tracing_ahead

    with tracing_ahead() as trace:
        from planner.bundle import Bundle, check_outputs, save
        from planner.compile import compile_job
        from planner.job import Goal, input_files, make_job
        from planner.objectives import FRONT

        job = make_job(
            model, cluster=cluster, batch=batch, sequence=seq, precision=precision, settings=set_ or [], pins=pin or [],
            forbidden=forbid or [], headroom=headroom, gap=gap, time_limit_s=time_limit,
            goal=Goal(objective, within, max_step_s, min_tokens_per_s, top, pareto),
        )
        plans = FRONT + 1 if job.objective.pareto else job.objective.top
        check_outputs(output, plans, input_files(model, job))
        begun = time.perf_counter()
        compiled = compile_job(job, _progress, trace)
    text, result = save(compiled, output), compiled.result
    total, parts = time.perf_counter() - start, dict(compiled.seconds)
    parts["load"] += begun - start
    seconds = {**parts, "write": max(0.0, total - sum(parts.values())), "total": total}
    bundle = Bundle(
        output, text, result.plan, compiled.graph, compiled.cluster, result.prediction, result.certificate
    )
    extra = _others(compiled, output)
    _print(bundle, seconds, json_, extra)
    for line in _lines(extra) if extra and not json_ else ():
        print(line)
    _progress(f"wrote {output}")


@app.command()
def show(path: PlanPath, json_: Json = False) -> None:
    """Inspect a plan: what it decides, where the time and the memory go."""
    _inspect(path, json_)


@app.command()
def check(path: PlanPath, json_: Json = False) -> None:
    """Re-cost a plan, edited by hand or not, and say whether it fits (exit 1 where it does not)."""
    prediction = _inspect(path, json_)
    if not prediction.fits:
        _progress(f"{path}: {_excess(prediction)}; recompute more, raise zero or lower the micro-batch")
        raise typer.Exit(1)


@app.command()
def emit(
    path: PlanPath,
    output: Annotated[Path, typer.Option("-o", "--output", help="The program's directory.")] = Path("program"),
) -> None:
    """Turn a plan into a readable program that torchrun runs with torch alone."""
    from codegen import Machine
    from codegen import emit as emit_program
    from planner.bundle import beside, read

    bundle = read(path)
    if not bundle.prediction.fits:
        _progress(f"warning: {path}: {_excess(bundle.prediction)}")
    cluster = bundle.cluster
    if not cluster.chip.runs_torch:
        _progress(f"warning: {path}: torch's programs do not run on {cluster.chip.name}; plan for GPUs or CPU cores to run one")
    try:
        emit_program(
            bundle.plan, bundle.graph, output, prediction=bundle.prediction, plan_yaml=bundle.text,
            machine=Machine(cluster.devices_per_host, host=cluster.chip.is_host), beside=beside(path),
        )
    except OSError as error:
        raise JobError(f"--output {output}", f"cannot be written ({error.strerror})", "give a writable directory") from error
    start = f"torchrun --nproc-per-node {cluster.devices} {shlex.quote(str(output / 'train.py'))}"
    if cluster.hosts > 1:
        each = f"each of {cluster.hosts} nodes of {cluster.devices_per_host} devices"
        start = f"MASTER_ADDR=FIRST_NODE {shlex.quote(str(output / 'launch.sh'))} on {each}"
    _progress(f"wrote {output}; run: {start}")


app.command()(profile)
app.command()(rehearse)
app.command()(why)
app.command()(validate)


@app.command()
def hardware(
    name: Annotated[str | None, typer.Argument(metavar="[PROFILE]", help="A profile; none: list them.")] = None,
    json_: Json = False,
) -> None:
    """List the hardware profiles, or one profile's numbers with their sources."""
    from hardware_profiles import PROFILE_SUFFIXES, ProfileFormatError, describe, profile_names
    from hardware_profiles.fields import FUNCTIONS
    from planner.ir.errors import ProfileError
    from planner.show import print_page, profile_table

    if name is None:
        names = profile_names()
        print(json.dumps({"profiles": names}) if json_ else "\n".join(names))
        return
    try:
        rows = describe(name)
    except ProfileFormatError as error:
        raise ProfileError(error.where, error.wrong, error.right) from error
    if name.endswith(PROFILE_SUFFIXES):
        from planner.ops.functions import check_functions

        check_functions((row.field.removeprefix(FUNCTIONS) for row in rows if row.field.startswith(FUNCTIONS)), name)
    if json_:
        fields = [{"field": r.field, "value": r.value, "unit": r.unit, "kind": r.kind, "source": r.source} for r in rows]
        print(json.dumps({"profile": name, "fields": fields}))
        return
    print_page(profile_table(rows))


def _excess(prediction: Prediction) -> str:
    excess = prediction.peak_memory_bytes - prediction.memory_limit_bytes
    return (
        f"does not fit: {prediction.peak_memory_bytes / 2**30:.2f} GiB at the peak, {excess / 2**30:.2f} GiB"
        f" above the limit of {prediction.memory_limit_bytes / 2**30:.2f} GiB"
    )


def _inspect(path: Path, json_: bool) -> Prediction:
    start = time.perf_counter()
    from planner.bundle import read

    bundle = read(path)
    total = time.perf_counter() - start
    seconds = {"load": total, "trace": 0.0, "cost": 0.0, "solve": 0.0, "total": total}
    _print(bundle, seconds, json_)
    return bundle.prediction


def _others(compiled: Compiled, output: Path) -> dict[str, Any]:
    """What JSON says of the other plans beside the first, and of the objective."""
    from planner.bundle import alternative_path
    from planner.report import alternative

    extra: dict[str, Any] = {"objective": dict(compiled.facts)} if compiled.facts else {}
    for rank, result in enumerate(compiled.alternatives, 2):
        extra.setdefault("alternatives", []).append(alternative(result, alternative_path(output, rank)))
    return extra


def _lines(extra: dict[str, Any]) -> Iterator[str]:
    """The other plans and the objective, a line each."""
    from planner.show import seconds, size

    yield ""
    for other in extra.get("alternatives", ()):
        mesh, predicted, virtual = other["mesh"], other["predicted"], other["schedule"]["virtual"]
        schedule = other["schedule"]["name"] + (f" of {virtual} stages a rank" if virtual > 1 else "")
        yield (
            f"{other['path']}: {seconds(predicted['step_s'])} a step, {size(predicted['peak_memory_bytes'])};"
            f" pipeline {mesh['pipeline']} x data {mesh['data']} x tensor {mesh['tensor']}, {schedule},"
            f" micro-batch {other['batch']['micro']}; at most {other['search']['optimality_gap']:.3%} from the best one left"
        )
    for name, value in extra.get("objective", {}).items():
        yield _fact(name, value)


def _fact(name: str, value: float) -> str:
    """What is known of the objective, in the units that the rest of the page has."""
    from planner.show import seconds, size

    if isinstance(value, bool):
        said = "yes" if value else "no"
    elif name.endswith("_s"):
        name, said = name.removesuffix("_s"), seconds(value)
    elif name.endswith("_bytes"):
        name, said = name.removesuffix("_bytes"), size(round(value))
    else:
        said = f"{value:.0%}" if name == "within" else f"{value}"
    return f"{name.replace('_', ' ')}: {said}"


def _print(bundle: Bundle, seconds: dict[str, float], json_: bool, extra: dict[str, Any] | None = None) -> None:
    if json_:
        from planner.report import report

        print(json.dumps({**report(bundle, seconds), **(extra or {})}, allow_nan=False))
        return
    from planner.show import print_page, render

    print_page(render(bundle))


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Every error is one line on standard error and an exit code; a traceback only with ``--debug``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # A terminal without some character shows a question mark.
    if arguments is None:
        watch_streams()
        leave_at_exit()
    session = _Session()
    try:
        code = app(args=arguments, prog_name="shardwright", standalone_mode=False, obj=session)
        sys.stdout.flush()
    except Exception as error:  # whatever it is, a user sees one line
        if isinstance(error, (OutputError, ReaderGone)):
            leave_output()
        if session.debug and not isinstance(error, ReaderGone):
            raise
        code = error.exit_code if isinstance(error, ReaderGone) else _report(error, session.command)
    if code:
        sys.exit(code)


def _report(error: Exception, command: str) -> int:
    """Say what went wrong in one line; returns the exit code. ``command``: the one that was called."""
    if isinstance(error, ShardwrightError) and not isinstance(error, InternalError):
        line, code = f"error: {error}", error.exit_code
    elif callable(describe := getattr(error, "format_message", None)):  # what typer says of a wrong command line
        line, code = f"error: {command}: {describe()} See `{command} --help`.", 2
    else:
        kind = "" if isinstance(error, InternalError) else f"{type(error).__name__}: "
        wrong = "; please report it, with what `shardwright --debug ...` prints"
        line, code = f"internal error: {kind}{error}{wrong}", InternalError.exit_code
    _progress(" ".join(line.split()))
    return code


if __name__ == "__main__":
    main()
