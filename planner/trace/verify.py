"""The form that every ModelGraph has; whatever breaks it is a defect of a pass."""

from __future__ import annotations

import keyword

from planner.ir.body import Body
from planner.ir.errors import InternalError
from planner.ir.graph import Block, ModelGraph
from planner.ir.types import Ref, TensorType


def verify(graph: ModelGraph) -> ModelGraph:
    """Return the graph if it is well formed; raise InternalError, naming the place, if not."""
    for body in (graph.context, *graph.bodies):
        _verify_body(body, dotted=body is graph.context)
    _require(not graph.context.parameters, "context", "has parameters")
    _unique(f"bodies of {graph.name}", [body.name for body in graph.bodies])
    _unique(f"blocks of {graph.name}", [block.name for block in graph.blocks])
    _verify_chain(graph)
    return graph


def _require(holds: bool, where: str, wrong: str) -> None:
    if not holds:
        raise InternalError(where, wrong)


def _unique(where: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    _require(not twice, where, f"share the names {twice}")


def _verify_body(body: Body, *, dotted: bool) -> None:
    """References point backwards, names are identifiers and clash with nothing."""
    outer = [value.name for value in (*body.inputs, *body.parameters, *body.buffers)]
    inner = [node.name for node in body.nodes]
    _unique(body.name, [*outer, *inner])
    roots = {value.name.partition(".")[0] for value in (*body.parameters, *body.buffers)}
    for name in [*(value.name for value in body.inputs), *inner]:
        _require(name.isidentifier() and not keyword.iskeyword(name), f"{body.name}.{name}", "is no identifier")
        _require(dotted or name not in roots, f"{body.name}.{name}", "clashes with a parameter's attribute")
    for value in () if dotted else (*body.parameters, *body.buffers):
        parts = value.name.split(".")
        legal = all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)
        _require(legal, f"{body.name}.{value.name}", "is no attribute path")
    defined, several = set(outer), {node.name: node for node in body.nodes if len(node.types) > 1}
    for node in body.nodes:
        where = f"{body.name}.{node.name}"
        _require(bool(node.types), where, "has no output")
        for operand in node.operands:
            _require(operand in defined, where, f"reads {operand} before it is defined")
        if node.op == "getitem":
            whole, index = dict(node.arguments)["input"], dict(node.arguments)["index"]
            assert isinstance(whole, Ref) and isinstance(index, int)
            if whole.name in several:
                _require(several[whole.name].types[index] == node.type, where, "has another type than its part")
        else:
            _require(not any(operand in several for operand in node.operands), where, "reads several outputs as one")
        gradient = any(operand in body.differentiable for operand in node.operands)
        _require(gradient or not node.differentiable, where, "carries a gradient to nothing")
        defined.add(node.name)
    for name in body.outputs:
        _require(name in defined and name not in several, f"{body.name}.{name}", "is no output value")


def _verify_chain(graph: ModelGraph) -> None:
    """Blocks read only what is there, in the types that their bodies declare, and bind every parameter."""
    there: dict[str, TensorType] = {given.name: given.type for given in graph.batch_inputs}
    for value in graph.context.inputs:
        _require(there.get(value.name) == value.type, f"context.{value.name}", "is no batch input of this type")
    context = graph.context.types
    there |= {name: context[name] for name in graph.context.outputs}
    parameters = {parameter.fqn: parameter.type for parameter in graph.parameters}
    buffers = {buffer.fqn: buffer.type for buffer in graph.buffers}
    for value in graph.context.buffers:
        _require(buffers.get(value.name) == value.type, f"context.{value.name}", "is no buffer of this type")
    for block in graph.blocks:
        _require(block.body in graph.body_of, block.name, f"has no body {block.body}")
        body = graph.body_of[block.body]
        _verify_bindings(block, body, there, parameters, buffers)
        for name, output in zip(block.writes, body.outputs, strict=True):
            _require(name not in there, block.name, f"writes {name} again")
            there[name] = body.types[output]
    _require(bool(graph.blocks) and graph.blocks[-1].writes[-1:] == (graph.loss,), graph.name, "does not end in its loss")
    _require(there[graph.loss].shape == () == context[graph.weight].shape, graph.name, "loss or weight is no scalar")
    for name, weight in graph.shares:
        _require(name in there and context[weight].shape == (), graph.name, f"has a share {name} of no input or weight")


def _verify_bindings(
    block: Block, body: Body, there: dict[str, TensorType], parameters: dict[str, TensorType],
    buffers: dict[str, TensorType],
) -> None:
    _require(len(block.reads) == len(body.inputs), block.name, "binds another number of inputs than its body has")
    _require(len(block.writes) == len(body.outputs), block.name, "binds another number of outputs than its body has")
    for name, value in zip(block.reads, body.inputs, strict=True):
        _require(name in there, block.name, f"reads {name}, which no earlier block writes")
        _require(there[name] == value.type, block.name, f"reads {name}: {there[name]} as {value.type}")
    for bound, values, known in ((block.parameters, body.parameters, parameters), (block.buffers, body.buffers, buffers)):
        _require(tuple(k for k, _ in bound) == tuple(v.name for v in values), block.name, "binds other names than its body's")
        for (name, fqn), value in zip(bound, values, strict=True):
            _require(known.get(fqn) == value.type, block.name, f"binds {name} to {fqn}, of type {known.get(fqn)}")
