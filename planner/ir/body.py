"""Body: a piece of graph that blocks repeat, and its nodes.

Value names are local to a :class:`Body`. A body's values are its inputs, parameters, buffers and nodes; all share one
namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx

from planner.ir.fused import FUSED, with_fused
from planner.ir.irregular import irregular_nodes
from planner.ir.regions import recompute_regions
from planner.ir.types import Argument, TensorType, references


@dataclass(frozen=True, slots=True)
class Source:
    """Where in the user's code a node comes from."""

    file: str
    line: int
    code: str


@dataclass(frozen=True)
class Node:
    """One training-level operation.

    ``op`` is torch's schema name without the ``aten::`` prefix, with the overload where it is not ``default``
    (``linear``, ``add.Tensor``, ``mean.dim``); ``getitem`` picks one output of a node with several. ``arguments`` holds
    every argument under its schema name, defaults included, in schema order (``getitem``: ``input``, ``index``).
    ``types`` has one entry per output tensor. ``differentiable``: some output carries a gradient to a parameter.
    Graphs are functional: no node changes another's value (in-place forms were rewritten by the tracer).
    """

    name: str
    op: str
    arguments: tuple[tuple[str, Argument], ...]
    types: tuple[TensorType, ...]
    module: str = ""
    source: Source | None = None
    differentiable: bool = False

    @cached_property
    def base(self) -> str:
        """The operation without its overload."""
        return self.op.split(".")[0]

    @property
    def fused(self) -> bool:
        """Whether an accelerator's kernel runs it that keeps less than the CPU's: see :mod:`planner.ir.fused`."""
        return self.op.endswith(f".{FUSED}")

    @property
    def type(self) -> TensorType:
        """The only output's type (of several, the first's)."""
        return self.types[0]

    def argument(self, name: str) -> Argument:
        return dict(self.arguments)[name]

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the tensor operands, once per occurrence, in argument order. Op strategies align with this tuple."""
        return tuple(name for _, argument in self.arguments for name in references(argument))


@dataclass(frozen=True, slots=True)
class BodyValue:
    """A body's named input, parameter or buffer. ``differentiable``: a gradient flows to it."""

    name: str
    type: TensorType
    differentiable: bool = False


