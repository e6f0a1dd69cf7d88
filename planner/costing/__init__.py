"""Prices placed bodies: seconds and bytes of one rank, from the costs of operations and the cost models."""

from planner.costing.blocks import cost_block
from planner.costing.graphs import cost_graph
from planner.costing.pricing import Pricing
from planner.costing.states import cost_state

__all__ = ["Pricing", "cost_block", "cost_graph", "cost_state"]
