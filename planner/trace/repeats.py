"""Repeated modules are exported once: a call that is like an earlier one stands in the graph as one node, drawn out later.

While a model is exported, the call of a repeated module that is like an earlier call of another (see alike.py; its code is
closed, see closed.py) runs as the operation ``again``. It holds the call's tensors, and an operation ``first`` those of the
earlier call, so that the graph itself says what to draw out: the nodes from the earlier call's inputs and own tensors to its
outputs, with the later call's tensors in their places. The model's own forward runs as it is, over all its modules. Whatever
is not provably the same is exported as ever: a call that is like none before, and the whole model where its graph shows that
a drawn out call would be another.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from planner.trace.alike import Call, Calls
from planner.trace.closed import ClosedCode
from planner.trace.hidden import Hidden, UnlikeError, hide_repeated
from planner.trace.lines import is_users

LEAST = 4  # of a module's children that are of one class: fewer are exported as they are

_LIBRARY = torch.library.Library("shardwright", "FRAGMENT")
_LIBRARY.define("first(Tensor[] inputs, Tensor[] own, Tensor[] made, str path) -> Tensor[]")
_LIBRARY.define("again(Tensor[] inputs, Tensor[] own, Tensor[] first, int hidden) -> Tensor[]")


def _like(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]


def _no_gradient(context: Any, *gradients: Tensor) -> None:
    raise NotImplementedError("an export computes no gradients")


torch.library.register_fake("shardwright::first", lambda inputs, own, made, path: _like(made), lib=_LIBRARY)
torch.library.register_fake("shardwright::again", lambda inputs, own, first, hidden: _like(first), lib=_LIBRARY)
torch.library.register_autograd("shardwright::again", _no_gradient, lib=_LIBRARY)
_FIRST, _AGAIN = torch.ops.shardwright.first.default, torch.ops.shardwright.again.default


@dataclass
class _First:
    """The first of the calls that are alike. ``outputs``: the tensors of ``result``; ``fit``: the others can be drawn out from
    it, as far as is known; ``like``: what stands for it in the graph, once another was met."""

    path: str
    call: Call
    result: Any
    outputs: list[Tensor]
    fit: bool
    like: list[Tensor] | None = None


@dataclass
class Repeats:
    """``firsts``: the first calls by what they have in common with those that are alike. ``drawn``: paths of the modules that
    did not run because they are. ``only``: of those that may (None: all), when no graph is made that could tell."""

    calls: Calls = field(default_factory=Calls)
    firsts: dict[object, _First] = field(default_factory=dict)
    hidden: Hidden = field(default_factory=Hidden)
    drawn: set[str] = field(default_factory=set)
    only: frozenset[str] | None = None


class _Member:
    """Stands for the forward of one repeated module while the model is exported. ``number``: among those whose tensors are
    hidden (None: this one's are not)."""

    def __init__(self, path: str, module: nn.Module, repeats: Repeats) -> None:
        self.path, self.module, self.repeats = path, module, repeats
        self.calls, self.firsts, self.hidden = repeats.calls, repeats.firsts, repeats.hidden
        self.number: int | None = None
        self.forward: Callable[..., Any] = module.forward
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = None if self.called else self.calls.of(self.module, args, kwargs, self)
        self.called = True
        if call is None:
            return self._run(args, kwargs)
        key = (_caller(), call.key)
        if key in self.firsts:
            outputs = self._again(self.firsts[key], call)
            self.repeats.drawn |= {self.path} if outputs is not None else set()
            return self._run(args, kwargs) if outputs is None else _rebuilt(self.firsts[key].result, iter(outputs))
        given = (*call.inputs, *call.own)
        before = [t._version for t in given]
        result = self._run(args, kwargs)
        after = self.calls.of(self.module, args, kwargs, self)
        outputs = _outputs(result)
        fresh = {id(t) for t in outputs}.isdisjoint(map(id, given))
        same = after is not None and after.key == call.key and all(map(operator.is_, after.own, call.own))
        # What writes into its input, or a view of it, is read from a graph in which that value is another by then.
        unwritten = before == [t._version for t in given]
        fit = bool(outputs) and fresh and same and unwritten
        self.firsts[key] = _First(self.path, call, result, outputs, fit)
        return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward. Raises UnlikeError where its tensors are hidden."""
        if self.number is not None:
            raise UnlikeError(self.path)
        return self.forward(*args, **kwargs)

    def _again(self, first: _First, call: Call) -> list[Tensor] | None:
        only = self.repeats.only
        if only is not None:
            return _again(self.calls, first, call, graph=False) if self.path in only else None
        if self.number is None:
            return _again(self.calls, first, call)
        same = all(map(operator.is_, call.own, self.hidden.members[self.number].values()))
        return _again(self.calls, first, call, self.number) if same else None


def _caller() -> tuple[str, int]:
    """File and line of the user's code that calls a module: what an operation of torch's own modules is told to come from."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@contextlib.contextmanager
def repeats_as_one(model: nn.Module, prefix: str, *, hide: bool, only: frozenset[str] | None = None) -> Iterator[Repeats]:
    """Export a model's repeated calls as ``first`` and ``again``. ``prefix``: the model's path in what is exported; ``hide``:
    and let torch not see tensors of modules that look repeated; ``only``: without an export, do not run these modules where
    they are like others. Yields what is met."""
    repeats = Repeats(only=only)
    # Shared ones by their first path.
    found = {module: path for path, module in reversed([*_candidates(model, repeats.calls.code)])}
    members = {module: _Member(f"{prefix}.{path}", module, repeats) for module, path in found.items()}
    if hide:
        for module, number in hide_repeated(repeats.hidden, model, reversed(members), repeats.calls).items():
            members[module].number = number
    for module, member in members.items():
        vars(module)["forward"] = member
    try:
        with repeats.hidden.where(hidden=True):
            yield repeats
    finally:
        for module in members:
            del vars(module)["forward"]


def _candidates(model: nn.Module, code: ClosedCode, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Outermost modules of which a parent has several of one class, of closed code."""
    kinds: dict[type, list[tuple[str, nn.Module]]] = defaultdict(list)
    for name, child in model.named_children():
        kinds[type(child)].append((f"{path}.{name}".lstrip("."), child))
    for children in kinds.values():
        several = len(children) >= LEAST and any(True for _ in children[0][1].children())
        for name, child in children:
            if several and "forward" not in vars(child) and code.holds(type(child)):
                yield name, child
            else:
                yield from _candidates(child, code, name)


def _outputs(result: object) -> list[Tensor]:
    """The tensors of a result, each once; none where it is not made of tensors and tuples alone."""
    found: list[Tensor] = []

    def collect(value: object) -> bool:
        if isinstance(value, Tensor):
            found.append(value)
        return isinstance(value, Tensor) or value is None or (type(value) is tuple and all(map(collect, value)))

    return found if collect(result) and len({id(t) for t in found}) == len(found) else []


def _rebuilt(result: Any, tensors: Iterator[Tensor]) -> Any:
    """The result with other tensors."""
    if isinstance(result, tuple):
        return tuple(_rebuilt(item, tensors) for item in result)
    return result if result is None else next(tensors)


def _again(calls: Calls, first: _First, call: Call, hidden: int | None = None, *, graph: bool = True) -> list[Tensor] | None:
    """What a call yields that is like the first; None where it has to run. ``hidden``: the number of a module whose tensors
    are; ``graph``: a graph is made, and must allow it."""
    mode = get_proxy_mode()
    if (graph and mode is None) or not first.fit:
        return None
    if first.like is None:
        first.like = torch.ops.shardwright.first(list(first.call.inputs), list(first.call.own), first.outputs, first.path)
        if mode is not None:
            node = next(node for node in reversed(mode.tracer.graph.nodes) if node.target is _FIRST)
            if _region(node) is None:
                first.fit = False
                return None
    own = list(call.own) if hidden is None else []
    made: list[Tensor] = torch.ops.shardwright.again(list(call.inputs), own, first.like, -1 if hidden is None else hidden)
    first.fit = calls.alike(made, first.outputs)
    return made if first.fit else None


def _region(first: fx.Node) -> tuple[fx.Node, ...] | None:
    """The nodes of a first call, in order; None where its outputs depend on anything but its inputs and own tensors,
    where one of its operations changes a tensor or is none of torch's plain ones, or where a value of it is read outside."""
    inputs, own, made, _ = first.args
    outer = {*_nodes(inputs), *_nodes(own)}
    inside: set[fx.Node] = set()
    pending = list(_nodes(made))
    if not outer.isdisjoint(pending):
        return None
    while pending:
        node = pending.pop()
        if node in outer or node in inside:
            continue
        if node.op != "call_function" or not _plain(node.target):
            return None
        inside.add(node)
        pending.extend(node.all_input_nodes)
    for node in inside.difference(_nodes(made)):
        if any(user not in inside and user is not first for user in node.users):
            return None
    return tuple(node for node in first.graph.nodes if node in inside)


def _nodes(values: Any) -> tuple[fx.Node, ...]:
    return tuple(value for value in values if isinstance(value, fx.Node))


def _plain(target: object) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target not in (_FIRST, _AGAIN) and not target._schema.is_mutable
    return target is operator.getitem


def draw_out(program: ExportedProgram, hidden: Hidden) -> bool:
    """Put every repeated call in its place, in a program exported under :func:`repeats_as_one`. False where that cannot be
    shown to be what an export of all calls yields; the program is then of no use."""
    hidden.place(program.graph)
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            regions: dict[fx.Node, tuple[fx.Node, ...] | None] = {}
            for again in [node for node in module.graph.nodes if node.target is _AGAIN]:
                first = _nodes(again.args[2])[0].args[0]
                if not any(part.users for part in again.users):  # what came out was another type
                    _erase(again)
                    continue
                if not isinstance(first, fx.Node) or first.target is not _FIRST:
                    return False
                if first not in regions:
                    regions[first] = _region(first)
                region = regions[first]
                if region is None or not _drawn(again, first, region, hidden):
                    return False
            for first in [node for node in module.graph.nodes if node.target is _FIRST]:
                _erase(first)
    return True


def _erase(node: fx.Node) -> None:
    """Remove a node whose parts nothing reads."""
    for part in (*node.users, node):
        node.graph.erase_node(part)


def _drawn(again: fx.Node, first: fx.Node, region: tuple[fx.Node, ...], hidden: Hidden) -> bool:
    """Replace one repeated call by a copy of the first one's region."""
    inputs, own, _, number = again.args
    if isinstance(number, int) and number >= 0:
        own = hidden.own(number)
    first_inputs, first_own, made, path = first.args
    copies: dict[fx.Node, fx.Node] = {}
    for old, new in zip((*_nodes(first_inputs), *_nodes(first_own)), (*_nodes(inputs), *_nodes(own)), strict=True):
        if copies.setdefault(old, new) is not new:
            return False
    stack = again.meta.get("nn_module_stack") or {}
    with again.graph.inserting_before(again):
        for node in region:
            copies[node] = again.graph.node_copy(node, copies.__getitem__)
            moved = _moved(node.meta.get("nn_module_stack") or {}, str(path), stack)
            if moved is None:
                return False
            copies[node].meta["nn_module_stack"] = moved
    return _replaced(again, [copies[node] for node in _nodes(made)])


def _replaced(again: fx.Node, outputs: list[fx.Node]) -> bool:
    for part in list(again.users):
        index = part.args[1] if part.target is operator.getitem else None
        if not isinstance(index, int) or any(user.op == "output" for user in part.users):
            return False
        part.replace_all_uses_with(outputs[index])
        again.graph.erase_node(part)
    again.graph.erase_node(again)
    return True


def _moved(stack: Mapping[str, Any], first: str, later: Mapping[str, Any]) -> dict[str, Any] | None:
    """The modules around a node of the first call, as they are around the later one; None where the calls' own differ."""
    paths = [path for path, _ in stack.values()]
    if first not in paths:
        return None
    depth = paths.index(first) + 1
    outside, inside = list(stack.items())[:depth], list(stack.items())[depth:]
    own = list(later.values())
    if len(own) != depth or [entry for _, entry in outside[:-1]] != own[:-1] or outside[-1][1][1] != own[-1][1]:
        return None
    moved = dict(later)
    for key, (path, kind) in inside:
        if not path.startswith(f"{first}."):
            return None
        moved[key] = (f"{own[-1][0]}{path.removeprefix(first)}", kind)
    return moved
