"""The best plan so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.ir.plan import Plan, Prediction
from planner.search.request import Look

SURELY = 1 - 1e-9
"""A gap is closed a little further than it is asked for, so that it is not above that by a rounded digit."""


@dataclass
class Best:
    """``gap``: within which a plan is good enough; ``look``: see :func:`planner.search.search`; ``step_s``: of the best plan,
    wherever it was ``found``; ``most_s``: of a plan that matters."""

    gap: float
    look: Look
    step_s: float = math.inf
    found: tuple[Plan, Prediction] | None = None
    most_s: float = math.inf

    def target(self) -> float:
        """What a plan must be quicker than to matter."""
        return min(self.step_s * (1 - SURELY * self.gap), math.nextafter(self.most_s, math.inf))

    def report(self, plan: Plan, prediction: Prediction) -> Prediction:
        """Keep a plan that is better than all before and fits by a closer look as well; returns what that look saw."""
        if prediction.step_s < self.step_s:
            prediction = self.look(plan, prediction)
            if prediction.fits:
                self.keep(plan, prediction)
        return prediction

    def keep(self, plan: Plan, prediction: Prediction) -> None:
        """Keep a plan that was looked at, where it is better than all before."""
        if prediction.step_s < self.step_s:
            self.step_s, self.found = prediction.step_s, (plan, prediction)
