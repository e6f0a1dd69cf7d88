"""Pass 10b: what a block hands on lies in memory row by row, as a message between stages has to, and so does what the context
hands to blocks: their memory is counted as if it did, and each would copy it anew."""

from __future__ import annotations

from dataclasses import replace

from planner.ir.graph import Body, Node
from planner.ir.types import Ref
from planner.ops.layout import Layout, fresh
from planner.ops.results import result_layouts
from planner.trace.names import unique_path

SAMPLES = 2
"""A batch of one would hide the order of the first dim."""


def packed(body: Body, *, turned: bool = False) -> Body:
    """The body with a ``contiguous`` after each output that lies otherwise when all that it is given lies row by row;
    ``turned``: only where its dims lie in another order, for a view that repeats or skips takes less memory than its copy.

    Where there is no stage's edge the copy stays, so that a block is one function wherever it is: most often it is one
    copy in a model, of the patches that its chain begins with, because sums follow their first operand's order.
    """
    layouts = _layouts(body)
    copied = [name for name in body.outputs if not layouts[name].contiguous and (layouts[name].dense or not turned)]
    if not copied:
        return body
    taken = [*body.types]
    names = {name: unique_path(f"{name}_packed", taken) for name in copied}
    copies = tuple(
        replace(made, name=names[made.name], op="contiguous", arguments=(("self", Ref(made.name)),))
        for made in body.nodes if made.name in names
    )
    return replace(body, nodes=(*body.nodes, *copies), outputs=tuple(names.get(name, name) for name in body.outputs))


def _layouts(body: Body) -> dict[str, Layout]:
    """Where every value of a body lies; of a node with several results, the first's under its own name."""
    given = (*body.inputs, *body.parameters, *body.buffers)
    layouts = {value.name: fresh(value.type, SAMPLES) for value in given}
    parts: dict[str, tuple[Layout, ...]] = {}
    for node in body.nodes:
        if node.op == "getitem":
            layouts[node.name] = _part(node, layouts, parts)
        else:
            operands = [layouts[name] for name in node.operands]
            parts[node.name], _ = result_layouts(node, operands, node.types, SAMPLES, body.needs(node))
            layouts[node.name] = parts[node.name][0]
    return layouts


def _part(node: Node, layouts: dict[str, Layout], parts: dict[str, tuple[Layout, ...]]) -> Layout:
    index = node.argument("index")
    assert isinstance(index, int)
    (whole,) = node.operands
    return parts[whole][index] if whole in parts else layouts[whole]
