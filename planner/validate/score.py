"""score: absolute relative errors of the step time, by family, engine and chip; families weigh the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from planner.validate.predict import RowPrediction
from planner.validate.rows import Row, comparable_rows, scored_rows


@dataclass(frozen=True, slots=True)
class GroupError:
    """``mean``: of the absolute relative errors, every family of the group weighing the same; ``bias``: of the signed ones;
    ``worst``: the largest, of ``worst_row``."""

    rows: int
    mean: float
    bias: float
    worst: float
    worst_row: str


@dataclass(frozen=True, slots=True)
class Fits:
    """How many runs were predicted to fit in memory: of those that ran, and of those that ran out of memory. ``wrong``: the
    rows that were predicted otherwise."""

    ran_fitting: int
    ran_not_fitting: int
    failed_fitting: int
    failed_not_fitting: int
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class Score:
    """Errors of the scored rows: ``mean`` over families, each the mean of its rows; ``middle``: the median over rows; both
    None where no row is scored.
    ``repeats``: rows that would be scored, did not a later one have the same configuration.
    ``memory``: errors of the peak memory of all rows that state one, by engine."""

    rows: int
    repeats: tuple[str, ...]
    mean: float | None
    middle: float | None
    families: Mapping[str, GroupError]
    engines: Mapping[str, GroupError]
    chips: Mapping[str, GroupError]
    memory: Mapping[str, GroupError]
    fits: Fits


def score(
    predictions: Sequence[RowPrediction], rows: Iterable[Row], failures: Sequence[RowPrediction] = ()
) -> Score:
    """Score the predictions of ``rows`` (all rows of the tables; of those that are predicted and have the same configuration
    the last is scored). ``failures``: of runs that ran out of memory."""
    predicted = {item.row.row_id for item in predictions}
    compared = comparable_rows(row for row in rows if row.row_id in predicted)
    wanted = {row.row_id for row in scored_rows(compared)}
    scored = [item for item in predictions if item.row.row_id in wanted]
    families = grouped(scored, lambda item: item.row.family, _step_error)
    means = [group.mean for group in families.values()]
    known = [item for item in predictions if item.memory_error is not None]
    return Score(
        rows=len(scored),
        repeats=tuple(row.row_id for row in compared if row.row_id not in wanted),
        mean=fmean(means) if means else None,
        middle=median(abs(_step_error(item)) for item in scored) if scored else None,
        families=families,
        engines=grouped(scored, lambda item: item.prepared.job.engine, _step_error),
        chips=grouped(scored, lambda item: item.row.chip, _step_error),
        memory=grouped(known, lambda item: item.prepared.job.engine, _memory_error),
        fits=_fits(predictions, failures),
    )


def _fits(ran: Sequence[RowPrediction], failed: Sequence[RowPrediction]) -> Fits:
    """Only rows that were really run as they say count: fully configured, with a measured step time."""
    measured = [item for item in ran if item.row.step_s is not None and item.row.configured]
    missed = [item.row.row_id for item in measured if not item.prediction.fits]
    fitting = [item.row.row_id for item in failed if item.prediction.fits]
    return Fits(
        len(measured) - len(missed), len(missed), len(fitting), len(failed) - len(fitting), (*missed, *fitting)
    )


def grouped(
    items: Sequence[RowPrediction], key: Callable[[RowPrediction], str], error: Callable[[RowPrediction], float]
) -> dict[str, GroupError]:
    """Errors by group, groups by name."""
    groups: dict[str, list[RowPrediction]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return {name: _group(groups[name], error) for name in sorted(groups)}


def _group(items: Sequence[RowPrediction], error: Callable[[RowPrediction], float]) -> GroupError:
    families: dict[str, list[float]] = defaultdict(list)
    for item in items:
        families[item.row.family].append(error(item))
    worst = max(items, key=lambda item: abs(error(item)))
    return GroupError(
        len(items), fmean(fmean(map(abs, errors)) for errors in families.values()),
        fmean(fmean(errors) for errors in families.values()), abs(error(worst)), worst.row.row_id,
    )


def _step_error(item: RowPrediction) -> float:
    return item.error or 0.0


def _memory_error(item: RowPrediction) -> float:
    return item.memory_error or 0.0
