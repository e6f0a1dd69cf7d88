"""Lowering: from a plan and its graph to the program that will be written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from codegen.bodies import attributes_of, lower_body, random_sites
from codegen.naming import unique
from codegen.program import Argument, BlockClass, Declaration, Function, Link, Program, Variable
from codegen.stages import Chain, lower_chain, lower_context, written
from planner.ir.body import Body
from planner.ir.costed import Recompute
from planner.ir.errors import InternalError
from planner.ir.graph import Block, InitStep, ModelGraph, Parameter
from planner.ir.placement import REPLICATE
from planner.ir.plan import Plan

_MODULE_NAMES = frozenset({
    "Stage", "ParallelBlock", "CHAIN", "CROSSING", "SHARED", "ALIASES", "INITIAL", "RECIPES", "DECAYS", "CONSTANTS", "HERE",
    "BUFFERS", "IDLE", "INPUTS", "MADE_FOR", "MadeFor", "STORED", "BatchInput", "StateBuffer",
    "Path", "constant", "weigh", "read_table", "cache", "decode_constant",
})


def lower(plan: Plan, graph: ModelGraph) -> Program:
    """Every class, function and table of the program."""
    used = set(_MODULE_NAMES)
    random = {body.name: bool(random_sites(body)) for body in graph.bodies}
    chain = lower_chain(plan, graph, random, used)
    kinds = _kinds(plan, graph)
    classes = _classes(plan, graph, kinds)
    names = {(cls.body, kind): cls.name for (_, kind), cls in classes.items()}
    used |= {cls.name for cls in classes.values()} | set(chain.variable.values())
    functions, calls, weight = lower_context(graph, chain, plan.batch.micro, used)
    links = tuple(
        _link(block, names[block.body, kind], attributes_of(graph.body_of[block.body]))
        for block, kind in zip(graph.blocks, kinds, strict=True)
    )
    return Program(
        plan=plan, model=graph.name, classes=tuple(classes.values()), context=functions, calls=calls, weight=weight,
        chain=links, runs=chain.runs, cuts=chain.cuts,
        batch=tuple(Argument(given, chain.variable[given.name]) for given in graph.batch_inputs),
        loss=chain.variable[graph.loss],
        initialization={parameter.fqn: _typed(parameter) for parameter in graph.parameters},
        constants=graph.buffers, idle=_idle(graph),
        undecayed=tuple(parameter.fqn for parameter in graph.parameters if not parameter.decay),
        tied={p.fqn: graph.tied_blocks(p.fqn) for p in graph.parameters if len(graph.tied_blocks(p.fqn)) > 1},
        aliases={alias: p.fqn for p in graph.parameters for alias in p.aliases},
        untrained=_untrained(plan, graph), ungathered=_ungathered(plan, graph), sent=_sent(plan, graph, chain),
    )


def _idle(graph: ModelGraph) -> Mapping[str, tuple[int, ...]]:
    bound = {fqn for block in graph.blocks for _, fqn in block.parameters}
    return {p.fqn: p.type.sizes(1) for p in graph.parameters if p.fqn not in bound}


def _typed(parameter: Parameter) -> tuple[InitStep, ...]:
    """The parameter's recipe; bytes say what they are: the program keeps half precisions' parameters in float32."""
    return tuple(
        replace(step, arguments=(*step.arguments, parameter.type.dtype)[:2]) if step.op == "value" else step
        for step in parameter.init
    )


def _kinds(plan: Plan, graph: ModelGraph) -> tuple[Recompute, ...]:
    """What every block recomputes; ``selective`` without a region is ``none``."""
    kinds: list[Recompute] = []
    for stage in plan.stages:
        for block, decision in zip(graph.blocks[stage.first : stage.last], stage.decisions, strict=True):
            empty = decision.recompute == "selective" and not graph.body_of[block.body].regions
            kinds.append("none" if empty else decision.recompute)
    return tuple(kinds)


def _classes(
    plan: Plan, graph: ModelGraph, kinds: tuple[Recompute, ...]
) -> Mapping[tuple[str, Recompute], BlockClass]:
    """One class per body and recompute kind, in the order of the chain."""
    used: set[str] = set(_MODULE_NAMES)
    classes: dict[tuple[str, Recompute], BlockClass] = {}
    for block, kind in zip(graph.blocks, kinds, strict=True):
        key = block.body, kind
        if key in classes:
            continue
        name = unique(block.body, used)
        if any(body == block.body for body, _ in classes):
            used.discard(name)
            name = unique(f"{block.body}{ {'none': 'Stored', 'selective': 'Selective', 'full': 'Recomputed'}[kind] }", used)
        classes[key] = _class(plan, graph, graph.body_of[block.body], kind, kinds, name)
    return classes


def _class(
    plan: Plan, graph: ModelGraph, body: Body, kind: Recompute, kinds: tuple[Recompute, ...], name: str
) -> BlockClass:
    blocks = [block for block in graph.blocks if block.body == body.name]
    outside = _outside(graph, body, blocks)
    regions = body.regions if kind == "selective" else ()
    placement = plan.placements[body.name]
    short = _relative(body, blocks[0].name)
    forward, methods = lower_body(short, placement, plan.batch.micro, outside, regions)
    trainable = {path: graph.parameter_of[fqn].trainable for path, fqn in blocks[0].parameters}
    paths = attributes_of(body)
    parameters = tuple(
        Declaration(paths[value.name], value.type, lies, trainable[value.name])
        for value, lies in zip(body.parameters, placement.parameters, strict=True)
    )
    constants = tuple(Declaration(paths[value.name], value.type, REPLICATE) for value in body.buffers)
    users = [b.name for b, k in zip(graph.blocks, kinds, strict=True) if b.body == body.name and k == kind]
    doc = _doc(plan, graph, forward, users, kind)
    return BlockClass(name, body.name, doc, parameters, constants, forward, methods, kind == "full")


def _outside(graph: ModelGraph, body: Body, blocks: list[Block]) -> frozenset[str]:
    """Inputs of a body that come from the context or the batch."""
    names = [{v.name for v, g in zip(body.inputs, b.reads, strict=True) if g not in graph.producer_of} for b in blocks]
    if any(other != names[0] for other in names):
        raise InternalError(body.name, "reads a context value in one block and an activation in another", "two bodies")
    return frozenset(names[0])


def _relative(body: Body, block: str) -> Body:
    """The body with its nodes' module paths relative to the block."""
    def short(module: str) -> str:
        return "" if module == block else module.removeprefix(f"{block}.")

    return replace(body, nodes=tuple(replace(node, module=short(node.module)) for node in body.nodes))


