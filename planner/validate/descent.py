"""Problem: which parameters bring predictions nearest to measured rows; and the point where its objective is least.

Variables: logarithms of the parameters over what is expected of them. Objective: over families, the sum of the mean errors of
their rows (Huber's: absolute, and quadratic below what a measured step time is known to), plus the squared distance from what
is expected in units of its covariance. Damped Gauss-Newton steps (Levenberg-Marquardt, More 1978) on the rows as linear in the
parameters, each the optimum of the whole objective within the bounds; the objective has kinks where a maximum of two times
turns over, so sweeps over one parameter at a time follow, with ever smaller strides, and steps again, until neither moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hardware_profiles.engine import origin
from planner.validate.parameters import CAPPED, CHIP_CLASSES, MACHINES, NETWORKS, Parameter, Trial
from planner.validate.predict import predict_row
from planner.validate.prepare import PreparedRow
from planner.validate.prior import covariance

Vector = NDArray[np.float64]
STEP = 0.01
"""Of a logarithm, for a difference quotient."""
KNOWN = 0.01
"""A measured step time is known no better than this share: errors below it count quadratically."""
PRIOR = 0.01
"""Weight of one spread's distance beside the error of one family."""
SETTLED = 1e-4
"""Relative fall of the objective under which steps and the whole descent end."""
STEPS = 30
ROUNDS = 6
STRIDES = (2.0, 1.0, 0.25)
"""Of a parameter's spread, in a sweep: the first reach past where a parameter begins to tell (a floor that nothing touches)."""
DAMPINGS = (1e-3, 1e4)
"""Least and largest weight of staying near the last point, beside the prior's."""


@dataclass(frozen=True)
class Line:
    """Logarithmic errors of the rows at ``point``, their derivatives, and the objective there."""

    point: Vector
    errors: Vector
    slopes: Vector
    value: float


@dataclass(frozen=True)
class Problem:
    """``rows`` with their ``weights``, and the parameters that are sought."""

    rows: tuple[PreparedRow, ...]
    found: tuple[Parameter, ...]
    weights: Vector

    @cached_property
    def prior(self) -> Vector:
        """The inverse covariance."""
        return np.asarray(np.linalg.inv(covariance(self.found)), dtype=np.float64)

    @cached_property
    def bounds(self) -> tuple[Vector, Vector]:
        return (
            np.array([math.log(item.low / item.expected) for item in self.found]),
            np.array([math.log(item.high / item.expected) for item in self.found]),
        )

    @cached_property
    def concerned(self) -> tuple[tuple[int, ...], ...]:
        """Of every parameter, the rows whose predictions can depend on it."""
        return tuple(tuple(at for at, row in enumerate(self.rows) if concerns(item, row)) for item in self.found)

    def trial(self, point: Vector) -> Trial:
        return Trial({item: item.expected * math.exp(at) for item, at in zip(self.found, point, strict=True)})

    def errors(self, point: Vector, among: Sequence[int] | None = None) -> Vector:
        """Of all rows, or of those at the places ``among``."""
        trial = self.trial(point)
        rows = self.rows if among is None else [self.rows[at] for at in among]
        return np.array([row_error(row, trial) for row in rows])

    def slopes(self, point: Vector, errors: Vector) -> Vector:
        """One difference quotient for each parameter, on the rows that it concerns."""
        slopes = np.zeros((len(self.rows), len(self.found)))
        high = self.bounds[1]
        for index, among in enumerate(self.concerned):
            moved = point.copy()
            step = STEP if point[index] + STEP <= high[index] else -STEP
            moved[index] += step
            slopes[list(among), index] = (self.errors(moved, among) - errors[list(among)]) / step
        return slopes

    def objective(self, errors: Vector, point: Vector) -> float:
        return float(np.sum(self.weights * _huber(errors)) + PRIOR * point @ self.prior @ point)


def row_error(row: PreparedRow, trial: Trial) -> float:
    """Logarithm of the predicted over the measured step time (or of the measured over the predicted rate)."""
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


