"""Whose kernels a graph runs with: the CPU's where the host is the device, an accelerator's elsewhere."""

from __future__ import annotations

from hardware_profiles import Chip
from planner.ir.graph import ModelGraph


def as_run(graph: ModelGraph, chip: Chip) -> ModelGraph:
    """The graph that costs are of (:mod:`planner.ir.fused`); of one graph always the same object."""
    return graph if chip.is_host else graph.on_accelerator
