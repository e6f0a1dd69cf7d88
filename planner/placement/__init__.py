"""Placement of a graph's operations over the tensor axis: an ILP whose optimum is the cheapest legal program."""

from planner.placement.options import Option, place_graph
from planner.placement.place import PlacedBody, place_body
from planner.placement.pricing import Pricing

__all__ = ["Option", "PlacedBody", "Pricing", "place_body", "place_graph"]
