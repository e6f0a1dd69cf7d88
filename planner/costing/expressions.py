"""Which values of a body a variable of the emitted function holds, and which are written into the expression that reads them.

A variable holds its tensor until the function returns; what is written into an expression goes as soon as it is read. The
rule is the emitted text's own (docs/program.md): one reader, on the user's own line, and short enough to be read. Lengths are
estimated from the names, a little too long rather than too short, so that a value in doubt is taken to be held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from planner.costing.local import LocalBody, Step
from planner.ir.graph import Node
from planner.ir.types import Ref
from planner.ops.families import VIEW_FAMILY

WIDEST_LINE, WIDEST_OPERAND = 84, 50
_LEADING = frozenset({"linear", "matmul", "mm", "layer_norm", "rms_norm", "embedding"})
_CHAINED = frozenset({
    "reshape", "view", "transpose", "permute", "unsqueeze", "squeeze", "expand", "flatten", "unflatten", "contiguous", "t",
    "slice", "select", "to", "type_as", "neg", "clone",
})
_PARTED = frozenset({"split", "split_with_sizes", "chunk"})
_OPERATORS = frozenset({"add", "sub", "mul", "div", "matmul", "mm", "neg"})
_BARE = frozenset({"normalized_shape"})
_UNSAID = frozenset({"cudnn_enable", "cudnn_enabled"})
_DEFAULTS = frozenset({
    ("layer_norm", "eps", 1e-5), ("group_norm", "eps", 1e-5), ("embedding", "padding_idx", -1), ("gelu", "approximate", "none"),
    ("leaky_relu", "negative_slope", 0.01), ("elu", "alpha", 1),
    *((conv, name, (value,) * dims) for conv, dims in (("conv1d", 1), ("conv2d", 2))
      for name, value in (("stride", 1), ("padding", 0), ("dilation", 1))),
    ("conv1d", "groups", 1), ("conv2d", "groups", 1),
})


def named_values(local: LocalBody) -> frozenset[str]:
    """Values that live until the function returns (or longer, where autograd keeps them)."""
    readers: dict[str, list[Step]] = {}
    for step in local.steps:
        for operand in step.operands:
            readers.setdefault(operand, []).append(step)
    parameters = {value.name for value in (*local.body.parameters, *local.body.buffers)}
    lengths = {name: len(name) + 5 for name in parameters}
    named = set(local.outputs)
    for step in local.steps:
        for value in step.outputs:
            length = _length(step, lengths)
            if value not in local.outputs and _inlined(step, readers.get(value, ()), length, parameters):
                lengths[value] = length
            else:
                named.add(value)
    return frozenset(named)


def in_emitted_order(local: LocalBody) -> LocalBody:
    """The body with its steps as the emitted text runs them: what is written into an expression runs where that does, operand
    after operand."""
    named = named_values(local)
    waiting: dict[str, Step] = {}
    steps: list[Step] = []

    def run(step: Step) -> None:
        for operand in step.operands:
            if operand in waiting:
                run(waiting.pop(operand))
        steps.append(step)

    for step in local.steps:
        if named.isdisjoint(step.outputs):
            waiting |= dict.fromkeys(step.outputs, step)
        else:
            run(step)
    return replace(local, steps=tuple(steps))


def _length(step: Step, lengths: Mapping[str, int]) -> int:
    """Characters of a step's expression."""
    operands = [lengths.get(value, len(value)) for value in step.operands]
    if step.node is None:
        return sum(operands) + 24
    base = step.node.base
    if base in _OPERATORS:
        return sum(operands) + 3 * (len(operands) - 1) + (0 if len(operands) > 1 else 5)
    literals = [
        (0 if name in _BARE or base in VIEW_FAMILY else len(name) + 1) + len(str(value)) + 2
        for name, value in step.node.arguments
        if not isinstance(value, Ref) and value not in (None, False, ()) and not _refers(value)
        and name not in _UNSAID and (base, name, value) not in _DEFAULTS
    ]
    prefix = 1 if base in VIEW_FAMILY else 2
    return prefix + len(base) + 2 + sum(operands) + 2 * max(len(operands) - 1, 0) + sum(literals)


def _refers(value: object) -> bool:
    return isinstance(value, tuple) and any(isinstance(item, Ref) for item in value)


def _inlined(step: Step, readers: Sequence[Step], length: int, parameters: Set[str]) -> bool:
    node = step.node
    if node is None or node.base == "getitem" or len(step.outputs) != 1 or len(readers) != 1:
        return False
    if length > WIDEST_LINE or _calls_runtime(step):
        return False
    reader = readers[0]
    if reader.node is None:
        return node.base in _LEADING
    if node.base == "linear" and reader.node.base == "add" and set(reader.operands) & parameters:
        return reader.operands[0] == step.outputs[0]
    if reader.node.base in _CHAINED | _PARTED and reader.operands[0] == step.outputs[0]:
        return node.base in _CHAINED or node.base in _LEADING or node.base == "add"
    return _same_line(node, reader.node) and length <= WIDEST_OPERAND


def _calls_runtime(step: Step) -> bool:
    strategy = step.strategy
    return strategy is not None and (bool(strategy.forward) or (strategy.outputs[0].state == "partial" and (
        step.node is not None and step.node.base == "embedding"
    )))


def _same_line(first: Node, second: Node) -> bool:
    mine, its = first.source, second.source
    return mine is not None and its is not None and (mine.file, mine.line) == (its.file, its.line)
