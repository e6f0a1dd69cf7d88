"""ModelGraph: the traced training step, symbolic in the batch, as a chain of blocks.

Between blocks, values have global names (``Block.reads`` / ``Block.writes``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import networkx as nx

from planner.ir.body import Body
from planner.ir.reach import GradientReach
from planner.ir.types import TensorType

Slot = tuple[str, str]
"""A parameter of a body: the body's name and the parameter's name in it."""


@dataclass(frozen=True, slots=True)
class InitStep:
    """One step of an initialisation: ``normal(mean, std)``, ``uniform(low, high)``, ``trunc_normal(mean, std, low, high)``,
    ``constant(value)``, ``scale(factor)``, ``shift(amount)``, ``zero_row(index)``, ``value(bytes)`` (saved by
    value; their dtype follows where it is not the parameter's), ``draws_of(name)`` (the draws that follow are those of the
    parameter of that name, of as many elements)."""

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


Role = Literal["tokens", "targets", "other", "share"]


@dataclass(frozen=True, slots=True)
class BatchInput:
    """A tensor that the data loader supplies for each sample. ``high``: exclusive bound of integer values (0: none known);
    ``shown``: where none is known, of those that the model's example inputs have (0: none has any). ``role``: ``tokens`` (drawn
    from data), ``targets`` (tokens shifted by one), ``share`` (see ModelGraph) or ``other``. ``like``: what floats are drawn as
    where they are made up, see :func:`planner.trace.examples.likeness`."""

    name: str
    type: TensorType
    role: Role
    high: int = 0
    shown: int = 0
    like: tuple[str | float, ...] = ("normal",)


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
    ``weight`` is the context output (a scalar) that counts the terms' weight. ``shares``: of averages over other
    weights, which are such outputs too, the batch input that is the step's whole ``weight`` over that one, and that weight.
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
    shares: tuple[tuple[str, str], ...] = ()

    @property
    def weights(self) -> tuple[str, ...]:
        """The context's outputs that a step weighs its terms by."""
        return (self.weight, *(weight for _, weight in self.shares))

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
        """The context's buffers that a stage of these blocks has on its device; every stage makes the loss's weights."""
        return self.context.origins([*self.made_for(blocks), *self.weights]) & {buffer.name for buffer in self.context.buffers}

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
        """The type of the activations that a split boundary splits. Of those with a gradient that cross cuts, one with a
        sequence to split (a conditioning of [batch, features] may cross more); of several what crosses most, then the larger.
        Where none has a sequence what crosses most; None where nothing with a gradient crosses a cut."""
        carried = {
            name for block in self.blocks for name, value in zip(block.writes, self.body_of[block.body].outputs, strict=True)
            if value in self.body_of[block.body].differentiable
        }
        crossing = Counter(
            self.activation_types[name]
            for index in range(1, len(self.blocks)) for name in self.crossing(index) if name in carried
        )
        if not any(map(self.sequence_dims, crossing)):
            return crossing.most_common(1)[0][0] if crossing else None
        return max(filter(self.sequence_dims, crossing), key=lambda type_: (crossing[type_], type_.size_bytes()))

    def sequence_dims(self, type_: TensorType) -> tuple[int, ...]:
        """The dims as long as the sequence, but for the last (features)."""
        return tuple(dim for dim, extent in enumerate(type_.shape[:-1]) if extent == self.sequence)

    @cached_property
    def parameter_count(self) -> int:
        return sum(parameter.type.elements() for parameter in self.parameters)

    def sharded_together(self, first: int, last: int) -> tuple[tuple[int, ...], ...]:
        """Of the blocks from ``first`` to before ``last``, those that share a parameter, or each one with others between them;
        by the first of each. Blocks that share none are alone."""
        ties: nx.Graph[int] = nx.Graph()
        ties.add_nodes_from(range(first, last))
        for blocks in self._tied_homes:
            nx.add_path(ties, [index for index in blocks if first <= index < last])
        return tuple(sorted(tuple(sorted(part)) for part in nx.connected_components(ties)))

    @cached_property
    def gradients(self) -> GradientReach:
        """Where gradients come to, stage by stage."""
        return GradientReach(self)

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

    @cached_property
    def tied_slots(self) -> tuple[frozenset[Slot], ...]:
        """Groups of body parameters that must lie alike, because some parameter of the model is bound to several of them."""
        bound: dict[str, set[Slot]] = {}
        for block in self.blocks:
            for name, fqn in block.parameters:
                bound.setdefault(fqn, set()).add((block.body, name))
        ties: nx.Graph[Slot] = nx.Graph()
        for slots in bound.values():
            nx.add_path(ties, sorted(slots))
        return tuple(frozenset(group) for group in nx.connected_components(ties) if len(group) > 1)

    @cached_property
    def stands_for(self) -> Mapping[tuple[str, int], int]:
        """How many parameters a body's parameter (body, its position there) stands for; a tied one counts where it is bound
        last."""
        holder = {}
        for block in self.blocks:
            bindings = dict(block.parameters)
            for at, parameter in enumerate(self.body_of[block.body].parameters):
                holder[bindings[parameter.name]] = (block.body, at)
        return Counter(holder.values())

    @cached_property
    def _tied_homes(self) -> frozenset[tuple[int, ...]]:
        """The blocks that use a parameter, where those are several."""
        return frozenset(blocks for blocks in self._homes.values() if len(blocks) > 1)
