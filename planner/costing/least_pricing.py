"""Prices that no option of a placement undercuts."""

from __future__ import annotations

from dataclasses import dataclass

from planner.costing.pricing import Pricing
from planner.ir.placement import Placement
from planner.ir.types import TensorType


@dataclass(frozen=True)
class LeastPricing(Pricing):
    """Copies around collectives and sums once a step cost nothing: prices of blocks have no copies
    (:func:`planner.costing.blocks.time_block`), and a step may have any number of micro-batches."""

    def parameter_seconds(self, whole: TensorType, placement: Placement) -> float:
        """Nothing."""
        return 0.0

    def _copy_seconds(self, step: str, sharded: Placement, whole: TensorType) -> float:
        return 0.0
