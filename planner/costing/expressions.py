"""Which values of a body a variable of the emitted function holds, and which are written into the expression that reads them:
the emitted text's own rule (:mod:`planner.ir.inlining`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from planner.costing.local import LocalBody, Step, Wiring
from planner.ir.inlining import PARAMETER, VALUE, draws, expression_size, inlined

Regions = Sequence[Sequence[str]]
"""Names of the nodes that run in a function of their own (recomputed attention), by function."""


@dataclass(frozen=True, eq=False)
class Text:
    """A placed body as its emitted functions compute it, whatever the batch. ``wired``: its steps in that order; ``order``:
    where each of them was given; ``named``: values that a variable holds."""

    wired: Wiring | LocalBody
    order: tuple[int, ...]
    named: frozenset[str]

    @staticmethod
    def of(wired: Wiring | LocalBody, regions: Regions = ()) -> Text:
        """Of steps in any order."""
        named = named_values(wired, regions)
        order = _emitted_order(wired.steps, named)
        return Text(replace(wired, steps=tuple(wired.steps[at] for at in order)), order, named)

    @cached_property
    def parted(self) -> Text:
        """With the regions that selective recomputation repeats in functions of their own; itself where they change nothing but
        where its steps run."""
        regions = self.wired.body.regions
        if named_values(self.wired, regions) == self.named:
            return self
        apart = Text.of(self.wired, regions)
        return replace(apart, order=tuple(self.order[at] for at in apart.order))

    def ordered(self, local: LocalBody) -> LocalBody:
        """The given body for one batch with its steps in the order of the text."""
        return replace(local, steps=tuple(local.steps[at] for at in self.order))


def named_values(local: Wiring | LocalBody, regions: Regions = ()) -> frozenset[str]:
    """Values that live until the function returns (or longer, where autograd keeps them), in whichever order steps run."""
    called, function = _called(local.steps), _functions(local.steps, regions)
    readers: dict[str, list[Step]] = {}
    for step in local.steps:
        for operand in step.operands if called.keys().isdisjoint(step.outputs) else ():
            readers.setdefault(called.get(operand, operand), []).append(step)
    parameters = {value.name for value in (*local.body.parameters, *local.body.buffers)}
    sizes, outputs = dict.fromkeys(parameters, PARAMETER), {called.get(value, value) for value in local.outputs}
    biases = {value.name for value in local.body.parameters if value.type.rank == 1}
    written = set[str]()
    for step in local.steps:
        size = expression_size(sizes.get(called.get(value, value), VALUE) for value in step.operands)
        reads = readers.get(step.outputs[0], ())
        crosses = any(function.get(step.outputs[0]) != function.get(reader.outputs[0]) for reader in reads)
        if outputs.isdisjoint(step.outputs) and not crosses and _inlined(step, reads, size, called, biases):
            written.add(step.outputs[0])
            sizes[step.outputs[0]] = size
    return frozenset(value for step in local.steps for value in step.outputs if called.get(value, value) not in written)


def _functions(steps: Sequence[Step], regions: Regions) -> Mapping[str, int]:
    """By first output of a step, in which region it runs; a conversion for a reader elsewhere is the caller's."""
    region_of = {name: at for at, region in enumerate(regions) for name in region}
    found = {step.outputs[0]: region_of[step.node.name] for step in steps if step.node and step.node.name in region_of}
    for step in steps if found else ():
        if step.node is None and step.operands[0] in found:
            reads = {found.get(reader.outputs[0]) for reader in steps if step.outputs[0] in reader.operands}
            if reads == {found[step.operands[0]]}:
                found[step.outputs[0]] = found[step.operands[0]]
    return found


def in_emitted_order(local: LocalBody, regions: Regions = ()) -> LocalBody:
    """The body with its steps as the emitted text runs them: what is written into an expression runs where that does, operand
    after operand."""
    return replace(local, steps=tuple(local.steps[at] for at in _emitted_order(local.steps, named_values(local, regions))))


def _emitted_order(steps: Sequence[Step], named: Set[str]) -> tuple[int, ...]:
    waiting: dict[str, int] = {}
    order: list[int] = []

    def run(at: int) -> None:
        for operand in steps[at].operands:
            if operand in waiting:
                run(waiting.pop(operand))
        order.append(at)

    for at, step in enumerate(steps):
        if named.isdisjoint(step.outputs):
            waiting |= dict.fromkeys(step.outputs, at)
        else:
            run(at)
    return tuple(order)


def _called(steps: Sequence[Step]) -> Mapping[str, str]:
    """By value that is another one in all but its placement, what the text calls it."""
    called: dict[str, str] = {}
    for step in steps:
        if step.conversion is not None and step.conversion.forward == step.conversion.backward == "identity":
            called[step.outputs[0]] = called.get(step.operands[0], step.operands[0])
    return called


def _inlined(step: Step, readers: Sequence[Step], size: int, called: Mapping[str, str], biases: Set[str]) -> bool:
    node = step.node
    if node is None or node.base == "getitem" or len(step.outputs) != 1 or len(readers) != 1 or _calls_runtime(step):
        return False
    (reader,) = readers
    first, *others = (called.get(value, value) for value in reader.operands)
    leads = first == step.outputs[0]
    adds = reader.node is not None and reader.node.op == "add.Tensor" and dict(reader.node.arguments).get("alpha", 1) == 1
    bias = adds and not biases.isdisjoint(others)
    return inlined(node, reader.node, size, leads=leads, bias=bias)


def _calls_runtime(step: Step) -> bool:
    strategy, node = step.strategy, step.node
    if node is not None and draws(node):
        return True
    return strategy is not None and (bool(strategy.forward) or (strategy.outputs[0].state == "partial" and (
        node is not None and node.base == "embedding"
    )))
