"""Fit: the parameters that bring the predictions nearest to the measured runs, with what is physical as a prior.

Variables: the logarithms of the parameters. Objective: the sum over families of the mean absolute logarithmic error of their
rows, plus the squared distance of the parameters from what is expected without any run, in units of its covariance
(:mod:`planner.validate.prior`: parameters of one class are expected to be alike). Solved by Gauss-Newton steps on reweighted
least squares (an absolute error is a square over its own size), then, because the objective has a kink wherever a row is met,
by sweeps over the parameters one at a time. A step or a sweep is kept only if the objective falls by more than a thousandth: a
fit that begins at its own result changes nothing.

What a family contributes to its own prediction shows when it is left out. The step to the optimum without it is taken on the
last linearisation, and the family is predicted with those values; for the families that this predicts worst, the steps are
repeated on the true errors of all other rows until they end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hardware_profiles.engine import origin
from planner.validate.parameters import CHIP_CLASSES, MACHINES, NETWORKS, Parameter, Trial, parameters
from planner.validate.predict import predict_row
from planner.validate.prepare import PreparedRow
from planner.validate.prior import covariance

Vector = NDArray[np.float64]
STEP = 0.02
"""Of a logarithm, for a difference quotient."""
SMALLEST_ERROR = 0.01
"""Errors below this weigh as if they were this large: a measured step time is not known better."""
PRIOR = 0.01
"""Weight of one spread's distance beside the error of one family."""
SWEEPS = 5
STRIDES = (0.1, 0.03)
"""Of a logarithm, in a sweep."""
REFITTED = 12
"""Families that are left out by fitting to all others again: those that the linearisation predicts worst."""
REFIT_STEPS = 3
"""Steps of such a fit; each lowers the objective by far less than the one before."""
ROWS_A_FAMILY = 6
"""Rows of a family that are fitted at least; of a large one twice the root of how many it has: more of them say little more."""
SETTLED = 1e-3
"""Relative fall of the objective under which the fit ends."""


@dataclass(frozen=True)
class Fit:
    """``values`` of ``parameters``; ``families`` that say something of each; ``chips`` that the runs were on; the mean over
    families of the mean absolute relative errors with the start's values, with the fitted ones, and of each family with the
    values fitted without it; ``by_family``: the last two of each; ``refitted``: families that were left out by a fit of
    their own, not on the linearisation; ``trusted``: families of GPU rows of trust A."""

    parameters: tuple[Parameter, ...]
    values: tuple[float, ...]
    families: tuple[tuple[str, ...], ...]
    chips: frozenset[str]
    before: float
    after: float
    left_out: float
    by_family: dict[str, tuple[float, float]]
    refitted: frozenset[str] = frozenset()
    trusted: frozenset[str] = frozenset()

    def left_out_trusted(self) -> float:
        """Mean over the trusted families of their errors when left out."""
        return float(np.mean([self.by_family[name][1] for name in sorted(self.trusted)])) if self.trusted else 0.0


@dataclass(frozen=True)
class _Linear:
    """Logarithmic errors of the rows at ``point``, and their derivatives."""

    point: Vector
    errors: Vector
    slopes: Vector


def fit(rows: Sequence[PreparedRow], rounds: int = 8, say: Callable[[str], None] = lambda text: None) -> Fit:
    """Fit to the measured rows among ``rows``; ``say`` hears how it goes."""
    chosen = _chosen(rows)
    found = parameters(
        frozenset(row.job.cluster.chip.name for row in chosen), frozenset(row.plan.engine for row in chosen),
        frozenset(level.link.name for row in chosen for level in row.job.cluster.levels),
    )
    weights = _weights(chosen)
    point = np.array([math.log(min(max(item.start, item.low), item.high) / item.expected) for item in found])
    errors = _errors(chosen, found, point)
    slopes = _slopes(chosen, found, point, errors)
    # What no run moves keeps what its file says.
    told = [at for at in range(len(found)) if np.abs(slopes[:, at]).max() > 1e-3]
    found, point, slopes = tuple(found[at] for at in told), point[told], slopes[:, told]
    prior = _inverse(covariance(found))
    before = _objective(errors, weights, point, prior)
    say(f"{len(chosen)} rows, {len(found)} parameters: mean error {_mean(errors, weights):.2%}")
    first, best = errors, before
    line = _Linear(point, errors, slopes)
    for turn in range(rounds):
        if turn:
            line = _Linear(point, errors, _slopes(chosen, found, point, errors))
        target = _optimum(line, weights, prior, found)
        moved = _descend(line, target, best * (1 - SETTLED), chosen, found, weights, prior)
        if moved is None:
            break
        point, errors, best = moved
        say(f"round {turn + 1}: mean error {_mean(errors, weights):.2%}, objective {best:.4f}")
    for turn in range(SWEEPS):
        swept = _sweep(chosen, found, point, errors, weights, prior)
        if swept[2] > best * (1 - SETTLED):
            break
        point, errors, best = swept
        say(f"sweep {turn + 1}: mean error {_mean(errors, weights):.2%}, objective {best:.4f}")
    left, refitted = _leave_out(_Linear(point, errors, line.slopes), weights, prior, chosen, found, say)
    names = [row.row.family for row in chosen]
    return Fit(
        found, tuple(item.expected * math.exp(at) for item, at in zip(found, point, strict=True)),
        tuple(tuple(sorted({names[r] for r in np.flatnonzero(np.abs(line.slopes[:, p]) > 1e-3)})) for p in range(len(found))),
        frozenset(row.job.cluster.chip.name for row in chosen),
        _mean(first, weights), _mean(errors, weights), float(np.mean(list(left.values()))),
        {name: (_mean(errors, weights * _of(names, name)), left[name]) for name in sorted(left)}, refitted,
        frozenset(row.row.family for row in chosen if row.row.trust == "A" and row.row.step_s is not None and not _tpu(row)),
    )


