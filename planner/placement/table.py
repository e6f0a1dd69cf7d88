"""The strategies of every node of a body, from the table of sharding rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from planner.ir.body import Body
from planner.placement.space import StrategyTable

Rules: TypeAlias = Callable[[Body, int], StrategyTable]
"""Gives the legal strategies of a body's nodes over a degree."""


def strategy_table(body: Body, degree: int) -> StrategyTable:
    """Legal strategies by node name."""
    from planner.rules import shard_variants, strategies

    variants = shard_variants(body, degree)
    return {
        node.name: strategies(node, body.types, degree, body.differentiable, variants) for node in body.nodes
    }


def remembered(rules: Rules) -> Rules:
    """The same rules for the bodies of one graph, each asked once for a degree."""
    known: dict[tuple[str, int], StrategyTable] = {}

    def table(body: Body, degree: int) -> StrategyTable:
        if (body.name, degree) not in known:
            known[body.name, degree] = rules(body, degree)
        return known[body.name, degree]

    return table
