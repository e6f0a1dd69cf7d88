"""Pass 3: the exported program as a flat list of nodes in our own vocabulary, symbolic in the batch.

Values of a flat graph are named by what they are: ``parameter:<fqn>``, ``buffer:<fqn>``, ``batch:<name>``, or a node.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from planner.ir.body import Node
from planner.ir.errors import ModelError
from planner.ir.graph import BatchInput
from planner.ir.inlining import DRAWN
from planner.ir.types import Argument, BatchMultiple, Dtype, Extent, Ref, TensorType
from planner.trace.batches import ADVICE, SAMPLES
from planner.trace.build import BuiltModel
from planner.trace.changes import refuse_mutation
from planner.trace.composites import parts
from planner.trace.dtypes import AS_ANOTHER, CONSTANT, WITHOUT_GRADIENT, name_of
from planner.trace.export import BATCH, Exported
from planner.trace.lines import source_of
from planner.trace.loops import refuse_unknown_shapes
from planner.trace.regions import returns_operand
from planner.trace.strides import misread

RUNTIME_ARGUMENTS = frozenset({"device", "layout", "memory_format", "pin_memory", "generator"})
FEW = 16
"""Numbers of a tensor that are looked at one by one."""


def carrying(node: Node) -> tuple[str, ...]:
    """The operands whose values the result is made of."""
    if node.base in AS_ANOTHER:
        return node.operands[:1]
    return () if node.base in CONSTANT | DRAWN | WITHOUT_GRADIENT else node.operands


@dataclass(frozen=True)
class FlatGraph:
    """A training step before it is cut into blocks.

    ``inputs``: types of batch inputs, parameters and buffers by value name. ``outputs``: the user's loss, or its sum and
    weight; after the loss pass always (sum, weight). ``classes``: class name of each module path. ``values``: data of
    buffers by fqn. ``context``: names of the nodes that depend on no parameter (empty before the context pass).
    ``fixed``: buffers (as value names) of which something was worked out.
    """

    where: str
    batch_inputs: tuple[BatchInput, ...]
    inputs: Mapping[str, TensorType]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    classes: Mapping[str, str]
    values: Mapping[str, Tensor]
    trainable: frozenset[str]
    sequence: int
    context: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()

    @functools.cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    def type_of(self, name: str) -> TensorType:
        return self.inputs[name] if name in self.inputs else self.by_name[name].type

    def differentiable(self, name: str) -> bool:
        """Whether a gradient comes back to a value, for a parameter."""
        return self.by_name[name].differentiable if name in self.by_name else name in self.trainable


def place(node: Node, where: str) -> str:
    """What an error names: the user's line, else the model."""
    return f"{node.source.file}:{node.source.line}" if node.source else where