def _inverse(matrix: Vector) -> Vector:
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)


def _tpu(row: PreparedRow) -> bool:
    return any(row.job.cluster.chip.name in CHIP_CLASSES[part] for part in MACHINES["tpu"])


def _chosen(rows: Iterable[PreparedRow]) -> list[PreparedRow]:
    """So many rows of every family, evenly picked."""
    families: dict[str, list[PreparedRow]] = {}
    for row in rows:
        if row.row.step_s is not None or measured_rate(row) is not None:
            families.setdefault(row.row.family, []).append(row)
    picked = []
    for members in families.values():
        count = min(len(members), max(ROWS_A_FAMILY, round(2 * math.sqrt(len(members)))))
        picked += [members[index * len(members) // count] for index in range(count)]
    return picked


def _weights(rows: Sequence[PreparedRow]) -> Vector:
    counts = Counter(row.row.family for row in rows)
    return np.array([1 / counts[row.row.family] for row in rows])


def _of(names: Sequence[str], family: str) -> Vector:
    return np.array([float(name == family) for name in names])


def _mean(errors: Vector, weights: Vector) -> float:
    """Mean absolute relative error."""
    return float(np.sum(weights * np.abs(np.exp(errors) - 1)) / np.sum(weights))


def _objective(errors: Vector, weights: Vector, point: Vector, prior: Vector) -> float:
    return float(np.sum(weights * np.abs(errors)) + PRIOR * point @ prior @ point)


def _trial(found: Sequence[Parameter], point: Vector) -> Trial:
    return Trial({item: item.expected * math.exp(at) for item, at in zip(found, point, strict=True)})


def _error(row: PreparedRow, trial: Trial) -> float:
    made = predict_row(row, trial.change, {row.plan.engine: trial.engine(row.plan.engine)})
    if row.row.step_s is not None:
        return math.log(made.step_s / row.row.step_s)
    rate = measured_rate(row)
    assert rate is not None
    return math.log(rate / made.prediction.model_flops_per_device_s)


def measured_rate(row: PreparedRow) -> float | None:
    """Model FLOP/s of one chip where a row states them as the predictions count them: without recomputation, attention whole
    (MaxText, Paxml)."""
    stated, convention = (row.row.words.get(word, "") for word in ("tflops_per_gpu", "flops_convention"))
    counted = "non-causal" in convention and "remat excluded" in convention
    return float(stated) * 1e12 if stated and counted else None


def _errors(rows: Sequence[PreparedRow], found: Sequence[Parameter], point: Vector) -> Vector:
    trial = _trial(found, point)
    return np.array([_error(row, trial) for row in rows])


def _slopes(rows: Sequence[PreparedRow], found: Sequence[Parameter], point: Vector, errors: Vector) -> Vector:
    """Row by row, so that a schedule is drawn once."""
    slopes = np.zeros((len(rows), len(found)))
    for at, row in enumerate(rows):
        for index, item in enumerate(found):
            if concerns(item, row):
                moved = point.copy()
                step = STEP if item.expected * math.exp(point[index] + STEP) <= item.high else -STEP
                moved[index] += step
                slopes[at, index] = (_error(row, _trial(found, moved)) - errors[at]) / step
    return slopes


def concerns(item: Parameter, row: PreparedRow) -> bool:
    """Whether a row's prediction can depend on a parameter."""
    chip = row.job.cluster.chip.name
    if item.kind == "chip":
        return chip in CHIP_CLASSES[item.subject]
    if item.kind == "machine":
        return any(chip in CHIP_CLASSES[part] for part in MACHINES[item.subject])
    if item.kind == "link":
        return any(level.link.name in NETWORKS[item.subject] for level in row.job.cluster.levels)
    return origin(row.plan.engine, item.field) == item.subject


def _optimum(line: _Linear, weights: Vector, prior: Vector, found: Sequence[Parameter], turns: int = 30) -> Vector:
    """Where the objective is least if errors were linear, within what is physical. ``prior``: the inverse covariance."""
    low = np.array([math.log(max(item.low, 1e-12) / item.expected) for item in found])
    high = np.array([math.log(item.high / item.expected) for item in found])
    point, errors = line.point.copy(), line.errors
    for _ in range(turns):
        pull = weights / np.maximum(np.abs(errors), SMALLEST_ERROR)
        curvature = line.slopes.T @ (pull[:, None] * line.slopes) + 2 * PRIOR * prior
        slope = line.slopes.T @ (pull * errors) + 2 * PRIOR * prior @ point
        point = np.clip(point - np.linalg.solve(curvature, slope), low, high)
        errors = line.errors + line.slopes @ (point - line.point)
    return point


def _descend(
    line: _Linear, target: Vector, best: float, rows: Sequence[PreparedRow], found: Sequence[Parameter], weights: Vector,
    prior: Vector,
) -> tuple[Vector, Vector, float] | None:
    """The longest of some steps towards ``target`` that brings the objective below ``best``; None if none does."""
    share = 1.0
    while share > 0.1:
        point = line.point + share * (target - line.point)
        errors = _errors(rows, found, point)
        value = _objective(errors, weights, point, prior)
        if value < best:
            return point, errors, value
        share /= 2
    return None


def _sweep(
    rows: Sequence[PreparedRow], found: Sequence[Parameter], point: Vector, errors: Vector, weights: Vector, prior: Vector
) -> tuple[Vector, Vector, float]:
    """Every parameter in turn moved as long as the true objective falls."""
    best = _objective(errors, weights, point, prior)
    for index, item in enumerate(found):
        mine = [at for at, row in enumerate(rows) if concerns(item, row)]
        for stride in (sign * size for size in STRIDES for sign in (1, -1)):
            while item.low <= item.expected * math.exp(point[index] + stride) <= item.high:
                moved, again = point.copy(), errors.copy()
                moved[index] += stride
                again[mine] = _errors([rows[at] for at in mine], found, moved)
                value = _objective(again, weights, moved, prior)
                if value >= best:
                    break
                point, errors, best = moved, again, value
    return point, errors, best


def _leave_out(
    line: _Linear, weights: Vector, prior: Vector, rows: Sequence[PreparedRow], found: Sequence[Parameter],
    say: Callable[[str], None],
) -> tuple[dict[str, float], frozenset[str]]:
    """Error of every family with the values fitted without it, and the families for which that was a fit of its own."""
    names = [row.row.family for row in rows]
    near = _optimum(line, weights, prior, found)
    values: dict[str, Vector] = {}
    result: dict[str, float] = {}
    for name in sorted(set(names)):
        values[name] = line.point + _optimum(line, weights * (1 - _of(names, name)), prior, found) - near
        result[name] = _left_error(rows, name, found, values[name])
    worst = sorted(result, key=lambda name: -result[name])[:REFITTED]
    for name in worst:
        rough = result[name]
        point = _refit(line, name, values[name], rows, found, weights * (1 - _of(names, name)), prior)
        result[name] = _left_error(rows, name, found, point)
        say(f"without {name}: {result[name]:.1%} ({rough:.1%} on the linearisation)")
    return result, frozenset(worst)


def _left_error(rows: Sequence[PreparedRow], family: str, found: Sequence[Parameter], point: Vector) -> float:
    members = [row for row in rows if row.row.family == family]
    return _mean(_errors(members, found, point), np.ones(len(members)))


def _refit(
    line: _Linear, family: str, point: Vector, rows: Sequence[PreparedRow], found: Sequence[Parameter], weights: Vector,
    prior: Vector,
) -> Vector:
    """The optimum without a family: steps with the slopes at the whole fit's optimum, on the true errors of the other rows.
    What moves far is what only that family knew of, and the other rows do not depend on it."""
    others = [at for at, row in enumerate(rows) if row.row.family != family]
    kept, mass, slopes = [rows[at] for at in others], weights[others], line.slopes[others]
    errors = _errors(kept, found, point)
    best = _objective(errors, mass, point, prior)
    for _ in range(REFIT_STEPS):
        target = _optimum(_Linear(point, errors, slopes), mass, prior, found)
        moved = _descend(_Linear(point, errors, slopes), target, best * (1 - SETTLED), kept, found, mass, prior)
        if moved is None:
            break
        point, errors, best = moved
    return point
