"""Running a ModelGraph with torch, node by node: the plainest meaning that a graph has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from planner.ir.body import Body, Node
from planner.ir.graph import Block, ModelGraph
from planner.ir.inlining import DRAWN
from planner.ir.types import BatchMultiple, Dtype, Ref
from planner.trace.recipes import decode


def run(graph: ModelGraph, parameters: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss sum and the weight of one batch. ``parameters`` by FQN; ``batch`` by the names of the batch inputs."""
    samples, buffers = next(iter(batch.values())).shape[0], _buffers(graph)
    values: dict[str, Tensor] = {**batch, **_context(graph, batch)}
    for block in graph.blocks:
        body = graph.body_of[block.body]
        outputs = _run_body(body, _bound(block, body, values, parameters, buffers), samples)
        values |= zip(block.writes, outputs, strict=True)
    return values[graph.loss], values[graph.weight]


def with_shares(graph: ModelGraph, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A whole step's batch with the shares of its averages (``ModelGraph.shares``), which it lacks."""
    types = {given.name: getattr(torch, given.type.dtype) for given in graph.batch_inputs}
    samples = next(iter(batch.values())).shape[0]
    whole = {**batch, **{name: torch.ones(samples, dtype=types[name]) for name, _ in graph.shares}}
    context = _context(graph, whole)
    for name, weight in graph.shares:
        share = context[graph.weight].double() / context[weight] if context[weight] else 0
        whole[name] = (whole[name] * share).to(types[name])
    return whole


def _context(graph: ModelGraph, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What depends on no parameter."""
    buffers = _buffers(graph)
    bound = {value.name: batch[value.name] for value in graph.context.inputs}
    bound |= {value.name: buffers[value.name] for value in graph.context.buffers}
    samples = next(iter(batch.values())).shape[0]
    return dict(zip(graph.context.outputs, _run_body(graph.context, bound, samples), strict=True))


def _buffers(graph: ModelGraph) -> dict[str, Tensor]:
    return {
        buffer.fqn: decode(buffer.data, getattr(torch, buffer.type.dtype)).reshape(buffer.type.sizes(1))
        for buffer in graph.buffers
    }


def _bound(
    block: Block, body: Body, values: Mapping[str, Tensor], parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """A block's inputs, parameters and buffers by their names in the body."""
    inputs = {value.name: values[name] for value, name in zip(body.inputs, block.reads, strict=True)}
    return inputs | {k: parameters[fqn] for k, fqn in block.parameters} | {k: buffers[fqn] for k, fqn in block.buffers}


def _run_body(body: Body, bound: Mapping[str, Tensor], batch: int) -> tuple[Tensor, ...]:
    environment: dict[str, Any] = dict(bound)
    for node in body.nodes:
        environment[node.name] = execute(node, environment, batch)
    return tuple(environment[name] for name in body.outputs)


def execute(node: Node, environment: Mapping[str, Any], batch: int) -> Any:
    """One operation on tensors, for ``batch`` samples. Several outputs come as a sequence."""
    arguments = {name: _value(value, environment, batch) for name, value in node.arguments}
    if node.op == "getitem":
        return arguments["input"][arguments["index"]]
    with torch.set_grad_enabled(torch.is_grad_enabled() and node.base not in DRAWN):
        return operation(node.op)(**arguments)


def operation(op: str) -> torch._ops.OpOverload:
    """torch's own operation of a node's ``op``."""
    name, _, overload = op.partition(".")
    namespace, _, base = name.rpartition("::")
    return getattr(getattr(getattr(torch.ops, namespace or "aten"), base), overload or "default")


def _value(argument: Any, environment: Mapping[str, Any], batch: int) -> Any:
    if isinstance(argument, Ref):
        return environment[argument.name]
    if isinstance(argument, BatchMultiple):
        return argument.factor * batch
    if isinstance(argument, Dtype):
        return getattr(torch, argument.name)
    if isinstance(argument, tuple):
        return [_value(item, environment, batch) for item in argument]
    return argument