def extent_of(size: int) -> Extent:
    """A size of the trace: a multiple of the traced batch stands for that multiple of the real one."""
    return BatchMultiple(size // BATCH) if size and size % BATCH == 0 else size


def tensor_type(value: Tensor) -> TensorType:
    shape = tuple(extent_of(int(extent)) for extent in value.shape)
    return TensorType(shape, name_of(value.dtype))


def flatten(exported: Exported, built: BuiltModel) -> FlatGraph:
    """Translate the exported program. Raises ModelError where it mutates a buffer or holds what no plan can follow."""
    program = exported.program
    refuse_mutation(program, exported.where, exported.changes)
    reader = _Reader(exported.where, built)
    reader.read_inputs(exported)
    outputs = reader.read_nodes(program.graph_module, reader.names, no_gradient=False)
    batch_inputs = tuple(
        replace(given, type=reader.inputs.get(f"batch:{given.name}", given.type)) for given in exported.batch_inputs
    )
    return FlatGraph(
        where=exported.where, batch_inputs=batch_inputs, inputs=reader.inputs, nodes=tuple(reader.nodes),
        outputs=tuple(outputs), classes=reader.classes, values=reader.values,
        trainable=frozenset(reader.gradients & reader.inputs.keys()), sequence=exported.sequence,
    )


def _own(name: str) -> str:
    """A path in the user's model, of one in the exported wrapper."""
    return "" if name == "model" else name.removeprefix("model.")


class _Reader:
    """Reads fx graphs into nodes; what it has read so far is its fields."""

    def __init__(self, where: str, built: BuiltModel) -> None:
        self.where, self.built = where, built
        self.names: dict[fx.Node, Any] = {}
        self.inputs: dict[str, TensorType] = {}
        self.values: dict[str, Tensor] = dict(built.values)
        self.classes: dict[str, str] = {}
        self.nodes: list[Node] = []
        self.used: set[str] = set()
        self.trainable = {p.fqn for p in built.parameters if p.trainable}
        self.gradients: set[str] = set()

    def read_inputs(self, exported: Exported) -> None:
        program = exported.program
        placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        given, batch = [], []
        for spec in program.graph_signature.input_specs:
            target, node = _own(spec.target or ""), placeholders[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                batch.append(node)
            else:
                given.append((spec.kind, target, node))
            if spec.kind is InputKind.CONSTANT_TENSOR:
                self._keep_constant(self.built.canonical.get(target, target), program.constants[spec.target or ""])
        for fqn, node in exported.hidden.items():
            given.append((InputKind.BUFFER if fqn in self.built.buffers else InputKind.PARAMETER, fqn, node))
        if exported.hidden:  # among the others, in the model's order
            places = {fqn: place for place, fqn in enumerate(self.built.canonical)}
            given.sort(key=lambda item: places.get(item[1], len(places)))
        for kind, target, node in given:
            fqn = self.built.canonical.get(target, target)
            self._read_input(f"{'parameter' if kind is InputKind.PARAMETER else 'buffer'}:{fqn}", node)
            if kind is InputKind.PARAMETER and fqn in self.trainable:
                self.gradients.add(f"parameter:{fqn}")
        # By their places: torch makes names of its own (small letters) of the batch's keys.
        for node, item in zip(batch, exported.batch_inputs, strict=True):
            self._read_input(f"batch:{item.name}", node)

    def _read_input(self, name: str, node: fx.Node) -> None:
        self.names[node] = Ref(name)
        if isinstance(node.meta.get("val"), Tensor):
            self.inputs[name] = tensor_type(node.meta["val"])

    def _keep_constant(self, fqn: str, value: Any) -> None:
        value = getattr(value, "constant", None) if hasattr(value, "fake_mode") else value
        if isinstance(value, Tensor):
            self._refuse_batch_constant(value)
            self.values[fqn] = value

    def _refuse_batch_constant(self, value: Tensor) -> None:
        """A number of samples that the model's code has made a tensor of, or as many numbers as there are samples."""
        numbers = value.flatten().tolist() if value.numel() <= FEW and not value.is_complex() else []
        if any(abs(number) >= BATCH and number % BATCH == 0 for number in numbers if math.isfinite(number)) or any(
            extent and extent % BATCH == 0 for extent in value.shape
        ):
            raise ModelError(self.where, "a tensor is made of the number of samples, in Python", ADVICE)

    def read_nodes(self, module: fx.GraphModule, names: dict[fx.Node, Any], *, no_gradient: bool) -> list[str]:
        """Append a graph's nodes; ``names`` maps fx nodes to references. Returns the names of its outputs."""
        asserting = _asserting(module.graph)
        for node in module.graph.nodes:
            if node.op == "output":
                return [self._output(self._argument(item, names, node)) for item in node.args[0] if item is not None]
            if node.op == "get_attr":
                names[node] = getattr(module, str(node.target))
            elif node.op == "call_function" and node not in asserting:
                self._read_call(module, node, names, no_gradient)
        return []

    def _output(self, value: Argument) -> str:
        """The name of an output; a multiple of the batch, such as ``labels.numel()``, becomes a node."""
        if isinstance(value, Ref):
            return value.name
        if not isinstance(value, BatchMultiple):
            raise ModelError(self.where, f"loss() returned the number {value!r}", "it must be computed from the batch")
        name = "batch_count"
        while name in self.used:
            name += "_"
        self.used.add(name)
        fill = (("size", ()), ("fill_value", value), ("dtype", Dtype("int64")))
        self.nodes.append(Node(name, "full", fill, (TensorType((), "int64"),)))
        return name

    def _read_call(self, module: fx.GraphModule, node: fx.Node, names: dict[fx.Node, Any], no_gradient: bool) -> None:
        target: Any = node.target
        if target is operator.getitem:
            whole: Any = node.args[0]
            index: Any = node.args[1]
            if isinstance(names[whole], list):  # the outputs of a region that was put in its place
                names[node] = Ref(names[whole][index])
            else:
                self._append(node, "getitem", (("input", names[whole]), ("index", index)), names, no_gradient)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self._inline(node, names, no_gradient)
        elif not no_gradient and self._carries(node, names) and (region := parts(node)) is not None:
            placeholders = [inner for inner in region.graph.nodes if inner.op == "placeholder"]
            inner_names = dict(zip(placeholders, map(names.__getitem__, node.all_input_nodes), strict=True))
            found = self.read_nodes(region, inner_names, no_gradient=no_gradient)
            names[node] = found if isinstance(node.meta["val"], (tuple, list)) else Ref(found[0])
        elif isinstance(target, torch._ops.OpOverload):
            if target is torch.ops.aten.as_strided.default and (wrong := misread(node, BATCH)) is not None:
                raise ModelError(self._place(node), *wrong)
            self._append(node, _op_name(target), self._arguments(node, names), names, no_gradient)
        else:
            name = getattr(target, "__name__", str(target))
            raise ModelError(self._place(node), f"the size computation {name} has no fixed value")

    def _carries(self, node: fx.Node, names: dict[fx.Node, Any]) -> bool:
        """Whether an operand may have a gradient."""
        given = (names[each] for each in node.all_input_nodes)
        return any(isinstance(name, Ref) and name.name in self.gradients for name in given)

    def _inline(self, node: fx.Node, names: dict[fx.Node, Any], no_gradient: bool) -> None:
        """Put the body of a no_grad (or disabled autocast) region in its place."""
        kind = str(node.target)
        arguments: list[Any] = [names[a] if isinstance(a, fx.Node) else a for a in node.args]
        index = next((i for i, a in enumerate(arguments) if isinstance(a, fx.GraphModule)), None)
        if index is not None and "set_grad_enabled" in kind:
            no_gradient = no_gradient or not arguments[0]
        elif index is not None and "autocast" in kind and arguments[2] is not False:
            within = (self._place(inner) for inner in arguments[index].graph.nodes)
            raise ModelError(next((found for found in within if found != self.where), self.where),
                             "forward chooses a precision by itself (torch.autocast)",
                             "leave it out: --precision bf16 computes all of the model so, with float32 parameters")
        elif index is None or "autocast" not in kind:
            raise ModelError(self._place(node), f"the construct {kind} cannot be planned", "write it in plain tensor code")
        region: fx.GraphModule = arguments[index]
        placeholders = [inner for inner in region.graph.nodes if inner.op == "placeholder"]
        inner_names = dict(zip(placeholders, arguments[index + 1:], strict=True))
        names[node] = self.read_nodes(region, inner_names, no_gradient=no_gradient)

    def _append(
        self, node: fx.Node, op: str, arguments: tuple[tuple[str, Argument], ...], names: dict[fx.Node, Any],
        no_gradient: bool,
    ) -> None:
        name, count = node.name, 1
        while name in self.used:
            name, count = f"{node.name}_{count}", count + 1
        self.used.add(name)
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else (value,)
        refuse_unknown_shapes(values, op.partition(".")[0], self._place(node))
        types = tuple(tensor_type(item) for item in values if isinstance(item, Tensor))
        whole = node.args[0] if op == "getitem" and isinstance(node.args[0], fx.Node) else node
        made = Node(name, op, arguments, types, self._module(whole), source_of(whole.meta.get("stack_trace")))
        if types:
            carries = not self.gradients.isdisjoint(carrying(made))
            differentiable = carries and types[0].floating and not (no_gradient and not returns_operand(node))
            differentiable = differentiable and op != "detach"
            made = replace(made, differentiable=differentiable)
            self.gradients |= {name} if differentiable else set()
        else:
            code = f": {made.source.code}" if made.source else ""
            raise ModelError(self._place(node), f"control flow or a Python number depends on tensor values{code}",
                             "the traced graph must be the same for all data")
        names[node] = Ref(name)
        self.nodes.append(made)

    def _module(self, node: fx.Node) -> str:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        for path, kind in stack:
            name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            self.classes[_own(str(path))] = name
        return _own(str(stack[-1][0])) if stack else ""

    def _arguments(self, node: fx.Node, names: dict[fx.Node, Any]) -> tuple[tuple[str, Argument], ...]:
        pairs: list[tuple[str, Argument]] = []
        assert isinstance(node.target, torch._ops.OpOverload)
        for position, argument in enumerate(node.target._schema.arguments):
            if argument.name in RUNTIME_ARGUMENTS:
                continue
            if position < len(node.args):
                value = node.args[position]
            else:
                value = node.kwargs.get(argument.name, argument.default_value)
            pairs.append((argument.name, self._argument(value, names, node)))
        return tuple(pairs)

    def _argument(self, value: Any, names: dict[fx.Node, Any], node: fx.Node) -> Any:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(item, names, node) for item in value)
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return value
        if isinstance(value, int):
            return extent_of(value)
        if isinstance(value, float):
            self._refuse_batch_float(value, node)
            return value
        if isinstance(value, torch.dtype):
            return Dtype(name_of(value))
        raise ModelError(self._place(node), f"an argument of {node.target} is a {type(value).__name__}")

    def _refuse_batch_float(self, value: float, node: fx.Node) -> None:
        """A float k / batch, 1 / (k x batch), k x batch or a root of it was computed from the batch, by torch (what the model's
        own code computes is found in batches.py): wrong for any other."""
        if not 1e-100 < abs(value) < 1e100:
            return
        ratio = abs(value) * BATCH
        fraction = BATCH > round(ratio) >= 1 and abs(ratio - round(ratio)) < 1e-9 * ratio
        fraction |= 0 < round(1 / ratio) < 10_000_000 and math.isclose(1 / ratio, round(1 / ratio), rel_tol=1e-12)
        multiple = abs(value) >= BATCH and abs(value) < 2**53 and value % BATCH == 0
        square = value * value if abs(value) >= 1 else 1 / (value * value)
        root = 0 < round(square / BATCH) < 10_000 and math.isclose(square / BATCH, round(square / BATCH), rel_tol=1e-12)
        if fraction or multiple or root:
            wrong = f"the number {value!r} in {node.target} is computed from {SAMPLES}"
            raise ModelError(self._place(node), wrong, ADVICE)

    def _place(self, node: fx.Node) -> str:
        source = source_of(node.meta.get("stack_trace"))
        return f"{source.file}:{source.line}" if source else self.where


def _asserting(graph: fx.Graph) -> set[fx.Node]:
    """The asserts of a graph, of which a program has none, and the Python numbers that nothing but asserts reads."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        base = _op_name(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""
        number = isinstance(node.meta.get("val"), torch.types.py_sym_types) and found.issuperset(node.users)
        if node.op == "call_function" and (number or base.startswith(("_assert", "sym_constrain"))):
            found.add(node)
    return found


def _op_name(target: torch._ops.OpOverload) -> str:
    base, overload = target._schema.name.removeprefix("aten::"), target._schema.overload_name
    return f"{base}.{overload}" if overload else base
