"""`shardwright profile`: measure the machine that this runs on."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from hardware_profiles.measure import Machine, Measurement, Settings


def profile(
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the profile is written.")] = Path("machine.yaml"),
    ranks: Annotated[int | None, typer.Option(help="Processes that share the machine (default: the cores, or GPUs).")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: CUDA where there is one.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and repeats.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on standard output.")] = False,
) -> None:
    """Measure this machine into a hardware profile."""
    from hardware_profiles import PROFILE_SUFFIXES
    from hardware_profiles.measure import MeasureError
    from hardware_profiles.measure.document import profile_text
    from planner.bundle import check_output
    from planner.ir.errors import JobError, PlanFileError

    start = time.perf_counter()
    if output.suffix not in PROFILE_SUFFIXES:  # Any other name would be looked for among the packaged profiles.
        raise PlanFileError(str(output), "is no YAML file", "give -o a file whose name ends in .yaml, for example machine.yaml")
    check_output(output)
    try:
        settings = _settings(ranks, device, quick)
        measurement = _measure_with_bar(settings)
    except MeasureError as error:
        raise JobError(error.where, error.wrong, error.right) from error
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {output} was not written", err=True)
        raise typer.Exit(130) from None
    _write(output, profile_text(measurement, output.stem))
    _report(output, measurement.machine, time.perf_counter() - start, json_)


def _settings(ranks: int | None, device: str, quick: bool) -> Settings:
    from hardware_profiles.measure import (
        PROCESS_BYTES,
        MeasureError,
        Settings,
        accelerators,
        memory_bytes,
        most_processes,
        usable_cores,
    )

    if device not in ("auto", "cpu", "cuda"):
        raise MeasureError("--device", f"is {device!r}", "one of auto, cpu, cuda")
    gpus = accelerators() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise MeasureError("--device", "torch sees no CUDA device", "give --device cpu")
    kind: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
    count = ranks if ranks is not None else gpus or max(1, int(usable_cores()))
    if count < 1:
        raise MeasureError("--ranks", f"is {count}", "give a number of processes from 1 up")
    if gpus and count > gpus:
        raise MeasureError("--ranks", f"is {count}", f"there are {gpus} GPUs")
    if not gpus and count > (most := most_processes()):
        room = f"this machine has {memory_bytes() / 2**30:.1f} GiB, and a process takes {PROCESS_BYTES / 2**30:g} GiB"
        raise MeasureError("--ranks", f"is {count}", f"at most {most}: {room}")
    return Settings(count, kind, quick)


def _measure_with_bar(settings: Settings) -> Measurement:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from hardware_profiles.measure import measure

    columns = (TextColumn("measuring"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"starting {settings.ranks} processes", total=None)
        return measure(settings, lambda done, total, what: bar.update(task, completed=done, total=total, description=what))


def _write(path: Path, text: str) -> None:
    """The whole file or none."""
    from planner.ir.errors import PlanFileError
    from planner.ir.replacing import replacing

    try:
        with replacing() as files:
            files.write(path, text)
    except OSError as error:
        raise PlanFileError(str(path), f"cannot be written ({error.strerror})", "give -o a path that is writable") from error


def _report(path: Path, machine: Machine, seconds: float, json_: bool) -> None:
    from hardware_profiles import describe
    from hardware_profiles.measure.document import origin
    from planner.show import print_page, profile_table

    rows = describe(str(path))
    if json_:
        fields = [{"field": r.field, "value": r.value, "unit": r.unit, "kind": r.kind, "source": r.source} for r in rows]
        print(json.dumps({"profile": str(path), "ranks": machine.ranks, "seconds": seconds, "fields": fields}))
        return
    beginning = origin(machine)
    print_page(profile_table(replace(row, source=row.source.removeprefix(f"{beginning}: ")) for row in rows))
    typer.echo(beginning)
    typer.echo(f"wrote {path} in {seconds:.0f} s; use it as --cluster {path}:1x{machine.ranks}", err=True)
