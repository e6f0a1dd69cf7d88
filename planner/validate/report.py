"""What `shardwright validate` prints: tables for people, one JSON object for tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.ir.counting import counted
from planner.validate.predict import RowPrediction
from planner.validate.prepare import Skipped
from planner.validate.score import GroupError, Score

WORST_ROWS = 10


def report(
    score: Score, predictions: Sequence[RowPrediction], skipped: Sequence[Skipped], measured: Collection[str]
) -> dict[str, Any]:
    """The JSON object; errors in percent. ``measured``: the profiles' chips that the fitted numbers come from."""
    fits = score.fits
    return {
        "scored": score.rows,
        "repeats": list(score.repeats),
        "mean_abs_error_pct": None if score.mean is None else 100 * score.mean,
        "median_abs_error_pct": None if score.middle is None else 100 * score.middle,
        "families": _groups(score.families),
        "engines": _groups(score.engines),
        "chips": _groups(score.chips),
        "memory": _groups(score.memory),
        "fits": {
            "ran": {"fitting": fits.ran_fitting, "not_fitting": fits.ran_not_fitting},
            "out_of_memory": {"fitting": fits.failed_fitting, "not_fitting": fits.failed_not_fitting},
        },
        "rows": [_row(item, measured) for item in predictions],
        "skipped": [{"row_id": item.row.row_id, "why": item.why} for item in skipped],
    }


def _groups(groups: Mapping[str, GroupError]) -> dict[str, Any]:
    return {
        name: {
            "rows": group.rows, "mean_abs_error_pct": 100 * group.mean, "mean_error_pct": 100 * group.bias,
            "worst_abs_error_pct": 100 * group.worst, "worst_row": group.worst_row,
        }
        for name, group in groups.items()
    }


def _row(item: RowPrediction, measured: Collection[str]) -> dict[str, Any]:
    row, predicted = item.row, item.prediction
    return {
        "row_id": row.row_id,
        "predicted_step_s": predicted.step_s,
        "measured_step_s": row.step_s,
        "error_pct": None if item.error is None else 100 * item.error,
        "predicted_memory_bytes": predicted.peak_memory_bytes,
        "measured_memory_bytes": None if row.peak_bytes is None else round(row.peak_bytes),
        "fits": predicted.fits,
        "cautions": [*cautions(item, measured), *predicted.warnings],
    }


def cautions(item: RowPrediction, measured: Collection[str]) -> tuple[str, ...]:
    """What a row's prediction takes from something else."""
    said = item.prepared.job.cautions
    chip = item.prepared.job.cluster.chip.name
    if chip in measured:
        return said
    return (*said, f"no run on {chip} was fitted: its datasheet, and what its class of chips was fitted to")


def render(
    score: Score, predictions: Sequence[RowPrediction], skipped: Sequence[Skipped], measured: Collection[str]
) -> RenderableType:
    """Tables of errors by family, engine and chip, the worst rows, memory, and what was skipped."""
    fits = score.fits
    asserted = fits.failed_fitting + fits.failed_not_fitting
    parts: list[RenderableType] = [
        _table("family", score.families), _table("engine", score.engines), _table("chip", score.chips), _worst(predictions),
    ]
    if score.memory:
        parts.append(_table("peak memory, by engine", score.memory))
    parts.append(Text(
        f"memory: of {fits.ran_fitting + fits.ran_not_fitting} runs that were measured {fits.ran_fitting} are predicted to"
        f" fit; of {asserted} that ran out of memory {fits.failed_not_fitting} are predicted not to"
    ))
    if fits.wrong:
        parts.append(Text(f"predicted otherwise: {', '.join(fits.wrong)}"))
    numbers = Counter(text for item in predictions for text in cautions(item, measured))
    parts.extend(Text(f"{counted(count, 'row')}: {text}") for text, count in sorted(numbers.items()))
    if skipped:
        parts.append(Text(f"not predicted: {counted(len(skipped), 'row')} (reasons: --json)"))
    if score.repeats:
        repeats = counted(len(score.repeats), "row")
        parts.append(Text(f"not scored: {repeats}, as a later one has the same configuration (which: --json)"))
    parts.append(Text(_headline(score), style="bold"))
    return Group(*parts)


def _headline(score: Score) -> str:
    if score.mean is None or score.middle is None:
        return "no row is scored: none that is predicted is fully configured, of trust A or B, and has a measured step time"
    return (
        f"{counted(score.rows, 'row')} scored: mean absolute error {100 * score.mean:.2f}% over"
        f" {counted(len(score.families), 'family')}, median {100 * score.middle:.2f}% over rows"
    )


def _table(title: str, groups: Mapping[str, GroupError]) -> Table:
    """A row a group: its mean absolute error, its mean error, and the largest absolute one with the row that has it."""
    table = Table(title=f"error of the {'step time, by ' + title if ',' not in title else title}", title_justify="left")
    table.add_column(title.split(" ")[-1], overflow="fold")
    for heading in ("rows", "|error| %", "bias %", "worst %"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("worst row", overflow="fold")
    for name, group in groups.items():
        numbers = (f"{100 * value:.1f}" for value in (group.mean, group.bias, group.worst))
        table.add_row(name, str(group.rows), *numbers, group.worst_row)
    return table


def _worst(predictions: Sequence[RowPrediction]) -> Table:
    table = Table(title="the worst rows", title_justify="left")
    table.add_column("row", overflow="fold")
    for heading in ("predicted s", "measured s", "error %"):
        table.add_column(heading, justify="right", no_wrap=True)
    known = [item for item in predictions if item.error is not None]
    for item in sorted(known, key=lambda item: -abs(item.error or 0.0))[:WORST_ROWS]:
        assert item.error is not None and item.row.step_s is not None
        table.add_row(item.row.row_id, f"{item.step_s:.4g}", f"{item.row.step_s:.4g}", f"{100 * item.error:+.1f}")
    return table
