"""Runs a traced body on fake CPU tensors and says what autograd keeps: the oracle of what the planner derives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.ir.body import Body, Node
from planner.ir.types import BatchMultiple, Dtype, Ref, TensorType
from runtime.rehearsal import Recorder
from runtime.rehearsal_memory import StorageLog
from runtime.rehearsal_traffic import Traffic


def call(node: Node, values: dict[str, Any], batch: int) -> Any:
    """One node on real or fake tensors."""
    if node.op == "getitem":
        return values[node.operands[0]][node.argument("index")]
    packet, _, overload = node.op.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")
    schema = {argument.name: argument.kwarg_only for argument in function._schema.arguments}
    given = {name: _literal(argument, values, batch) for name, argument in node.arguments}
    positional = [given[name] for name, keyword in schema.items() if not keyword and name in given]
    keywords = {name: given[name] for name, keyword in schema.items() if keyword and name in given}
    return function(*positional, **keywords)


def saved_by_torch(body: Body, batch: int) -> tuple[int, int]:
    """Bytes that autograd keeps of a body's forward: (activations, inputs without gradient), parameters left out."""
    with FakeTensorMode():
        values = {value.name: make(value.type, batch, value.differentiable)
                  for value in (*body.inputs, *body.parameters, *body.buffers)}
        state = {storage(values[value.name]) for value in (*body.parameters, *body.buffers)}
        given = {storage(values[value.name]) for value in body.inputs if not value.differentiable}
        kept: dict[int, tuple[torch.Tensor, int]] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[storage(tensor)] = (tensor, tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for node in body.nodes:
                values[node.name] = call(node, values, batch)
    shared = sum(size for key, (_, size) in kept.items() if key in given)
    return sum(size for key, (_, size) in kept.items() if key not in given | state), shared


def make(type_: TensorType, batch: int, differentiable: bool) -> torch.Tensor:
    tensor = torch.empty(type_.sizes(batch), dtype=getattr(torch, type_.dtype))
    return tensor.requires_grad_(differentiable)


def storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _literal(argument: Any, values: dict[str, Any], batch: int) -> Any:
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, Dtype):
        return getattr(torch, argument.name)
    if isinstance(argument, BatchMultiple):
        return argument.factor * batch
    if isinstance(argument, tuple):
        return [_literal(item, values, batch) for item in argument]
    return argument


@dataclass(frozen=True)
class Passes:
    """Bytes beyond those at the beginning when most were alive: in the forward pass, the outputs' own included; in the backward
    pass, with the outputs' gradients there before and the inputs' gradients held."""

    forward: int
    backward: int


def forward_peak(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that a function of new tensors holds at its most, beside them, on fake CPU tensors."""
    log = StorageLog()
    with FakeTensorMode(), Recorder(Traffic({}), log):
        operands = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        log.begin()
        before = sum(log.peak().values())
        result = function(*operands)
        found = sum(log.peak().values()) - before
        del result
    return found


def peaks_by_torch(body: Body, batch: int) -> Passes:
    """What a body holds at its most while torch runs it on fake CPU tensors."""
    log = StorageLog()
    with FakeTensorMode(), Recorder(Traffic({}), log):
        values = {value.name: make(value.type, batch, value.differentiable) for value in body.inputs}
        given = [values[value.name] for value in body.inputs if value.differentiable]
        log.begin()
        before = sum(log.peak().values())
        for node in body.nodes:
            values[node.name] = call(node, values, batch)
        forward = sum(log.peak().values()) - before
        outputs = [values[name] for name in body.outputs if values[name].requires_grad]
        arrived = [torch.empty_like(output) for output in outputs]
        log.begin()
        before = sum(log.peak().values())
        gradients = torch.autograd.grad(outputs, given, arrived)
        backward = sum(log.peak().values()) - before
        del gradients
    return Passes(forward, backward)
