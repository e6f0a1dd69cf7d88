"""Pass 3b: parameters that no gradient reaches, because only detached values come from them (a teacher, a codebook that is
looked up), stay as they start: torch's optimizers leave out what has no gradient."""

from __future__ import annotations

from dataclasses import replace

from planner.trace.build import BuiltModel
from planner.trace.flat import FlatGraph, carrying


def without_gradient(graph: FlatGraph) -> frozenset[str]:
    """Names (fqn) of the trainable parameters that the step reads and the loss has no gradient for."""
    reached = {name for name in graph.outputs if name in graph.by_name and graph.by_name[name].differentiable}
    for node in reversed(graph.nodes):
        if node.name in reached and node.differentiable:
            reached.update(carrying(node))
    read = {name for node in graph.nodes for name in node.operands}
    return frozenset(name.partition(":")[2] for name in graph.trainable & read - reached)


def freeze(built: BuiltModel, names: frozenset[str]) -> BuiltModel:
    """The model with these parameters not trained."""
    parameters = tuple(replace(each, trainable=each.trainable and each.fqn not in names) for each in built.parameters)
    return replace(built, parameters=parameters)


def warning(names: frozenset[str]) -> str:
    """What a plan says of parameters that are frozen so."""
    first = ", ".join(sorted(names)[:3])
    if len(names) == 1:
        return f"no gradient reaches parameter {first}: it stays as it starts"
    return f"no gradient reaches {len(names)} parameters ({first}{', ...' if len(names) > 3 else ''}): they stay as they start"
