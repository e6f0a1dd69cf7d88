"""The ILP over a space.

Variables
    ``x[vertex, choice]``, binary: the vertex takes the choice.
    ``e[value, slot, p, q]``, in [0, 1]: the value is written in placement p and read in this slot in placement q. It
    exists only where p can be converted into q.
    ``z[value, p, q]``, in [0, 1]: the value is converted from p into q. It exists only where several slots could
    share the conversion; with a single reading slot it is ``e`` itself.

Constraints
    Every vertex takes one choice: the sum of x over its choices is 1.
    Every edge agrees with its writer: for each p, the sum of e over q equals the sum of x over the choices that write
    p. Every edge agrees with its reader: for each q, the sum of e over p equals the sum of x over the choices that read
    q. (Equalities; the form e >= x + x' - 1 solves several times slower.) Illegal conversions have no e, so no
    combination of choices that would need one is feasible.
    A conversion is done where any slot needs it: z >= e.

Objective
    Minimise the prices of the choices taken plus, once per (value, target placement), the prices of conversions.

Given binary x, the equalities leave each e no freedom but 0 or 1, and the objective pushes each z down onto its largest
e.
"""

from __future__ import annotations

from collections.abc import Mapping

import pulp

from planner.ir.placement import OpStrategy, Placement
from planner.placement.space import Space
from planner.solver import Problem, solve


def cheapest_picks(space: Space) -> Mapping[str, OpStrategy | Placement] | None:
    """What every vertex picks in the optimum, or None where nothing is feasible."""
    if not space.readers:  # Reductions have left nothing that joins two vertices: there is nothing to solve.
        return dict(pick for vertex in space.vertices for pick in min(vertex.choices, key=lambda c: c.price).picks)
    problem = Problem("placement", pulp.LpMinimize)
    taken = _choices(space, problem)
    objective = {
        variable: choice.price
        for vertex in space.vertices
        for variable, choice in zip(taken[vertex.name], vertex.choices, strict=True)
    }
    for number, value in enumerate(space.writer):
        objective |= _value(space, problem, taken, value, number)
    problem.setObjective(pulp.LpAffineExpression(objective))
    if not solve(problem, small=True).found:
        return None
    return dict(
        pick
        for vertex in space.vertices
        for variable, choice in zip(taken[vertex.name], vertex.choices, strict=True)
        if variable.value() > 0.5
        for pick in choice.picks
    )


def _choices(space: Space, problem: Problem) -> dict[str, list[pulp.LpVariable]]:
    taken: dict[str, list[pulp.LpVariable]] = {}
    for number, vertex in enumerate(space.vertices):
        variables = [problem.add_variable(f"x_{number}_{at}", cat=pulp.LpBinary) for at in range(len(vertex.choices))]
        taken[vertex.name] = variables
        _constrain(problem, dict.fromkeys(variables, 1.0), 1.0)
    return taken


def _constrain(
    problem: Problem, terms: dict[pulp.LpVariable, float], right: float = 0.0, sense: int = 0
) -> None:
    problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, rhs=right))


def _value(
    space: Space, problem: Problem, taken: Mapping[str, list[pulp.LpVariable]], value: str, number: int
) -> dict[pulp.LpVariable, float]:
    """Edges and conversions of one value; returns their terms of the objective."""
    terms: dict[pulp.LpVariable, float] = {}
    shared: dict[tuple[int, int], pulp.LpVariable] = {}
    slots = space.readers.get(value, ())
    for slot in range(len(slots)):
        for pair, edge in _edge(space, problem, taken, value, slot, f"{number}_{slot}").items():
            price = space.conversion_price(value, *pair)
            if not price:
                continue
            if len(slots) == 1:
                terms[edge] = price
                continue
            if pair not in shared:
                shared[pair] = problem.add_variable(f"z_{number}_{len(shared)}", 0.0, 1.0)
                terms[shared[pair]] = price
            _constrain(problem, {shared[pair]: 1.0, edge: -1.0}, sense=pulp.LpConstraintGE)
    return terms


def _edge(
    space: Space, problem: Problem, taken: Mapping[str, list[pulp.LpVariable]], value: str, slot: int, label: str
) -> dict[tuple[int, int], pulp.LpVariable]:
    """The variables of one edge, tied by equalities to the choices at both ends."""
    writer, at = space.writer[value]
    reader, position = space.readers[value][slot]
    sources: dict[int, dict[pulp.LpVariable, float]] = {}
    for variable, choice in zip(taken[writer.name], writer.choices, strict=True):
        sources.setdefault(choice.writes[at], {})[variable] = -1.0
    targets: dict[int, dict[pulp.LpVariable, float]] = {}
    for variable, choice in zip(taken[reader.name], reader.choices, strict=True):
        targets.setdefault(choice.reads[position], {})[variable] = -1.0
    edges = {
        (p, q): problem.add_variable(f"e_{label}_{i}_{j}", 0.0, 1.0)
        for i, p in enumerate(sources)
        for j, q in enumerate(targets)
        if space.conversion_price(value, p, q) is not None
    }
    for p, terms in sources.items():
        _constrain(problem, terms | {edge: 1.0 for (source, _), edge in edges.items() if source == p})
    for q, terms in targets.items():
        _constrain(problem, terms | {edge: 1.0 for (_, target), edge in edges.items() if target == q})
    return edges
