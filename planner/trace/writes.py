"""Values that change in place behind the back of their gradient: in a graph without changes in place it would be another."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from planner.ir.errors import ModelError
from planner.trace.changes import line_of
from planner.trace.dtypes import AS_ANOTHER, CONSTANT
from planner.trace.regions import body_of, returns_operand, without_gradient, written

WRONG = "a value that has a gradient is changed in place under torch.no_grad() or through .detach(), its gradient is not"
ADVICE = ("h + (f(h) - h).detach() has the values of f(h) and the gradient of h; what is to have no gradient is changed in a "
          "copy, h.detach().clone()")
GIVEN = "a change in place gives a gradient to a detached value, which lies in the memory of the value that it was taken from"
COPY = "write into a copy, h.detach().clone()"


@dataclass
class _Storage:
    """Memory that several values may lie in. ``views``: those that autograd tells apart; ``changed``: what has changed it
    where the gradient of one of them did not see it; ``given``: of the program's inputs, which changes.py refuses by name."""

    given: bool = False
    views: list[_View] = field(default_factory=list)
    changed: fx.Node | None = None


@dataclass(eq=False)
class _View:
    """A value and its views, which have a gradient together. ``apart``: it is a detached view of another value."""

    storage: _Storage
    carries: bool
    apart: bool = False


def refuse_lost_gradients(program: ExportedProgram, where: str) -> None:
    """Raise ModelError, naming the line of the change, where a value that has a gradient is read after a change in place that
    autograd knows nothing of. Eager training takes the new value and the old one's gradient; a graph that is made functional
    takes the gradient of the change or none. What nobody reads with its gradient may change."""
    reader = _Reader(where)
    signature = program.graph_signature.input_specs
    kinds = {spec.arg.name: spec.kind for spec in signature}
    for node in program.graph.nodes:
        if node.op == "placeholder" and isinstance(value := node.meta.get("val"), Tensor):
            carries = kinds.get(node.name) is InputKind.PARAMETER and value.requires_grad
            reader.views[node] = reader.made(carries=carries, given=True)
    reader.read(program.graph, gradients=True)


class _Reader:
    """Goes through a graph in the order in which it runs."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.views: dict[fx.Node, _View] = {}
        self.outputs: dict[fx.Node, list[Any]] = {}

    def made(self, *, carries: bool, given: bool = False) -> _View:
        """A value in memory of its own."""
        view = _View(_Storage(given), carries)
        view.storage.views.append(view)
        return view

    def read(self, graph: fx.Graph, *, gradients: bool) -> list[Any]:
        """Follow the nodes; the graph's outputs. ``gradients``: whether they are switched on."""
        for node in graph.nodes:
            if node.op == "output":
                return list(node.args[0])
            if node.op == "call_function":
                self._call(node, gradients=gradients)
        return []

    def _call(self, node: fx.Node, *, gradients: bool) -> None:
        if (body := body_of(node)) is not None:
            given = [each for each in node.args[1:] if isinstance(each, fx.Node) and each.op != "get_attr"]
            inputs = [each for each in body.graph.nodes if each.op == "placeholder"]
            for inner, outer in zip(inputs, given, strict=True):
                if outer in self.views:
                    self.views[inner] = self.views[outer]
            self.outputs[node] = self.read(body.graph, gradients=gradients and not without_gradient(node))
        elif changed := written(node):
            self._read_operands(node, gradients=gradients)
            for operand in changed:
                self._change(node, operand, gradients=gradients)
            if changed[0] in self.views:
                self.views[node] = self.views[changed[0]]
        else:
            self._make(node, gradients=gradients)

    def _make(self, node: fx.Node, *, gradients: bool) -> None:
        """A call that changes nothing."""
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if node.target is operator.getitem and source in self.outputs:
            output = self.outputs[source][node.args[1]]  # type: ignore[index]
            if output in self.views:
                self.views[node] = self.views[output]
            return
        view = self.views.get(source) if source is not None and _shares(node, source) else None
        detaches = node.target is torch.ops.aten.detach.default
        if view is None:
            self._read_operands(node, gradients=gradients)
            self.views[node] = self.made(carries=gradients and self._carry(node))
        elif detaches or not (gradients or returns_operand(node)):
            self.views[node] = _View(view.storage, carries=False, apart=True)
            view.storage.views.append(self.views[node])
        else:
            self.views[node] = view

    def _carry(self, node: fx.Node) -> bool:
        """Whether one of the operands that a result is made of has a gradient, and the result may."""
        base = node.target._schema.name.removeprefix("aten::") if isinstance(node.target, torch._ops.OpOverload) else ""
        operands = [] if base in CONSTANT else node.all_input_nodes[:1] if base in AS_ANOTHER else node.all_input_nodes
        return _floating(node) and any(each in self.views and self.views[each].carries for each in operands)

    def _change(self, node: fx.Node, operand: fx.Node, *, gradients: bool) -> None:
        view = self.views.get(operand)
        if view is None or view.storage.given or not _floating(operand):
            return
        view.carries |= gradients and self._carry(node)
        if gradients and view.apart and view.carries:  # the value that it is a view of would have its gradient, or it none
            raise ModelError(line_of(node) or self.where, GIVEN, COPY)
        if (not gradients or view.apart) and any(each.carries for each in view.storage.views):
            view.storage.changed = node

    def _read_operands(self, node: fx.Node, *, gradients: bool) -> None:
        for operand in node.all_input_nodes:
            view = self.views.get(operand)
            if gradients and view is not None and view.carries and view.storage.changed is not None and _floating(node):
                self._refuse(view.storage.changed)

    def _refuse(self, node: fx.Node) -> None:
        raise ModelError(line_of(node) or self.where, WRONG, ADVICE)


def _shares(node: fx.Node, source: fx.Node) -> bool:
    """Whether a result lies in its operand's memory: a view, of torch's operations that may make one."""
    target = node.target
    if target is operator.getitem:
        return _shares(source, source.args[0]) if source.args and isinstance(source.args[0], fx.Node) else False
    if isinstance(target, torch._ops.OpOverload):
        first = target._schema.arguments[0] if target._schema.arguments else None
        if first is None or (first.alias_info is None and target is not torch.ops.aten.detach.default):
            return False
        places = [_place(each.meta.get("val")) for each in (node, source)]
        return None in places or places[0] == places[1]
    return getattr(target, "__name__", "") in ("_add_batch_dim", "_remove_batch_dim")  # of torch.vmap


def _place(value: object) -> int | None:
    """Where a tensor's memory is, None for one of ``torch.vmap`` or several."""
    if not isinstance(value, Tensor):
        return None
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:
        return None


def _floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()) for each in values)
