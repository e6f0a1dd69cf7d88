"""Prices that no placement over some tensor axes undercuts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cost_models.spans import Span, span_of
from planner.costing.pricing import Pricing
from planner.ir.placement import Placement
from planner.ir.types import TensorType


@dataclass(frozen=True)
class LeastPricing(Pricing):
    """``strides``: of several tensor axes; each collective counts with the links over which it is quickest. Copies around
    collectives and sums once a step cost nothing: prices of blocks have no copies
    (:func:`planner.costing.blocks.time_block`), and a step may have any number of micro-batches."""

    strides: tuple[int, ...] = (1,)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """How tensor ranks lie over each of the axes."""
        return tuple({span_of(self.cluster, self.degree, stride) for stride in self.strides})

    def parameter_seconds(self, whole: TensorType, placement: Placement) -> float:
        """Nothing."""
        return 0.0

    def _copy_seconds(self, step: str, sharded: Placement, whole: TensorType) -> float:
        return 0.0
