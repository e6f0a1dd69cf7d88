"""repeat_blocks: the graph of a deep model from that of a shallow one.

A model whose layers are alike exports in time that grows with its depth, and every layer becomes the same body. So a
shallow copy is traced and its run of equal blocks is drawn out. The result is the graph that the deep model traces to,
but for what a model makes of its own depth: here the initialisation of weights that write to the residual stream.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from planner.ir.errors import ModelError
from planner.ir.graph import Block, Buffer, ModelGraph, Parameter


def repeat_blocks(graph: ModelGraph, count: int) -> ModelGraph:
    """``graph`` with its longest run of equal blocks, two of them at least, drawn out or cut to ``count``.

    Blocks of the run differ in one number of their names, of their tensors' names and of the values they write. Raises
    ModelError where there is no such run.
    """
    first, length = _longest_run(graph)
    if length < 2 or count < 1:
        raise ModelError(graph.name, "has no two equal blocks in a row" if length < 2 else f"repeated {count} times", "")
    run = graph.blocks[first : first + length]
    start = _number(run[0].name, run[1].name)
    values, blocks = _Values(graph), list(graph.blocks[:first])
    for step in range(count):
        blocks.append(_renamed(run[0], start, start + step, values.shifted(run[0], step)))
    for block in graph.blocks[first + length :]:
        shift = count - length
        blocks.append(replace(block, reads=values.moved(block.reads, shift), writes=values.moved(block.writes, shift)))
    return replace(
        graph, blocks=tuple(blocks),
        parameters=tuple(_drawn_parameters(graph.parameters, run, start, count)),
        buffers=tuple(_drawn_buffers(graph.buffers, run, start, count)),
    )


def _longest_run(graph: ModelGraph) -> tuple[int, int]:
    at, best = 0, (0, 0)
    for _, group in groupby(graph.blocks, key=lambda block: block.body):
        length = len(list(group))
        best = max(best, (at, length), key=lambda found: found[1])
        at += length
    return best


def _number(first: str, second: str) -> int:
    """The number in ``first`` that is one more in ``second``."""
    for match in re.finditer(r"(?<=\.)\d+", first):
        if f"{first[: match.start()]}{int(match[0]) + 1}{first[match.end() :]}" == second:
            return int(match[0])
    raise ModelError(first, f"does not number its repetition {second}", "a list of equal modules does")


def _relabel(name: str, old: int, new: int) -> str:
    """The first component that is the block's number, replaced."""
    return re.sub(rf"(^|\.){old}(?=\.|$)", rf"\g<1>{new}", name, count=1)


class _Values:
    """Names of the values that cross from block to block: ``x_3`` is the third that its stem has."""

    def __init__(self, graph: ModelGraph) -> None:
        self.written = {name for block in graph.blocks for name in block.writes}
        self.loss = graph.loss

    def shifted(self, block: Block, step: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.moved(block.reads, step), self.moved(block.writes, step)

    def moved(self, names: Sequence[str], step: int) -> tuple[str, ...]:
        return tuple(self._moved(name, step) for name in names)

    def _moved(self, name: str, step: int) -> str:
        match = re.fullmatch(r"(.*_)(\d+)", name)
        if name not in self.written or name == self.loss or match is None:
            return name
        return f"{match[1]}{int(match[2]) + step}"


def _renamed(block: Block, old: int, new: int, values: tuple[tuple[str, ...], tuple[str, ...]]) -> Block:
    return Block(
        _relabel(block.name, old, new), block.body, *values,
        tuple((name, _relabel(fqn, old, new)) for name, fqn in block.parameters),
        tuple((name, _relabel(fqn, old, new)) for name, fqn in block.buffers),
    )


def _members(run: Sequence[Block], kind: str) -> tuple[set[str], set[str]]:
    """Names of the run's own tensors: those of its first block, and those of all."""
    bound = [{fqn for _, fqn in getattr(block, kind)} for block in run]
    shared = set.intersection(*bound)
    return bound[0] - shared, set.union(*bound) - shared


def _drawn_parameters(
    parameters: Sequence[Parameter], run: Sequence[Block], start: int, count: int
) -> list[Parameter]:
    pattern, own = _members(run, "parameters")
    drawn: list[Parameter] = []
    for parameter in parameters:
        if parameter.fqn not in own:
            drawn.append(parameter)
    table: Mapping[str, Parameter] = {parameter.fqn: parameter for parameter in parameters if parameter.fqn in pattern}
    position = next((at for at, parameter in enumerate(parameters) if parameter.fqn in own), 0)
    copies = [
        replace(parameter, fqn=_relabel(fqn, start, start + step)) for step in range(count) for fqn, parameter in table.items()
    ]
    return [*drawn[:position], *copies, *drawn[position:]]


def _drawn_buffers(buffers: Sequence[Buffer], run: Sequence[Block], start: int, count: int) -> list[Buffer]:
    pattern, own = _members(run, "buffers")
    drawn = [buffer for buffer in buffers if buffer.fqn not in own]
    position = next((at for at, buffer in enumerate(buffers) if buffer.fqn in own), 0)
    copies = [
        replace(
            buffer, fqn=_relabel(buffer.fqn, start, start + step),
            names=tuple(_relabel(name, start, start + step) for name in buffer.names),
        )
        for step in range(count) for buffer in buffers if buffer.fqn in pattern
    ]
    return [*drawn[:position], *copies, *drawn[position:]]