def concerns(item: Parameter, row: PreparedRow) -> bool:
    """Whether a row's prediction can depend on a parameter."""
    chip = row.job.cluster.chip.name
    if item.kind == "chip":
        return chip in CHIP_CLASSES[item.subject]
    if item.kind == "clock":
        return chip in CAPPED[item.subject]
    if item.kind == "machine":
        return any(chip in CHIP_CLASSES[part] for part in MACHINES[item.subject])
    if item.kind == "link":
        return any(level.link.name in NETWORKS[item.subject] for level in row.job.cluster.levels)
    return origin(row.plan.engine, item.field) == item.subject


def minimised(problem: Problem, say: Callable[[str], None] = lambda text: None) -> Line:
    """Where the objective is least, from what is expected of every parameter without any run."""
    point = np.zeros(len(problem.found))
    errors = problem.errors(point)
    line = Line(point, errors, problem.slopes(point, errors), problem.objective(errors, point))
    say(f"{len(problem.rows)} rows, {len(problem.found)} parameters: objective {line.value:.5f} as expected without any run")
    for turn in range(ROUNDS):
        before = line.value
        line = _stepped(problem, line)
        say(f"round {turn + 1}: objective {line.value:.5f} after steps")
        line = _swept(problem, line)
        say(f"round {turn + 1}: objective {line.value:.5f} after sweeps")
        if turn and line.value > before * (1 - SETTLED):
            break
    return line


def _stepped(problem: Problem, line: Line) -> Line:
    damping, far = 1.0, DAMPINGS[1]
    for _ in range(STEPS):
        before = line.value
        point, errors, value = line.point, line.errors, line.value
        while value >= before and damping < far:
            point = model_optimum(problem, line, damping)
            errors = problem.errors(point)
            value = problem.objective(errors, point)
            damping = max(DAMPINGS[0], damping / 3) if value < before else damping * 4
        if value >= before:
            break
        line = Line(point, errors, problem.slopes(point, errors), value)
        if value > before * (1 - SETTLED):
            break
    return line


def _swept(problem: Problem, line: Line) -> Line:
    """Every parameter in turn moved as long as the objective falls."""
    point, errors, best = line.point, line.errors, line.value
    low, high = problem.bounds
    for stride in STRIDES:
        for index, among in enumerate(problem.concerned):
            for move in (stride * problem.found[index].spread, -stride * problem.found[index].spread):
                while low[index] <= point[index] + move <= high[index]:
                    moved, again = point.copy(), errors.copy()
                    moved[index] += move
                    again[list(among)] = problem.errors(moved, among)
                    value = problem.objective(again, moved)
                    if value >= best:
                        break
                    point, errors, best = moved, again, value
    return line if best == line.value else Line(point, errors, problem.slopes(point, errors), best)


def model_optimum(problem: Problem, line: Line, damping: float = 0.0, turns: int = 40) -> Vector:
    """Where the objective is least if errors were linear, within what is physical: reweighted least squares with the
    parameters at a bound held there while the slope pushes them out (Bertsekas 1982). ``damping``: weight of staying at
    the line's point, in units of the prior's."""
    low, high = problem.bounds
    prior = 2 * PRIOR * problem.prior
    stay = damping * np.diag(np.diag(prior))
    point, errors = line.point.copy(), line.errors
    for _ in range(turns):
        pull = problem.weights / np.maximum(np.abs(errors), KNOWN)
        curvature = line.slopes.T @ (pull[:, None] * line.slopes) + prior + stay
        slope = line.slopes.T @ (pull * errors) + prior @ point + stay @ (point - line.point)
        held = ((point <= low) & (slope > 0)) | ((point >= high) & (slope < 0))
        free = np.flatnonzero(~held)
        moved = point.copy()
        moved[free] -= np.linalg.solve(curvature[np.ix_(free, free)], slope[free])
        moved = np.clip(moved, low, high)
        done = float(np.abs(moved - point).max()) < 1e-9
        point, errors = moved, line.errors + line.slopes @ (moved - line.point)
        if done:
            break
    return point


def _huber(errors: Vector) -> Vector:
    sizes = np.abs(errors)
    return np.where(sizes < KNOWN, sizes**2 / (2 * KNOWN), sizes - KNOWN / 2)
