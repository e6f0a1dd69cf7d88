"""ModelGraph: the traced training step, symbolic in the batch, as a chain of blocks.

Value names are local to a :class:`Body`. A body's values are its inputs, parameters, buffers and nodes; all share one
namespace. Between blocks, values have global names (``Block.reads`` / ``Block.writes``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import networkx as nx

from planner.ir.fused import FUSED, with_fused
from planner.ir.irregular import irregular_nodes
from planner.ir.regions import recompute_regions
from planner.ir.types import Argument, Ref, TensorType, references


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
class InitStep:
    """One step of an initialisation: ``normal(mean, std)``, ``uniform(low, high)``, ``trunc_normal(mean, std, low, high)``,
    ``constant(value)``, ``scale(factor)``, ``shift(amount)``, ``zero_row(index)``, ``value(bytes)`` (saved by
    value; their dtype follows where it is not the parameter's)."""

    op: str
    arguments: tuple[float | int | str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trained tensor of the whole model. ``fqn`` is its state key; ``aliases`` are the other names it is tied under."""

    fqn: str
    type: TensorType
    init: tuple[InitStep, ...]
    aliases: tuple[str, ...] = ()
    trainable: bool = True
    decay: bool = True


@dataclass(frozen=True, slots=True)
class Buffer:
    """A constant of the model. ``data`` is its little-endian bytes in base64, row-major.

    ``names``: the plain model's state keys that hold this value (none: it is not persistent). ``fixed``: what reads it
    was worked out while tracing (a mask that became a flag of attention), so a checkpoint may hold no other value.
    """

    fqn: str
    type: TensorType
    data: str
    names: tuple[str, ...] = ()
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class BatchInput:
    """A tensor that the data loader supplies for each sample. ``high``: exclusive bound of integer values (0: none known);
    ``shown``: where none is known, of those that the model's example inputs have (0: none has any). ``role``: ``tokens`` (drawn
    from data), ``targets`` (tokens shifted by one) or ``other``. ``like``: what floats are drawn as where they are made up, see
    :func:`planner.trace.examples.likeness`."""

    name: str
    type: TensorType
    role: Literal["tokens", "targets", "other"]
    high: int = 0
    shown: int = 0
    like: tuple[str | float, ...] = ("normal",)


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


@dataclass(frozen=True)
class Block:
    """One link of the chain: a body with its bindings. ``name`` labels it (``layers.3``, ``embedding``)."""

    name: str
    body: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...]
    buffers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ModelGraph:
    """A model's training step.

    ``context`` is the body of values that depend on no parameter (rotary tables, masks, the loss weight): its inputs
    bind to batch inputs by name, its outputs are global value names; every stage computes what it needs of it.
    ``blocks`` in execution order; the last writes ``loss`` (a sum over the weighted terms of one micro-batch).
    ``weight`` is the context output (a scalar) that counts the terms' weight.
    """

    name: str
    batch_inputs: tuple[BatchInput, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    context: Body
    bodies: tuple[Body, ...]
    blocks: tuple[Block, ...]
    loss: str
    weight: str
    dtype: str
    sequence: int
    warnings: tuple[str, ...] = ()

    @cached_property
    def on_accelerator(self) -> ModelGraph:
        """The same graph, as an accelerator's kernels run it. Costs are of that one, programs are written from this."""
        bodies = tuple(body.on_accelerator for body in self.bodies)
        return replace(self, context=self.context.on_accelerator, bodies=bodies)

    @cached_property
    def body_of(self) -> Mapping[str, Body]:
        return {body.name: body for body in self.bodies}

    @cached_property
    def parameter_of(self) -> Mapping[str, Parameter]:
        return {parameter.fqn: parameter for parameter in self.parameters}

    @cached_property
    def tied(self) -> tuple[tuple[Parameter, tuple[int, ...]], ...]:
        """The parameters that several blocks use, with the blocks' indices."""
        owners: dict[str, list[int]] = {}
        for index, block in enumerate(self.blocks):
            for fqn in {bound for _, bound in block.parameters}:
                owners.setdefault(fqn, []).append(index)
        return tuple((p, tuple(owners[p.fqn])) for p in self.parameters if len(owners.get(p.fqn, ())) > 1)

    @cached_property
    def strands(self) -> tuple[str, ...]:
        """Names of the blocks in which a chain of gradients begins: one, or the several of an encoder and a decoder. Where they
        are several, a stage can have parameters whose gradients do not come past its inputs' (``get_param_groups`` in
        ``torch/distributed/pipelining/_backward.py`` drops these), so no schedule may split its backward passes."""
        return tuple(block.name for block in self.blocks if self.body_of[block.body].begun)

    @cached_property
    def producer_of(self) -> Mapping[str, int]:
        """Index of the block that writes each activation."""
        return {name: index for index, block in enumerate(self.blocks) for name in block.writes}

    @cached_property
    def last_reader_of(self) -> Mapping[str, int]:
        return {name: index for index, block in enumerate(self.blocks) for name in block.reads}

    @cached_property
    def activation_types(self) -> Mapping[str, TensorType]:
        """Types of the values that blocks write."""
        return {
            name: self.body_of[block.body].types[value]
            for block in self.blocks
            for name, value in zip(block.writes, self.body_of[block.body].outputs, strict=True)
        }

    def made_for(self, blocks: Sequence[Block]) -> frozenset[str]:
        """The context's outputs that a stage of these blocks makes: those that are computed together have one function."""
        return frozenset(name for group in self.made_together(blocks) for name in group)

    def made_together(self, blocks: Sequence[Block]) -> list[tuple[str, ...]]:
        """The same, function by function."""
        here = {name for block in blocks for name in block.reads}
        return [group for group in self._made_together if here.intersection(group)]

    @cached_property
    def _made_together(self) -> tuple[tuple[str, ...], ...]:
        read = {name for block in self.blocks for name in block.reads}
        return self.context.together([name for name in self.context.outputs if name in read])

    def constants_of(self, blocks: Sequence[Block]) -> frozenset[str]:
        """The context's buffers that a stage of these blocks has on its device; every stage makes the loss's weight."""
        return self.context.origins([*self.made_for(blocks), self.weight]) & {buffer.name for buffer in self.context.buffers}

    def crossing(self, index: int) -> tuple[str, ...]:
        """Activations alive between block ``index - 1`` and block ``index``: what a pipeline cut there must send."""
        return self._crossings.get(index, ())

    @cached_property
    def _crossings(self) -> Mapping[int, tuple[str, ...]]:
        table: dict[int, list[str]] = {}
        for name, producer in self.producer_of.items():
            for index in range(producer + 1, self.last_reader_of.get(name, -1) + 1):
                table.setdefault(index, []).append(name)
        return {index: tuple(names) for index, names in table.items()}

    @cached_property
    def chain_type(self) -> TensorType | None:
        """The type of the activation that crosses most cuts; None where nothing with a gradient crosses one."""
        carried = {
            name for block in self.blocks for name, value in zip(block.writes, self.body_of[block.body].outputs, strict=True)
            if value in self.body_of[block.body].differentiable
        }
        crossing = Counter(
            self.activation_types[name]
            for index in range(1, len(self.blocks)) for name in self.crossing(index) if name in carried
        )
        return crossing.most_common(1)[0][0] if crossing else None

    @cached_property
    def parameter_count(self) -> int:
        return sum(parameter.type.elements() for parameter in self.parameters)

    def sharded_together(self, first: int, last: int) -> tuple[tuple[int, ...], ...]:
        """Of the blocks from ``first`` to before ``last``, those that share a parameter, or each one with others between them;
        by the first of each. Blocks that share none are alone."""
        ties: nx.Graph[int] = nx.Graph()
        ties.add_nodes_from(range(first, last))
        for blocks in self._homes.values():
            nx.add_path(ties, [index for index in blocks if first <= index < last])
        return tuple(sorted(tuple(sorted(part)) for part in nx.connected_components(ties)))

    def asked_in(self, first: int, last: int) -> Mapping[int, frozenset[str]]:
        """By block from ``first`` to before ``last``, run as one stage: the values of its body that a gradient comes back to.
        One comes with the loss, and (of zeros, if need be) to each value that is sent and carries one."""
        wanted = {self.loss, *self.crossing(last)}
        asked: dict[int, frozenset[str]] = {}
        for index in range(last - 1, first - 1, -1):
            block = self.blocks[index]
            body = self.body_of[block.body]
            written = zip(block.writes, body.outputs, strict=True)
            asked[index] = body.asked_by(value for name, value in written if name in wanted)
            read = zip(block.reads, body.inputs, strict=True)
            wanted |= {name for name, value in read if value.name in asked[index]}
        return asked

    def untrained_in(self, first: int, last: int) -> frozenset[str]:
        """Trained parameters (fqn) that the blocks from ``first`` to before ``last`` have and, as one stage, make no gradient
        of: they read detached values alone."""
        asked = self.asked_in(first, last)
        had = {fqn for index in asked for _, fqn in self.blocks[index].parameters if self.parameter_of[fqn].trainable}
        return frozenset(had - {
            fqn for index, values in asked.items() for name, fqn in self.blocks[index].parameters if name in values
        })

    def ungathered_in(self, first: int, last: int) -> frozenset[int]:
        """Of the blocks from ``first`` to before ``last``, run as one stage, those whose parameters torch does not gather for
        their backward pass under ZeRO 3: they share some, and the last of them ends in values that get no gradient, at whose
        end FSDP2 waits for the backward pass to begin (``_fsdp_state.py``, ``_register_pre_backward_hook``)."""
        reached = self._reached(first, last)
        return frozenset(
            index for unit in self.sharded_together(first, last) if not reached[unit[-1]]
            for index in unit if any(reached[other] for other in unit)
        )

    @cached_property
    def ungathered_whole(self) -> frozenset[int]:
        """The same of all blocks as one stage."""
        return self.ungathered_in(0, len(self.blocks))

    @cached_property
    def ungathered(self) -> frozenset[int]:
        """The blocks that may be so in some stage, wherever the cuts are."""
        count = len(self.blocks)
        reached, found = self._reached(0, count), set[int]()
        for unit in self.sharded_together(0, count):
            late = [index for index in unit if not reached[index]]
            if late and any(reached[index] for index in unit if index < late[-1]):
                found.update(unit)
        return frozenset(found)

    def _reached(self, first: int, last: int) -> Mapping[int, bool]:
        """By block of a stage, whether a gradient comes to one of its outputs. One of zeros comes from a block with parameters
        that makes none for what it reads (``_fsdp_param_group.py``, ``RegisterPostBackwardFunction``)."""
        asked = self.asked_in(first, last)
        fed = {name for index in asked if self.blocks[index].parameters for name in self.blocks[index].reads}
        return {
            index: any(
                value in asked[index] or (name in fed and value in body.differentiable)
                for name, value in zip(block.writes, body.outputs, strict=True)
            )
            for index, block, body in (
                (index, self.blocks[index], self.body_of[self.blocks[index].body]) for index in asked
            )
        }

    def tied_blocks(self, fqn: str) -> tuple[int, ...]:
        """Indices of the blocks that use a parameter (more than one: it is tied)."""
        return self._homes.get(fqn, ())

    @cached_property
    def _homes(self) -> Mapping[str, tuple[int, ...]]:
        """By parameter, the blocks that use it."""
        homes: dict[str, dict[int, None]] = {}
        for index, block in enumerate(self.blocks):
            for _, fqn in block.parameters:
                homes.setdefault(fqn, {})[index] = None
        return {fqn: tuple(blocks) for fqn, blocks in homes.items()}


__all__ = [
    "BatchInput", "Block", "Body", "BodyValue", "Buffer", "InitStep", "ModelGraph", "Node", "Parameter", "Ref", "Source",
]
