"""Prices placed bodies: seconds and bytes of one rank, from the costs of operations and the cost models."""

from planner.costing.blocks import cost_block
from planner.costing.graphs import GraphWork, PlacedGraph, cost_graph, least_costs, measure_graph, price_graph
from planner.costing.kernels import as_run
from planner.costing.pricing import Pricing
from planner.costing.state_prices import state_costs

__all__ = [
    "GraphWork", "PlacedGraph", "Pricing", "as_run", "cost_block", "cost_graph", "least_costs", "measure_graph",
    "price_graph", "state_costs",
]
