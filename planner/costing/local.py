"""One rank's view of a placed body: conversions made explicit, every value with its layout and the storage it lives in.

A value read in a placement other than the one it was produced in is a second value, ``name -> placement``, made once
before its first reader. Conversions that move nothing (``identity``) are views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.ir.body import Body, Node
from planner.ir.placement import (
    REPLICATE,
    BodyPlacement,
    Conversion,
    OpStrategy,
    Placement,
    conversion,
    local_type,
)
from planner.ir.types import HALF, TensorType
from planner.ops.layout import Layout, fresh
from planner.ops.results import PATCHES, result_layouts
from planner.ops.saved import saved


@dataclass(frozen=True)
class Step:
    """A node's call, or a conversion (``node`` None). ``needs``: for which operands autograd can make a gradient; ``kept``:
    storages that it keeps of the call; ``extra_bytes``: what it keeps that is neither operand nor output. Values are keys
    of :class:`LocalBody`."""

    node: Node | None
    operands: tuple[str, ...]
    outputs: tuple[str, ...]
    strategy: OpStrategy | None = None
    conversion: Conversion | None = None
    whole: TensorType | None = None
    differentiable: bool = False
    needs: tuple[bool, ...] = ()
    kept: tuple[str, ...] = ()
    extra_bytes: int = 0


@dataclass(frozen=True)
class LocalBody:
    """Steps in execution order. ``types`` and ``layouts`` by value; ``root``: the value whose storage a value lives
    in; ``gapped``: bytes of the storages that are larger than the value that they were made for."""

    body: Body
    batch: int
    steps: tuple[Step, ...]
    types: Mapping[str, TensorType]
    layouts: Mapping[str, Layout]
    root: Mapping[str, str]
    gapped: Mapping[str, int]
    outputs: tuple[str, ...]

    def storage_bytes(self, root: str) -> int:
        return self.gapped.get(root) or self.layouts[root].size_bytes


@dataclass(frozen=True, eq=False)
class Wiring:
    """A placed body on rank 0 (which holds the most), whatever the batch: steps without what is kept of them, and the local
    type of every value. ``parts``: results of operations that have several."""

    body: Body
    degree: int
    steps: tuple[Step, ...]
    types: Mapping[str, TensorType]
    outputs: tuple[str, ...]
    parts: frozenset[str]

    def local(self, batch: int) -> LocalBody:
        """With all that depends on extents: how values lie, which share a storage, and what autograd keeps."""
        build = _Layouts(self, batch)
        steps = tuple(map(build.run, self.steps))
        return LocalBody(self.body, batch, steps, self.types, build.layouts, build.root, build.gapped, self.outputs)


@dataclass
class _Layouts:
    """Layouts under construction for one batch."""

    wiring: Wiring
    batch: int
    layouts: dict[str, Layout] = field(default_factory=dict)
    root: dict[str, str] = field(default_factory=dict)
    gapped: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        body = self.wiring.body
        for value in (*body.inputs, *body.parameters, *body.buffers):
            self.declare(value.name)

    def declare(self, name: str) -> None:
        self.layouts[name], self.root[name] = fresh(self.wiring.types[name], self.batch), name

    def run(self, step: Step) -> Step:
        """The same step with what is kept of it."""
        first = step.operands[0] if step.operands else ""
        if step.node is None and step.conversion is not None and step.conversion.forward != "identity":
            self.declare(step.outputs[0])
            return step
        if step.node is None or (step.node.base == "getitem" and first in self.wiring.parts):
            (name,) = step.outputs
            self.layouts[name], self.root[name] = self.layouts[first], self.root[first]
            return step
        held = tuple(self.layouts[key] for key in step.operands)
        types = tuple(self.wiring.types[name] for name in step.outputs)
        layouts, view = result_layouts(step.node, held, types, self.batch, step.needs)
        for name, layout in zip(step.outputs, layouts, strict=True):
            self.layouts[name], self.root[name] = layout, self.root[first] if view else name
        if step.node.base in PATCHES and not held[0].overlaps and self.root[first] != first:
            root = self.root[first]
            self.gapped[step.outputs[0]] = self.gapped.get(root) or self.layouts[root].size_bytes
        kept = saved(step.node, held, layouts, step.needs, step.strategy if self.wiring.degree > 1 else None)
        values = (*(step.operands[i] for i in kept.operands), *(step.outputs[i] for i in kept.outputs))
        if not values and not kept.extra_bytes:
            return step
        roots = tuple(dict.fromkeys(self.root[value] for value in values))
        return Step(
            step.node, step.operands, step.outputs, step.strategy, None, None, step.differentiable, step.needs, roots,
            kept.extra_bytes,
        )


@dataclass
class _Builder:
    body: Body
    degree: int
    steps: list[Step] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    placed: dict[str, Placement] = field(default_factory=dict)
    parts: dict[str, tuple[tuple[str, Placement], ...]] = field(default_factory=dict)

    def declare(self, name: str, whole: TensorType, placement: Placement) -> None:
        self.types[name], self.placed[name] = local_type(whole, placement, self.degree), placement

    def read(self, name: str, target: Placement) -> str:
        """The key of ``name`` in placement ``target``, converting it on first need."""
        source = self.placed[name]
        if source == target or self.degree == 1:
            return name
        key = f"{name} -> {target}"
        if key in self.types:
            return key
        whole = self.body.types[name]
        differentiable = name in self.body.differentiable
        step = conversion(source, target, whole, self.degree, differentiable=differentiable)
        step = step or Conversion(source, target, "identity", "identity")
        self.declare(key, whole, target)
        self.steps.append(Step(None, (name,), (key,), None, step, whole, differentiable))
        return key

    def run(self, node: Node, strategy: OpStrategy | None) -> None:
        if node.base == "getitem" and node.operands[0] in self.parts:
            index = node.argument("index")
            assert isinstance(index, int)
            picked, placement = self.parts[node.operands[0]][index]
            self.types[node.name], self.placed[node.name] = self.types[picked], placement
            self.steps.append(Step(node, (picked,), (node.name,), strategy, differentiable=node.differentiable))
            return
        wanted = strategy.operands if strategy else (REPLICATE,) * len(node.operands)
        made = strategy.outputs if strategy else (REPLICATE,) * len(node.types)
        operands = tuple(self.read(name, target) for name, target in zip(node.operands, wanted, strict=True))
        names = (node.name,) if len(node.types) == 1 else tuple(f"{node.name}#{i}" for i in range(len(node.types)))
        types = tuple(self._computed(node, operands, local_type(t, p, self.degree))
                      for t, p in zip(node.types, made, strict=True))
        for name, type_, placement in zip(names, types, made, strict=True):
            self.types[name], self.placed[name] = type_, placement
        if len(names) != 1:
            self.parts[node.name] = tuple(zip(names, made, strict=True))
        needs = self.body.needs(node)
        self.steps.append(Step(node, operands, names, strategy, None, None, node.differentiable, needs))

    def _computed(self, node: Node, operands: tuple[str, ...], type_: TensorType) -> TensorType:
        """The type that the program has: a loss of half precision is float32 (:mod:`planner.ir.halves`), and so is what torch
        makes of it and of others: single numbers of any, tensors of tensors."""
        if type_.dtype not in HALF or node.base in ("to", "_to_copy", "type_as"):
            return type_
        wide = any(
            self.types[value].dtype == "float32" and (
                not type_.shape if not self.types[value].shape else self.body.types[name].dtype in HALF
            )
            for name, value in zip(node.operands, operands, strict=True)
        )
        return replace(type_, dtype="float32") if wide or node.base == "cross_entropy_loss" else type_


def wire(body: Body, placement: BodyPlacement | None) -> Wiring:
    """What a placed body runs on one rank; ``placement`` None: one rank, all whole."""
    build = _Builder(body, placement.degree if placement else 1)
    inputs = placement.inputs if placement else (REPLICATE,) * len(body.inputs)
    parameters = placement.parameters if placement else (REPLICATE,) * len(body.parameters)
    for value, placed in zip((*body.inputs, *body.parameters), (*inputs, *parameters), strict=True):
        build.declare(value.name, value.type, placed)
    for value in body.buffers:
        build.declare(value.name, value.type, REPLICATE)
    strategies = {node.node: node.strategy for node in placement.nodes} if placement else {}
    for node in body.nodes:
        build.run(node, strategies.get(node.name))
    targets = placement.outputs if placement else (REPLICATE,) * len(body.outputs)
    outputs = tuple(build.read(name, target) for name, target in zip(body.outputs, targets, strict=True))
    parts = frozenset(name for several in build.parts.values() for name, _ in several)
    return Wiring(body, build.degree, tuple(build.steps), build.types, outputs, parts)


def localise(body: Body, placement: BodyPlacement | None, batch: int) -> LocalBody:
    """A placed body on rank 0 for ``batch`` samples; ``placement`` None: one rank, all whole."""
    return wire(body, placement).local(batch)
