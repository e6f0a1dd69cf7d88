"""Pass 10b: what a block hands on lies in memory row by row, as a message between stages has to, and so does what the context
hands to blocks: their memory is counted as if it did, and each would copy it anew. Nor does it lie in a parameter, whose memory
ZeRO 3 lets go of when the block is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.ir.body import Body, Node
from planner.ir.types import Ref
from planner.ops.layout import Layout, fresh
from planner.ops.results import result_layouts
from planner.trace.names import unique_path

SAMPLES = 2
"""A batch of one would hide the order of the first dim."""


def packed(body: Body, *, turned: bool = False) -> Body:
    """The body with a ``clone`` of each output that lies in a parameter, if only for one sample, and a ``contiguous`` of each
    that lies otherwise than row by row when all that it is given lies so; ``turned``: only where its dims lie in another order,
    for a view that repeats or skips takes less memory than its copy.

    Where there is no stage's edge the copy stays, so that a block is one function wherever it is: most often it is one
    copy in a model, of the patches that its chain begins with, because sums follow their first operand's order.
    """
    body = _with(body, "clone", _in_parameters(body))
    layouts, _ = _layouts(body, SAMPLES)
    return _with(body, "contiguous", [
        name for name in body.outputs if not layouts[name].contiguous and (layouts[name].dense or not turned)
    ])


def _in_parameters(body: Body) -> list[str]:
    """Outputs that lie in a parameter's memory when the batch is one sample."""
    _, owners = _layouts(body, 1)
    parameters = {value.name for value in body.parameters}
    return [name for name in body.outputs if owners[name] in parameters]


def _with(body: Body, copy: str, outputs: Sequence[str]) -> Body:
    """Copies of these outputs handed on in their place."""
    if not outputs:
        return body
    taken = [*body.types]
    names = {name: unique_path(f"{name}_packed", taken) for name in outputs}
    copies = tuple(
        replace(made, name=names[made.name], op=copy, arguments=(("self", Ref(made.name)),))
        for made in body.nodes if made.name in names
    )
    return replace(body, nodes=(*body.nodes, *copies), outputs=tuple(names.get(name, name) for name in body.outputs))


def _layouts(body: Body, samples: int) -> tuple[dict[str, Layout], dict[str, str]]:
    """Where every value of a body lies, and in which value's memory; of a node with several results, the first's under its own
    name."""
    given = (*body.inputs, *body.parameters, *body.buffers)
    layouts = {value.name: fresh(value.type, samples) for value in given}
    owners = {value.name: value.name for value in given}
    parts: dict[str, tuple[Layout, ...]] = {}
    for node in body.nodes:
        if node.op == "getitem":
            layouts[node.name], shared = _part(node, layouts, parts), True
        else:
            operands = [layouts[name] for name in node.operands]
            parts[node.name], shared = result_layouts(node, operands, node.types, samples, body.needs(node))
            layouts[node.name] = parts[node.name][0]
        owners[node.name] = owners[node.operands[0]] if shared else node.name
    return layouts, owners


def _part(node: Node, layouts: dict[str, Layout], parts: dict[str, tuple[Layout, ...]]) -> Layout:
    index = node.argument("index")
    assert isinstance(index, int)
    (whole,) = node.operands
    return parts[whole][index] if whole in parts else layouts[whole]
