"""From the chain of blocks to the stage: runs of blocks, the variables between them, and what the context gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from codegen.bodies import lower_body, random_sites
from codegen.members import OF_UNITS
from codegen.naming import unique
from codegen.program import ContextCall, Cut, Function, Run
from planner.ir.body import Body, BodyValue
from planner.ir.graph import ModelGraph
from planner.ir.placement import REPLICATE, BodyPlacement, NodePlacement, OpStrategy, Placement
from planner.ir.plan import Plan
from planner.ir.types import Argument, BatchMultiple

_ATTRIBUTES = OF_UNITS | {"first", "last", "receives", "sends", "units"}


@dataclass(frozen=True)
class Chain:
    """The chain as a stage runs it. ``variable``: the stage's variable of each batch input and of each value that a block reads
    or writes."""

    runs: tuple[Run, ...]
    cuts: tuple[Cut, ...]
    variable: Mapping[str, str]


def lower_chain(plan: Plan, graph: ModelGraph, random: Mapping[str, bool], used: set[str]) -> Chain:
    """Group consecutive blocks that one loop can run, and name what passes between them. ``random``: bodies by name
    that draw random masks; ``used``: names that are taken."""
    taken = set(used)
    variable = {name: unique(name, taken) for name in _given(graph)}
    last_reader = {name: at for at, block in enumerate(graph.blocks) for name in block.reads}
    for at in range(len(graph.blocks)):
        _name_writes(plan, graph, at, variable, last_reader, taken)
    decisions = {s.first + at: d for s in plan.stages for at, d in enumerate(s.decisions)}
    runs: list[Run] = []
    attributes = set(_ATTRIBUTES)
    for at, block in enumerate(graph.blocks):
        reads, writes = (tuple(variable[name] for name in names) for names in (block.reads, block.writes))
        full = decisions[at].recompute == "full"
        if runs and graph.blocks[at - 1].body == block.body and (runs[-1].reads, runs[-1].writes) == (reads, writes):
            runs[-1] = replace(runs[-1], last=at + 1, recomputed=(*runs[-1].recomputed, full))
        else:
            attribute = unique(re.sub(r"\.\d+$", "", block.name).split(".")[-1], attributes)
            runs.append(Run(attribute, at, at + 1, reads, writes, random[block.body], (full,)))
    cuts = tuple(
        Cut(s.first, s.last, _crossing(graph, s.first, variable), _crossing(graph, s.last, variable)) for s in plan.stages
    )
    return Chain(tuple(runs), cuts, variable)


def _given(graph: ModelGraph) -> tuple[str, ...]:
    """Values that no block writes: batch inputs and context outputs."""
    inputs = [item.name for item in graph.batch_inputs]
    return tuple(dict.fromkeys([*inputs, *(n for b in graph.blocks for n in b.reads if n not in graph.producer_of)]))


def _crossing(graph: ModelGraph, index: int, variable: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(variable[name] for name in graph.crossing(index)) if 0 < index < len(graph.blocks) else ()


def _name_writes(
    plan: Plan, graph: ModelGraph, at: int, variable: dict[str, str], last_reader: Mapping[str, int], taken: set[str]
) -> None:
    """A written value takes over the variable of one that the block is the last to read and that has its type and placement,
    and a gradient where it has one: what is sent at a cut is told by its variable."""
    block = graph.blocks[at]
    kinds = {
        name: (type_, written(plan, graph, name), _has_gradient(graph, name)) for name, type_ in graph.activation_types.items()
    }
    free = [name for name in block.reads if name in kinds and last_reader[name] == at]
    for name, value in zip(block.writes, graph.body_of[block.body].outputs, strict=True):
        heir = next((old for old in free if kinds[old] == kinds[name]), None)
        if heir is not None:
            free.remove(heir)
            variable[name] = variable[heir]
        else:
            variable[name] = unique(_reader_name(graph, at, name) or re.sub(r"_\d+$", "", value), taken)


def written(plan: Plan, graph: ModelGraph, name: str) -> Placement:
    """How a value lies that a block writes."""
    block = graph.blocks[graph.producer_of[name]]
    return plan.placements[block.body].outputs[block.writes.index(name)]


def _has_gradient(graph: ModelGraph, name: str) -> bool:
    """Whether a gradient comes back to a value that a block writes."""
    block = graph.blocks[graph.producer_of[name]]
    body = graph.body_of[block.body]
    return body.outputs[block.writes.index(name)] in body.differentiable


def _reader_name(graph: ModelGraph, at: int, name: str) -> str:
    """What the next block that reads a value calls it."""
    for block in graph.blocks[at + 1 :]:
        if name in block.reads:
            return graph.body_of[block.body].inputs[block.reads.index(name)].name
    return ""


def lower_context(
    graph: ModelGraph, chain: Chain, batch: int, used: set[str]
) -> tuple[tuple[Function, ...], tuple[ContextCall, ...], ContextCall]:
    """The context as one function per connected group of the values that blocks read, and one of the weights."""
    functions: list[Function] = []
    calls: list[ContextCall] = []
    wanted = [name for name in graph.context.outputs if name in chain.variable]
    for group in graph.context.together(wanted):
        function, call = _slice(graph, group, batch, chain.variable, used)
        readers = tuple(run.attribute for run in chain.runs if set(run.reads) & set(group))
        functions.append(function)
        calls.append(replace(call, writes=tuple(chain.variable[name] for name in group), readers=readers))
    function, weight = _slice(graph, graph.weights, batch, chain.variable, used)
    return (*functions, function), tuple(calls), weight


def _slice(
    graph: ModelGraph, outputs: Sequence[str], batch: int, variable: Mapping[str, str], used: set[str]
) -> tuple[Function, ContextCall]:
    """The part of the context that some outputs need, as a function of batch inputs and constants. What two parts draw is the
    same, for it has one site."""
    body = graph.context.part(outputs)
    nodes, inputs, buffers = body.nodes, body.inputs, body.buffers
    if not inputs and (not buffers or any(_counts_batch(argument) for node in nodes for _, argument in node.arguments)):
        # The batch size, and the device where nothing else tells it, come from some input; the weights are not given shares.
        shares = {name for name, _ in graph.shares}
        own = (*graph.context.inputs, *(BodyValue(given.name, given.type) for given in graph.batch_inputs))
        inputs = (next(value for value in own if value.name not in shares),)
    renames = {v.name: unique(v.name.split(".")[-1], set(used)) for v in buffers}
    whole = Body("context", (*inputs, *buffers), (), (), nodes, tuple(outputs))
    placement = BodyPlacement(
        "context", 1, (REPLICATE,) * len(whole.inputs), (), tuple(_replicated(node) for node in nodes),
        (REPLICATE,) * len(outputs),
    )
    name = unique(f"make_{'_and_'.join(outputs)}" if len(outputs) < 4 else f"make_{outputs[0]}_and_more", used)
    function = replace(lower_body(whole, placement, batch, frozenset(), (), random_sites(graph.context))[0], name=name)
    arguments = tuple(variable[value.name] for value in inputs)
    constants = tuple((renames[value.name], value.name) for value in buffers)
    return function, ContextCall(name, arguments, constants, (), (), function.random)


def _counts_batch(argument: Argument) -> bool:
    if isinstance(argument, tuple):
        return any(map(_counts_batch, argument))
    return isinstance(argument, BatchMultiple)


def _replicated(node: object) -> NodePlacement:
    operands, types, name = node.operands, node.types, node.name  # type: ignore[attr-defined]
    return NodePlacement(name, OpStrategy("replicate", (REPLICATE,) * len(operands), (REPLICATE,) * len(types)))
