"""Tensors of repeated modules that torch.export does not see: it spends most of its time on parameters, one by one.

A module that is drawn out from another (see repeats.py) needs its own tensors in the graph only. Those that belong to one such
module alone are out of its tables while torch looks at the model, and back while the model's own code runs, so that this code
finds what it always does. What it does with them the graph does not tell: a trace that shows that they were read is no use.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from planner.trace.alike import Calls

_TABLES = ("_parameters", "_buffers")


class UnlikeError(Exception):
    """A module whose tensors are hidden has to run."""


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False)),
    }


@dataclass
class Hidden:
    """``members``: of every module, its tensors by name, in the order of :class:`~planner.trace.alike.Call`. ``visible``: names
    of all others. ``nodes``: those that stand for the hidden tensors in the graph, by name, once it is there."""

    members: tuple[dict[str, Tensor], ...] = ()
    visible: frozenset[str] = frozenset()
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    _tables: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)

    @contextlib.contextmanager
    def where(self, *, hidden: bool) -> Iterator[None]:
        """Without the tensors in their modules, or, within such a context, with them."""
        self._set(hidden=hidden)
        try:
            yield
        finally:
            self._set(hidden=not hidden)

    def _set(self, *, hidden: bool) -> None:
        for module, tables in self._tables:
            vars(module).update({name: {} for name in _TABLES} if hidden else tables)

    def add(self, module: nn.Module, tensors: dict[str, Tensor]) -> int:
        """Hide a module's tensors as well. Returns the member's number."""
        self._tables += [(part, {name: vars(part)[name] for name in _TABLES}) for part in module.modules()]
        self.members = (*self.members, tensors)
        self.visible -= tensors.keys()
        return len(self.members) - 1

    def place(self, graph: fx.Graph) -> None:
        """Give every hidden tensor a node at the graph's beginning."""
        with graph.inserting_before(next(iter(graph.nodes))):
            for name, tensor in (item for member in self.members for item in member.items()):
                self.nodes[name] = graph.placeholder(f"hidden_{name.replace('.', '_')}")
                self.nodes[name].meta["val"] = tensor

    def own(self, number: int) -> tuple[fx.Node, ...]:
        """The nodes of a member's tensors."""
        return tuple(self.nodes[name] for name in self.members[number])

    def read(self, program: ExportedProgram, prefix: str) -> bool:
        """Whether the model's code may have read a hidden tensor: such a one becomes a constant without a value, or a parameter
        that the model has not."""
        kinds = (InputKind.PARAMETER, InputKind.BUFFER)
        tensors = {spec.target or "" for spec in program.graph_signature.input_specs if spec.kind in kinds}
        visible = {f"{prefix}.{name}" for name in self.visible}
        others = (value for name, value in program.constants.items() if name not in visible)
        return not tensors <= visible or any(map(_has_no_value, (*others, *_attributes(program))))


def _attributes(program: ExportedProgram) -> Iterator[object]:
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield from (getattr(module, str(node.target), None) for node in module.graph.nodes if node.op == "get_attr")


def _has_no_value(constant: object) -> bool:
    return isinstance(constant, FakeTensor) and constant.constant is None


def hide_repeated(hidden: Hidden, model: nn.Module, members: Iterable[nn.Module], calls: Calls) -> dict[nn.Module, int]:
    """Choose among a model's modules those that look like an earlier one, and whose tensors are theirs alone. Returns their
    numbers."""
    every = _named_tensors(model)
    names = {id(tensor): name for name, tensor in every.items()}
    places = Counter(map(id, every.values()))
    hidden.visible = frozenset(every)
    numbers, seen = dict[nn.Module, int](), set[object]()
    for module in members:
        call = calls.of(module, (), {})
        if call is None:
            continue
        if call.key in seen and all(places[id(tensor)] == 1 for tensor in call.own):
            numbers[module] = hidden.add(module, {names[id(tensor)]: tensor for tensor in call.own})
        seen.add(call.key)
    return numbers