def _doc(plan: Plan, graph: ModelGraph, forward: Function, users: list[str], kind: Recompute) -> tuple[str, ...]:
    whole = _ranges(users, [block.name for block in graph.blocks])
    activations = [forward.variables[name].placement for name in forward.inputs]
    sequence = any(p.state == "shard" for p in activations)
    zeros = {d.zero for s in plan.stages for b, d in zip(graph.blocks[s.first : s.last], s.decisions, strict=True)
             if b.name in users}
    parts = [whole]
    if plan.mesh.tensor > 1:
        parts.append(f"tensor {plan.mesh.tensor}" + (", sequence-parallel" if sequence else ""))
    parts.append(f"ZeRO {', '.join(map(str, sorted(zeros)))}")
    parts.extend({"none": [], "selective": ["recomputes attention"], "full": ["recomputed whole"]}[kind])
    return (" · ".join(parts),)


def _ranges(users: list[str], every: list[str]) -> str:
    """The blocks of a class, neighbours in the chain as a range: ``blocks.0 to blocks.3, blocks.5``."""
    runs: list[list[str]] = []
    for name, before in zip(every, [None, *every], strict=False):
        if name in users and before in users:
            runs[-1].append(name)
        elif name in users:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _link(block: Block, cls: str, paths: Mapping[str, str]) -> Link:
    """A block's bindings: the prefix that tells the most of them, and the others. ``paths``: where the block has each of the
    body's names."""
    pairs = tuple((paths[name], fqn) for name, fqn in (*block.parameters, *block.buffers))
    own = ("", f"{block.name}.")
    prefixes = dict.fromkeys((*own, *(fqn.removesuffix(path) for path, fqn in pairs if fqn.endswith(path))))
    others = [(prefix, tuple(pair for pair in pairs if pair[1] != prefix + pair[0])) for prefix in prefixes]
    return Link(block.name, cls, *min(others, key=lambda found: len(found[1])))


def _untrained(plan: Plan, graph: ModelGraph) -> Mapping[str, tuple[int, ...]]:
    stages: dict[str, list[int]] = {}
    for stage in plan.stages:
        for fqn in sorted(graph.gradients.untrained(stage.first, stage.last)):
            stages.setdefault(fqn, []).append(stage.index)
    return {fqn: tuple(indices) for fqn, indices in stages.items()}


def _ungathered(plan: Plan, graph: ModelGraph) -> tuple[int, ...]:
    return tuple(index for stage in plan.stages for index in sorted(graph.gradients.ungathered(stage.first, stage.last)))


def _sent(plan: Plan, graph: ModelGraph, chain: Chain) -> Mapping[str, Variable]:
    """What lies how at the cuts, by the stage's variable."""
    found: dict[str, Variable] = {}
    for stage in plan.stages[1:]:
        for name in graph.crossing(stage.first):
            block = graph.blocks[graph.producer_of[name]]
            body = graph.body_of[block.body]
            value = body.outputs[block.writes.index(name)]
            found[chain.variable[name]] = Variable(
                chain.variable[name], body.types[value], written(plan, graph, name), value in body.differentiable
            )
    return found
