"""Where gradients come to when some blocks run as one stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.ir.graph import ModelGraph


@dataclass(frozen=True)
class GradientReach:
    """Of a graph. ``first`` and ``last`` name a stage: its blocks from ``first`` to before ``last``."""

    graph: ModelGraph

    def asked(self, first: int, last: int) -> Mapping[int, frozenset[str]]:
        """By block of a stage, the values of its body that a gradient comes back to. One comes with the loss, and (of zeros, if
        need be) to each value that is sent and carries one."""
        wanted = {self.graph.loss, *self.graph.crossing(last)}
        asked: dict[int, frozenset[str]] = {}
        for index in range(last - 1, first - 1, -1):
            block = self.graph.blocks[index]
            body = self.graph.body_of[block.body]
            written = zip(block.writes, body.outputs, strict=True)
            asked[index] = body.asked_by(value for name, value in written if name in wanted)
            read = zip(block.reads, body.inputs, strict=True)
            wanted |= {name for name, value in read if value.name in asked[index]}
        return asked

    def untrained(self, first: int, last: int) -> frozenset[str]:
        """Trained parameters (fqn) that a stage has and makes no gradient of: it reads detached values of them alone."""
        blocks, trained = self.graph.blocks, self.graph.parameter_of
        asked = self.asked(first, last)
        had = {fqn for index in asked for _, fqn in blocks[index].parameters if trained[fqn].trainable}
        return frozenset(had - {
            fqn for index, values in asked.items() for name, fqn in blocks[index].parameters if name in values
        })

    def ungathered(self, first: int, last: int) -> frozenset[int]:
        """Blocks of a stage whose parameters torch does not gather for their backward pass under ZeRO 3: they share some, and
        the last of them ends in values that get no gradient, at whose end FSDP2 waits for the backward pass to begin
        (``_fsdp_state.py``, ``_register_pre_backward_hook``)."""
        reached = self._reached(first, last)
        return frozenset(
            index for unit in self.graph.sharded_together(first, last) if not reached[unit[-1]]
            for index in unit if any(reached[other] for other in unit)
        )

    @cached_property
    def ungathered_whole(self) -> frozenset[int]:
        """The same of all blocks as one stage."""
        return self.ungathered(0, len(self.graph.blocks))

    @cached_property
    def ungathered_somewhere(self) -> frozenset[int]:
        """The blocks that may be so in some stage, wherever the cuts are."""
        count = len(self.graph.blocks)
        reached, found = self._reached(0, count), set[int]()
        for unit in self.graph.sharded_together(0, count):
            late = [index for index in unit if not reached[index]]
            if late and any(reached[index] for index in unit if index < late[-1]):
                found.update(unit)
        return frozenset(found)

    def _reached(self, first: int, last: int) -> Mapping[int, bool]:
        """By block of a stage, whether a gradient comes to one of its outputs. One of zeros comes from a block with parameters
        that makes none for what it reads (``_fsdp_param_group.py``, ``RegisterPostBackwardFunction``)."""
        asked = self.asked(first, last)
        blocks = {index: self.graph.blocks[index] for index in asked}
        fed = {name for block in blocks.values() if block.parameters for name in block.reads}
        return {index: self._ends_reached(index, asked[index], fed) for index in blocks}

    def _ends_reached(self, index: int, asked: frozenset[str], fed: set[str]) -> bool:
        block = self.graph.blocks[index]
        body = self.graph.body_of[block.body]
        return any(
            value in asked or (name in fed and value in body.differentiable)
            for name, value in zip(block.writes, body.outputs, strict=True)
        )
