"""What every lowered program satisfies; whatever breaks it is a defect of the lowering or of the plan's placements."""

from __future__ import annotations

from itertools import pairwise

from codegen.program import BlockClass, Compute, Convert, Function, LocalArgument, Program, Repeat
from planner.ir.errors import InternalError
from planner.ir.placement import Placement, conversion, local_type
from planner.ir.types import Ref


def verify(program: Program) -> Program:
    """Return the program if it is well formed; raise InternalError, naming the place, if not."""
    for function in program.context:
        _verify_function(function, ())
    for cls in program.classes:
        _verify_class(cls)
    _verify_chain(program)
    _verify_schedule(program)
    return program


def _verify_schedule(program: Program) -> None:
    """Zero-bubble schedules lose ZeRO 3's gradients, and recompute for every part of the backward pass."""
    name = program.plan.schedule.name
    decisions = [decision for stage in program.plan.stages for decision in stage.decisions]
    split = name in ("interleaved-zero-bubble", "zbv")
    _require(not (split and any(d.zero == 3 for d in decisions)), "schedule", f"{name} parts the backward pass: no ZeRO 3")
    _require(
        not (split and any(d.recompute != "none" for d in decisions)), "schedule",
        f"{name} parts the backward pass: no recomputation",
    )


def _require(holds: bool, where: str, wrong: str) -> None:
    if not holds:
        raise InternalError(where, wrong)


def _verify_class(cls: BlockClass) -> None:
    methods = tuple(region.name for region in cls.regions)
    for region in cls.regions:
        _verify_function(region, ())
    _verify_function(cls.forward, methods)
    for item in cls.parameters:
        try:
            local_type(item.type, item.placement, cls.forward.degree)
        except ValueError as error:
            raise InternalError(f"{cls.name}.{item.path}", str(error)) from error


def _verify_function(function: Function, methods: tuple[str, ...]) -> None:
    """Names are defined before use and once; operands lie as their operation wants; conversions exist."""
    known = {*function.inputs, *function.attributes}
    for statement in function.statements:
        where = f"{function.name}: {statement}"[:200]
        reads: tuple[str, ...]
        writes: tuple[str, ...]
        match statement:
            case Convert():
                reads, writes = (statement.source,), (statement.target,)
                _verify_conversion(function, statement)
            case Repeat():
                reads, writes = statement.arguments, statement.targets
                _require(statement.method in methods, where, "calls an unknown method")
            case Compute():
                reads = tuple(name for _, argument in statement.arguments for name in _names(argument))
                writes = tuple(target for target in statement.targets if target)
                _verify_compute(function, statement, reads)
        for name in reads:
            _require(name in known, where, f"reads {name!r} before it is defined")
        for name in writes:
            _require(name not in known, where, f"defines {name!r} a second time")
        known |= set(writes)
    for name in function.outputs:
        _require(name in known, function.name, f"returns {name!r}, which is not defined")


def _names(argument: LocalArgument) -> tuple[str, ...]:
    if isinstance(argument, Ref):
        return (argument.name,)
    if isinstance(argument, tuple):
        return tuple(name for item in argument for name in _names(item))
    return ()


def _verify_conversion(function: Function, statement: Convert) -> None:
    source, target = function.variables[statement.source], function.variables[statement.target]
    step = conversion(
        source.placement, target.placement, source.type, function.degree, differentiable=source.differentiable
    )
    _require(step is not None, statement.target, f"cannot convert {source.placement} to {target.placement}")


def _verify_compute(function: Function, statement: Compute, reads: tuple[str, ...]) -> None:
    if statement.strategy is None or function.degree == 1:
        return
    for name, wanted in zip(reads, statement.strategy.operands, strict=True):
        variable = function.variables[name]
        lies = variable.placement
        whole = {"replicate", "shared"}
        alike = lies.state in whole and wanted.state in whole and (
            not variable.differentiable or name in function.attributes
        )
        equal = lies == wanted or alike or (lies.state == wanted.state == "shard" and lies.dim == wanted.dim)
        _require(equal, f"{function.name}: {statement.node.name}", f"reads {name!r} as {lies}, wants {wanted}")


def _verify_chain(program: Program) -> None:
    """Runs cover the chain in order, stages too, and what is sent is what is received."""
    ends = [(run.first, run.last) for run in program.runs]
    _require([a for a, _ in ends] == [0, *(b for _, b in ends[:-1])], "runs", "do not follow one another")
    _require(bool(ends) and ends[-1][1] == len(program.chain), "runs", "do not cover the chain")
    cuts = program.cuts
    _require([c.first for c in cuts] == [0, *(c.last for c in cuts[:-1])], "stages", "do not follow one another")
    _require(bool(cuts) and cuts[-1].last == len(program.chain), "stages", "do not cover the chain")
    for left, right in pairwise(cuts):
        _require(left.sends == right.receives, f"cut before block {right.first}", "is sent other values than received")
    _verify_sent(program)


def _verify_sent(program: Program) -> None:
    """A variable lies at every cut as it is said to: its sizes are told once, whichever stages send it."""
    forwards = {cls.name: cls.forward for cls in program.classes}
    sends = {cut.last: cut.sends for cut in program.cuts[:-1]}
    lies: dict[str, Placement] = {}
    for run in program.runs:
        for at in range(run.first, run.last):
            forward = forwards[program.chain[at].cls]
            lies |= {name: forward.variables[out].placement for name, out in zip(run.writes, forward.outputs, strict=True)}
            for name in sends.get(at + 1, ()):
                said = program.sent[name].placement
                _require(lies[name] == said, f"cut before block {at + 1}", f"sends {name!r} as {lies[name]}, said to be {said}")
