"""What is asked of the search, and its certificate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.ir.plan import OptimizerSettings, Plan, Precision, Prediction
from planner.search.pins import Pins


@dataclass(frozen=True, slots=True)
class Certificate:
    """Proof of quality: no plan of the ``candidates`` examined takes less than ``lower_bound_s``; ``solved`` of them needed
    an ILP, bounds excluded the rest."""

    lower_bound_s: float
    candidates: int
    solved: int

    def gap_of(self, step_s: float) -> float:
        """How far, at most, a plan of ``step_s`` is from the best, as a part of its own step."""
        return max(0.0, 1.0 - self.lower_bound_s / step_s)


@dataclass(frozen=True)
class Request:
    """``batch``: global, in samples; ``gap``: stop within this part of the optimum; ``time_limit_s`` of solving."""

    batch: int
    sequence: int
    precision: Precision
    pins: Pins = field(default_factory=Pins)
    gap: float = 0.001
    time_limit_s: float | None = None
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)


@dataclass(frozen=True)
class SearchResult:
    """``seconds``: where the search's own time went (cost, solve)."""

    plan: Plan
    prediction: Prediction
    certificate: Certificate
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def optimality_gap(self) -> float:
        return self.certificate.gap_of(self.prediction.step_s)

    @property
    def lower_bound_s(self) -> float:
        return self.certificate.lower_bound_s

    @property
    def candidates(self) -> int:
        return self.certificate.candidates

    @property
    def solved(self) -> int:
        return self.certificate.solved
