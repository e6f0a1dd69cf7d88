"""Pass 7b: what averages are scaled by, where a loss adds several over weights that the batch decides.

A step divides its sum of terms once, by one weight. So each such average's sum is scaled to the number of samples first: by
the step's samples over the average's own weight in the whole step. That is no matter of a micro-batch: a program weighs the
whole step before it begins (runtime/loop.py, ``weighed``), and gives every sample the share, as an input of the batch.
"""

from __future__ import annotations

from dataclasses import replace

from planner.ir.body import Node
from planner.ir.graph import BatchInput
from planner.ir.types import BatchMultiple, Ref, TensorType
from planner.trace.canonical import substitute
from planner.trace.flat import FlatGraph

PREFIX = "share:"
"""Of a share's name before it is an input of the batch: until then it is a number like a parameter's."""


def feed_shares(graph: FlatGraph) -> FlatGraph:
    """The graph in which shares are the first sample's of inputs of the batch, where all are the same."""
    shares = {name: type_ for name, type_ in graph.inputs.items() if name.startswith(PREFIX)}
    if not shares:
        return graph
    given: list[BatchInput] = []
    first: list[Node] = []
    renamed: dict[str, str] = {}
    inputs = {name: type_ for name, type_ in graph.inputs.items() if name not in shares}
    for name, type_ in shares.items():
        bare = name.removeprefix(PREFIX)
        whole = TensorType((BatchMultiple(1),), type_.dtype)
        given.append(BatchInput(bare, whole, "share"))
        inputs[f"batch:{bare}"] = whole
        arguments = (("self", Ref(f"batch:{bare}")), ("dim", 0), ("index", 0))
        first.append(Node(f"{bare}_of_one", "select.int", arguments, (type_,)))
        renamed[name] = first[-1].name
    nodes = (*first, *(substitute(node, renamed) for node in graph.nodes))
    return replace(graph, inputs=inputs, batch_inputs=(*graph.batch_inputs, *given), nodes=nodes)
