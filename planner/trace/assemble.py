"""Pass 10: segments become blocks over shared bodies, with readable names and all bindings."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from planner.ir.body import Body, BodyValue
from planner.ir.errors import ModelError
from planner.ir.graph import Block, ModelGraph
from planner.ir.types import Argument, Ref, exact
from planner.trace.blocks import Segment
from planner.trace.bounds import bounded
from planner.trace.buffers import unknown_buffers, values_of_buffers
from planner.trace.build import BuiltModel
from planner.trace.canonical import substitute
from planner.trace.flat import FlatGraph
from planner.trace.names import RESERVED, attribute_path, name_values, unique_path, unnumbered
from planner.trace.packing import packed


@dataclass(frozen=True)
class _Ends:
    """What a segment reads and writes, as flat value names in order of first use."""

    reads: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    writes: tuple[str, ...]


def assemble(name: str, graph: FlatGraph, segments: Sequence[Segment], built: BuiltModel) -> ModelGraph:
    """The ModelGraph of a partitioned flat graph."""
    loss, weight, *others = graph.outputs
    if not graph.context.issuperset((weight, *others)):
        raise ModelError(graph.where, "the loss's weight depends on parameters", "it must come from the batch alone")
    all_ends = _ends(graph, segments)
    names = _Names(graph, all_ends)
    context = packed(_context(graph, names), turned=True)
    names.give(names.context_outputs, context.outputs)
    bodies: dict[object, Body] = {}
    blocks: list[Block] = []
    for index, (segment, ends) in enumerate(zip(segments, all_ends, strict=True)):
        key = _body_key(graph, segment, ends)
        if key not in bodies:
            bodies[key] = _body(graph, segment, ends, names, _class_name(graph, segment, bodies.values(), loss))
        body = bodies[key]
        names.write(index, ends.writes, body.outputs)
        blocks.append(Block(
            name=_label(segment, body, blocks),
            body=body.name,
            reads=tuple(names.of[value] for value in ends.reads),
            writes=tuple(names.of[value] for value in ends.writes),
            parameters=tuple((v.name, _bare(fqn)) for v, fqn in zip(body.parameters, ends.parameters, strict=True)),
            buffers=tuple((v.name, _bare(fqn)) for v, fqn in zip(body.buffers, ends.buffers, strict=True)),
        ))
    used = [value.name for value in context.buffers] + [fqn for block in blocks for _, fqn in block.buffers]
    return ModelGraph(
        name=name, batch_inputs=bounded(graph), parameters=built.parameters,
        buffers=values_of_buffers(graph, tuple(dict.fromkeys(used)), built), context=context,
        bodies=tuple(bodies.values()), blocks=tuple(blocks), loss=names.of[loss], weight=names.of[weight],
        dtype=built.dtype, sequence=graph.sequence,
        shares=tuple(zip(_shares(graph), (names.of[value] for value in others), strict=True)),
        warnings=(
            *graph.warnings, *_idle_parameters(built, blocks), *unknown_buffers(built, used), *_frozen_starts(built),
            *_copied_starts(built, used), *_casts(built),
        ),
    )


def _shares(graph: FlatGraph) -> tuple[str, ...]:
    return tuple(given.name for given in graph.batch_inputs if given.role == "share")


def _frozen_starts(built: BuiltModel) -> tuple[str, ...]:
    return tuple(
        f"parameter {fqn} starts from one draw kept by value, whatever the seed: its initialisation cannot be replayed"
        for fqn in built.frozen
    )


def _copied_starts(built: BuiltModel, used: Collection[str]) -> tuple[str, ...]:
    return tuple(
        f"{fqn} is kept as it was computed from the start of parameter {parameter} while planning: a program draws another"
        for fqn, parameter in built.copied.items() if fqn in used
    )


def _casts(built: BuiltModel) -> tuple[str, ...]:
    first = next(iter(built.cast), None)
    if first is None:
        return ()
    said = f"parameter {first} and {others} more are" if (others := len(built.cast) - 1) else f"parameter {first} is"
    return (f"{said} {built.cast[first]} in the model: a program computes with all of them in {built.dtype}",)


def _idle_parameters(built: BuiltModel, blocks: Sequence[Block]) -> tuple[str, ...]:
    bound = {fqn for block in blocks for _, fqn in block.parameters}
    return tuple(f"parameter {p.fqn} takes no part in the loss" for p in built.parameters if p.fqn not in bound)


def _bare(name: str) -> str:
    """The fqn (or batch key) of a flat value name."""
    return name.partition(":")[2]


def _ends(graph: FlatGraph, segments: Sequence[Segment]) -> tuple[_Ends, ...]:
    home = {node.name: index for index, segment in enumerate(segments) for node in segment.nodes}
    escaping = set(graph.outputs)
    for index, segment in enumerate(segments):
        escaping.update(name for node in segment.nodes for name in node.operands if home.get(name, index) != index)
    ends = []
    for index, segment in enumerate(segments):
        operands = dict.fromkeys(name for node in segment.nodes for name in node.operands if home.get(name) != index)
        kinds = {name: name.partition(":")[0] if ":" in name else "" for name in operands}
        ends.append(_Ends(
            reads=tuple(name for name in operands if kinds[name] in ("", "batch")),
            parameters=tuple(name for name in operands if kinds[name] == "parameter"),
            buffers=tuple(name for name in operands if kinds[name] == "buffer"),
            writes=tuple(node.name for node in segment.nodes if node.name in escaping),
        ))
    return tuple(ends)


class _Names:
    """Global names of values, given in the order in which blocks write them."""

    def __init__(self, graph: FlatGraph, ends: Sequence[_Ends]) -> None:
        self.of = {f"batch:{given.name}": given.name for given in graph.batch_inputs}
        self.taken = set(self.of.values()) | {_bare(name) for name in graph.inputs if name.startswith("buffer:")}
        self.loss, weight, *others = graph.outputs
        nodes = tuple(node for node in graph.nodes if node.name in graph.context)
        elsewhere = (node.source for node in graph.nodes if node.name not in graph.context)
        self.context = name_values(nodes, self.taken, {weight: "weight"}, elsewhere)
        wanted = {name for end in ends for name in end.reads} | {weight, *others}
        self.context_outputs = tuple(node.name for node in nodes if node.name in wanted)
        self.of |= {name: self.context[name] for name in self.context_outputs}
        self.taken |= set(self.context.values())

    def give(self, values: Sequence[str], names: Sequence[str]) -> None:
        """Others than they had."""
        self.of.update(zip(values, names, strict=True))
        self.taken.update(names)

    def write(self, index: int, values: Sequence[str], local: Sequence[str]) -> None:
        for value, name in zip(values, local, strict=True):
            unique = "loss" if value == self.loss else f"{re.sub(r'_[0-9]+$', '', name)}_{index}"
            while unique in self.taken:
                unique += "_"
            self.taken.add(unique)
            self.of[value] = unique


def _context(graph: FlatGraph, names: _Names) -> Body:
    nodes = tuple(node for node in graph.nodes if node.name in graph.context)
    operands = dict.fromkeys(name for node in nodes for name in node.operands)
    renamed = names.context | {name: _bare(name) for name in operands if ":" in name}
    for name in operands:
        if name.startswith("buffer:") and f"batch:{_bare(name)}" in operands:
            wrong = f"{_bare(name)} is a batch input and a buffer, and what depends on no parameter reads both"
            raise ModelError(graph.where, wrong, "give one of them another name")
    return Body(
        name="Context",
        inputs=tuple(BodyValue(_bare(n), graph.inputs[n]) for n in operands if n.startswith("batch:")),
        parameters=(),
        buffers=tuple(BodyValue(_bare(n), graph.inputs[n]) for n in operands if n.startswith("buffer:")),
        nodes=tuple(replace(substitute(node, renamed), name=renamed[node.name]) for node in nodes),
        outputs=tuple(names.context[name] for name in names.context_outputs),
    )


def _body_key(graph: FlatGraph, segment: Segment, ends: _Ends) -> object:
    """Equal for segments that are the same function."""
    numbered = {name: (kind, index) for kind, group in (("r", ends.reads), ("p", ends.parameters), ("b", ends.buffers))
                for index, name in enumerate(group)}
    numbered |= {node.name: ("n", index) for index, node in enumerate(segment.nodes)}

    def shape(argument: Argument) -> object:
        if isinstance(argument, Ref):
            return numbered[argument.name]
        return tuple(map(shape, argument)) if isinstance(argument, tuple) else exact(argument)

    nodes = tuple((n.op, tuple(shape(value) for _, value in n.arguments), n.types, n.differentiable)
                  for n in segment.nodes)
    outer = (*ends.reads, *ends.parameters, *ends.buffers)
    types = tuple((graph.type_of(name), graph.differentiable(name)) for name in outer)
    return nodes, types, tuple(numbered[name] for name in ends.writes)


def _body(graph: FlatGraph, segment: Segment, ends: _Ends, names: _Names, class_name: str) -> Body:
    parameters: list[str] = []
    for fqn in (*ends.parameters, *ends.buffers):
        parameters.append(unique_path(_attribute(_bare(fqn), segment), parameters))
    roots = {path.partition(".")[0] for path in parameters}
    renamed: dict[str, str] = dict(zip((*ends.parameters, *ends.buffers), parameters, strict=True))
    taken = set(roots)
    for value in ends.reads:
        wanted = name = re.sub(r"_\d+$", "", names.of[value]) if value in graph.by_name else names.of[value]
        count = 2
        while name in taken or name in RESERVED:
            name, count = f"{wanted}_{count}", count + 1
        taken.add(name)
        renamed[value] = name
    renamed |= name_values(segment.nodes, taken, {graph.outputs[0]: "loss"})

    def values(group: Sequence[str]) -> tuple[BodyValue, ...]:
        return tuple(BodyValue(renamed[n], graph.type_of(n), graph.differentiable(n)) for n in group)

    return packed(Body(
        name=class_name,
        inputs=values(ends.reads),
        parameters=values(ends.parameters),
        buffers=values(ends.buffers),
        nodes=tuple(replace(substitute(node, renamed), name=renamed[node.name]) for node in segment.nodes),
        outputs=tuple(renamed[name] for name in ends.writes),
    ))


def _attribute(fqn: str, segment: Segment) -> str:
    """Path relative to the block; where blocks have no module of their own, without the number that tells them apart."""
    path = attribute_path(fqn, segment.path)
    return unnumbered(path) if segment.repeats and not segment.path else path


def _class_name(graph: FlatGraph, segment: Segment, others: object, loss: str) -> str:
    taken = {body.name for body in others} | {"Context", "Stage"}  # type: ignore[attr-defined]
    if segment.path in graph.classes and segment.path:
        wanted = graph.classes[segment.path].rpartition(".")[2]
    elif any(node.name == loss for node in segment.nodes):
        wanted = "Head"
    elif not segment.repeats and any(node.base == "embedding" for node in segment.nodes):
        wanted = "Embedding"
    else:
        wanted = "Repeat" if segment.repeats else "Section"
    name, count = wanted, 2
    while name in taken or name in RESERVED:
        name, count = f"{wanted}{count}", count + 1
    return name


def _label(segment: Segment, body: Body, before: Sequence[Block]) -> str:
    taken = {block.name for block in before}
    wanted = segment.path or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", body.name).lower()
    if segment.repeats and not segment.path:
        return f"{wanted}.{sum(block.body == body.name for block in before)}"
    name, count = wanted, 2
    while name in taken:
        name, count = f"{wanted}_{count}", count + 1
    return name
