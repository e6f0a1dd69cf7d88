"""Fit: the parameters that bring the predictions nearest to the measured runs, with what is physical as a prior.

The objective and how its least is found are :mod:`planner.validate.descent`'s. The descent begins at what is expected without
any run, so the result is a function of the rows and of that alone, whatever the profiles and engines have now: a fit that is
run again writes the same files.

What a family contributes to its own prediction shows when it is left out: from the whole fit's optimum, steps to the optimum
without the family, on the true errors of all other rows and with the slopes at the whole fit's optimum (what moves far is what
only that family told of, and other rows do not depend on it); the family is predicted with those values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.ir.errors import JobError
from planner.validate.descent import Line, Problem, Vector, measured_rate, minimised, model_optimum, row_error
from planner.validate.parameters import CHIP_CLASSES, MACHINES, Parameter, parameters
from planner.validate.prepare import PreparedRow

ROWS_A_FAMILY = 6
"""Rows of a family that are fitted at least; of a large one twice the root of how many it has: more of them say little more."""
REFIT_STEPS = 4
REFIT_SETTLED = 1e-3
"""Relative fall of the objective without a family under which the steps to its least end."""
TOLD = 1e-3
"""Derivative of a row's logarithmic error from which the row says something of a parameter."""


@dataclass(frozen=True)
class Fit:
    """``values`` of ``parameters``; ``families`` that say something of each; ``chips`` that the runs were on; the mean over
    families of the mean absolute relative errors with what is expected without any run, with the fitted values, and of each
    family with the values fitted without it; ``by_family``: the last two of each; ``objective``: at the fitted values;
    ``trusted``: families of GPU rows of trust A."""

    parameters: tuple[Parameter, ...]
    values: tuple[float, ...]
    families: tuple[tuple[str, ...], ...]
    chips: frozenset[str]
    before: float
    after: float
    left_out: float
    by_family: dict[str, tuple[float, float]]
    objective: float = 0.0
    trusted: frozenset[str] = frozenset()

    def left_out_trusted(self) -> float:
        """Mean over the trusted families of their errors when left out."""
        return float(np.mean([self.by_family[name][1] for name in sorted(self.trusted)])) if self.trusted else 0.0


def fit(rows: Sequence[PreparedRow], say: Callable[[str], None] = lambda text: None) -> Fit:
    """Fit to the measured rows among ``rows``; ``say`` hears how it goes. Raises JobError where there is none."""
    chosen = _chosen(rows)
    if not chosen:
        right = "give one that is fully configured, of trust A or B, and has a measured step time"
        raise JobError("--fit", "no row can be fitted to", right)
    found = parameters(
        frozenset(row.job.cluster.chip.name for row in chosen), frozenset(row.plan.engine for row in chosen),
        frozenset(level.link.name for row in chosen for level in row.job.cluster.levels),
    )
    counts = Counter(row.row.family for row in chosen)
    weights = np.array([1 / counts[row.row.family] for row in chosen])
    problem = Problem(tuple(chosen), found, weights)
    first = problem.errors(np.zeros(len(found)))
    line = minimised(problem, say)
    names = [row.row.family for row in chosen]
    left = {name: _left_out(problem, line, name) for name in sorted(counts)}
    kept = {name: _mean(line.errors[_places(names, name)]) for name in left}
    return Fit(
        found, tuple(item.expected * math.exp(at) for item, at in zip(found, line.point, strict=True)),
        tuple(tuple(sorted({names[r] for r in np.flatnonzero(np.abs(line.slopes[:, p]) > TOLD)})) for p in range(len(found))),
        frozenset(row.job.cluster.chip.name for row in chosen),
        float(np.mean([_mean(first[_places(names, name)]) for name in left])), float(np.mean(list(kept.values()))),
        float(np.mean(list(left.values()))), {name: (kept[name], left[name]) for name in left}, line.value,
        frozenset(row.row.family for row in chosen if row.row.trust == "A" and row.row.step_s is not None and not _tpu(row)),
    )


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


def _places(names: Sequence[str], family: str) -> list[int]:
    return [at for at, name in enumerate(names) if name == family]


def _mean(errors: Vector) -> float:
    """Mean absolute relative error."""
    return float(np.mean(np.abs(np.exp(errors) - 1)))


def _left_out(problem: Problem, line: Line, family: str) -> float:
    """Error of a family with the values fitted without it."""
    names = [row.row.family for row in problem.rows]
    others = [at for at, name in enumerate(names) if name != family]
    rest = replace(problem, rows=tuple(problem.rows[at] for at in others), weights=problem.weights[others])
    slopes, errors = line.slopes[others], line.errors[others]
    at = Line(line.point, errors, slopes, rest.objective(errors, line.point))
    for _ in range(REFIT_STEPS):
        moved = _nearer(rest, at)
        if moved is None:
            break
        settled = moved.value > at.value * (1 - REFIT_SETTLED)
        at = moved
        if settled:
            break
    trial = problem.trial(at.point)
    return _mean(np.array([row_error(row, trial) for row in problem.rows if row.row.family == family]))


def _nearer(problem: Problem, line: Line) -> Line | None:
    """The longest of some steps towards the linear optimum that brings the objective down; None if none does."""
    target = model_optimum(problem, line)
    share = 1.0
    while share > 0.1:
        point = line.point + share * (target - line.point)
        errors = problem.errors(point)
        value = problem.objective(errors, point)
        if value < line.value:
            return Line(point, errors, line.slopes, value)
        share /= 2
    return None