@dataclass(frozen=True)
class Body:
    """A distinct piece of graph, shared by all blocks that repeat it.

    ``name`` is a Python class name (from the user's module class). ``inputs`` bind to ``Block.reads``, ``outputs`` (value
    names) to ``Block.writes``. ``parameters``' and ``buffers``' names are valid dotted attribute paths relative to the
    block, bound to FQNs by ``Block.parameters`` / ``Block.buffers``. Nodes are in execution order.
    """

    name: str
    inputs: tuple[BodyValue, ...]
    parameters: tuple[BodyValue, ...]
    buffers: tuple[BodyValue, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """Type of every single-tensor value by name (a node with several outputs: its first)."""
        table = {value.name: value.type for value in (*self.inputs, *self.parameters, *self.buffers)}
        return table | {node.name: node.type for node in self.nodes if node.types}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """Nodes that read each value, in order, each once."""
        table: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.operands):
                table.setdefault(name, []).append(node)
        return {name: tuple(nodes) for name, nodes in table.items()}

    @cached_property
    def dataflow(self) -> nx.DiGraph[str]:
        """The nodes as a directed graph by name, an edge from each producer to each consumer."""
        flow: nx.DiGraph[str] = nx.DiGraph()
        flow.add_nodes_from(node.name for node in self.nodes)
        flow.add_edges_from((name, node.name) for node in self.nodes for name in node.operands if name in self.by_name)
        return flow

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    def origins(self, names: Iterable[str]) -> frozenset[str]:
        """The values that ``names`` are computed from, themselves included."""
        flow, named = self.dataflow, frozenset(names)
        nodes = {name for name in named if name in flow}
        nodes = nodes.union(*(nx.ancestors(flow, name) for name in nodes))
        return named.union(nodes, (operand for name in nodes for operand in self.by_name[name].operands))

    def part(self, outputs: Sequence[str]) -> Body:
        """What ``outputs`` need."""
        needed = self.origins(outputs)
        inputs, parameters, buffers = (
            tuple(value for value in group if value.name in needed) for group in (self.inputs, self.parameters, self.buffers)
        )
        nodes = tuple(node for node in self.nodes if node.name in needed)
        return Body(self.name, inputs, parameters, buffers, nodes, tuple(outputs))

    def together(self, outputs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """``outputs`` in groups that share a computed value, in order of their first."""
        computed = self.origins(outputs) & set(self.by_name)
        parts = list(nx.weakly_connected_components(self.dataflow.subgraph(computed)))
        alone = [(name,) for name in outputs if name not in computed]
        groups = (*alone, *(tuple(name for name in outputs if name in part) for part in parts))
        return tuple(sorted(filter(None, groups), key=lambda group: outputs.index(group[0])))

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """Values that carry a gradient."""
        named = {v.name for v in (*self.inputs, *self.parameters) if v.differentiable}
        return frozenset(named | {node.name for node in self.nodes if node.differentiable})

    def needs(self, node: Node) -> tuple[bool, ...]:
        """For which of a node's operands autograd can make a gradient; aligns with ``Node.operands``."""
        return tuple(node.differentiable and name in self.differentiable for name in node.operands)

    @cached_property
    def asked(self) -> frozenset[str]:
        """Values that a gradient comes back to: those that lead to an output that carries one. What autograd records beside
        them (before an argmin, or a detach) is forgotten with the last of its results."""
        return self.asked_by(self.outputs)

    def asked_by(self, outputs: Iterable[str]) -> frozenset[str]:
        """The same, where gradients come to these outputs alone."""
        wanted = set(self.differentiable.intersection(outputs))
        for node in reversed(self.nodes):
            if node.differentiable and node.name in wanted:
                wanted |= self.differentiable.intersection(node.operands)
        return frozenset(wanted)

    def made(self, node: Node) -> tuple[bool, ...]:
        """For which of a node's operands the backward pass makes a gradient; aligns with ``Node.operands``."""
        return tuple(needed and node.name in self.asked for needed in self.needs(node))

    @cached_property
    def on_accelerator(self) -> Body:
        """The same body, as an accelerator's kernels run it: see :mod:`planner.ir.fused`."""
        return replace(self, nodes=with_fused(self.nodes, self.types))

    @cached_property
    def irregular(self) -> frozenset[str]:
        """Nodes whose operands do not lie side by side: see :func:`~planner.ir.irregular.irregular_nodes`."""
        return irregular_nodes(self.nodes, self.types, frozenset(value.name for value in self.parameters))

    @cached_property
    def joined(self) -> Mapping[str, tuple[bool, ...]]:
        """By node, for which of its operands the backward pass makes a gradient that is added to another reader's (of what has
        several results, each ``getitem`` reads its own)."""
        table: dict[str, tuple[bool, ...]] = {}
        read: set[str] = set()
        for node in self.nodes:
            joins = []
            for name, made in zip(node.operands, self.made(node), strict=True):
                joins.append(made and name in read)
                if made and node.base != "getitem":
                    read.add(name)
            table[node.name] = tuple(joins)
        return table

    @cached_property
    def regions(self) -> tuple[tuple[str, ...], ...]:
        """What selective recomputation repeats: see :func:`~planner.ir.regions.recompute_regions`."""
        return recompute_regions(self)

    @cached_property
    def begun(self) -> frozenset[str]:
        """Outputs that carry a gradient, though they are made of no input that does."""
        reached = {value.name for value in self.inputs if value.differentiable}
        for node in self.nodes:
            if node.differentiable and not reached.isdisjoint(node.operands):
                reached.add(node.name)
        return self.differentiable.intersection(self.outputs) - reached
