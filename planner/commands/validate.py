"""`shardwright validate`: predictions against published, measured training runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from planner.validate.prepare import Prepared

DATA = Path(__file__).parent.parent / "validate" / "data"
RUNS = ("published_runs.csv", "vtrain_single_node.csv")
PICTURE = Path("validation.svg")
FAILURES = "out_of_memory_runs.csv"


def validate(
    runs: Annotated[Path | None, typer.Option(metavar="FILE.csv", help="A table of runs (default: the package's).")] = None,
    picture: Annotated[Path | None, typer.Option(
        metavar="FILE.svg", help=f"Draw predicted against measured (default: {PICTURE}; with --json: nowhere)."
    )] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Fit chips, links and engines to the runs and rewrite them.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on standard output.")] = False,
) -> None:
    """Predict every fully configured run of a table and compare with what was measured."""
    from planner.validate.machines import cluster_of
    from planner.validate.picture import write_picture
    from planner.validate.predict import predict_rows
    from planner.validate.prepare import prepare_rows
    from planner.validate.report import render, report
    from planner.validate.rows import read_failures, read_rows, scored_rows
    from planner.validate.score import score

    files = [DATA / name for name in RUNS] if runs is None else [runs]
    rows = tuple(row for file in files for row in read_rows(file))
    failures = read_failures(DATA / FAILURES) if runs is None else ()
    with _progress(len(rows) + len(failures)) as advance:
        prepared = prepare_rows((*rows, *failures), advance)
    if fit:
        prepared = _fitted(prepared, alone=runs is not None)
    predictions = predict_rows(prepared.rows)
    failing = {row.row_id for row in failures}
    ran = [item for item in predictions if item.row.row_id not in failing]
    result = score(ran, rows, [item for item in predictions if item.row.row_id in failing])
    measured = {cluster_of(row).chip.name for row in scored_rows(read_rows(DATA / RUNS[0]))}
    if picture is not None or not json_:
        write_picture(picture or PICTURE, ran)
        print(f"wrote {picture or PICTURE}", file=sys.stderr)
    if json_:
        print(json.dumps(report(result, ran, prepared.skipped, measured), allow_nan=False))
        return
    from planner.show import print_page

    print_page(render(result, ran, prepared.skipped, measured))


def _fitted(prepared: Prepared, *, alone: bool) -> Prepared:
    """Fit to the scored rows, rewrite the packaged profiles and engines, say what changed on standard error, and take the
    rows' clusters from the new profiles. ``alone``: numbers of chips without rows stay."""
    from hardware_profiles.engine import forget
    from planner.ir.errors import JobError
    from planner.validate.fit import fit
    from planner.validate.fitted import describe_fit
    from planner.validate.machines import cluster_of, forget_profiles
    from planner.validate.rows import TRUSTED, scored_rows
    from planner.validate.write import write_fit

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    scored = {row.row_id: row.chip for row in scored_rows(item.row for item in prepared.rows)}
    # A chip without scored rows is fitted to what there is of it.
    chosen = [
        item for item in prepared.rows
        if item.row.row_id in scored
        or (item.row.chip not in scored.values() and item.row.trust in TRUSTED and item.row.configured)
    ]
    found = fit(chosen, say=say)
    try:
        changed = write_fit(found, alone=alone)
    except OSError as error:
        right = "install from a clone that is writable"
        raise JobError("--fit", f"{error.filename} cannot be written ({error.strerror})", right) from error
    say(describe_fit(found))
    say(f"rewrote {len(changed)} files")
    forget()
    forget_profiles()
    return replace(
        prepared,
        rows=tuple(replace(item, job=replace(item.job, cluster=cluster_of(item.row))) for item in prepared.rows),
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error that is told how many rows are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("tracing and placing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=total)
        yield lambda done: bar.update(task, completed=done)
