"""Where gradients come to when some blocks run as one stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.ir.body import Body
    from planner.ir.graph import ModelGraph


@dataclass(frozen=True)
class GradientReach:
    """Of a graph. ``first`` and ``last`` name a stage: its blocks from ``first`` to before ``last``."""

    graph: ModelGraph

    def asked(self, first: int, last: int, *, zeros: bool = False) -> Mapping[int, frozenset[str]]:
        """By block of a stage, the values of its body that a gradient comes back to. One comes with the loss, and (of zeros, if
        need be) to each value that is sent and carries one. ``zeros``: see :meth:`_arriving`."""
        arriving = self._arriving(first, last, zeros=zeros)
        return {index: self._body(index).asked_by(outputs) for index, outputs in arriving.items()}

    @cached_property
    def asked_whole(self) -> Mapping[int, frozenset[str]]:
        """The same of all blocks as one stage, with zeros."""
        return self.asked(0, len(self.graph.blocks), zeros=True)

    def untrained(self, first: int, last: int) -> frozenset[str]:
        """Trained parameters (fqn) that a stage has and makes no gradient of: it reads detached values of them alone."""
        blocks, trained = self.graph.blocks, self.graph.parameter_of
        asked = self.asked(first, last)
        had = {fqn for index in asked for _, fqn in blocks[index].parameters if trained[fqn].trainable}
        return frozenset(had - {
            fqn for index, values in asked.items() for name, fqn in blocks[index].parameters if name in values
        })

    def reached_bodies(self, pipeline: int) -> frozenset[str]:
        """The bodies that have a block of whose outputs one gets a gradient, or a block that is sharded together with one. Of
        several pipeline ranks: wherever the cuts are, for zeros come back to whatever is sent and carries a gradient."""
        return self.reached_alone if pipeline == 1 else frozenset(
            body.name for body in self.graph.bodies if not body.differentiable.isdisjoint(body.outputs)
        )

    @cached_property
    def reached_alone(self) -> frozenset[str]:
        """The same of all blocks as one stage."""
        count = len(self.graph.blocks)
        arriving = self._arriving(0, count, zeros=False)
        return frozenset(
            self.graph.blocks[index].body for unit in self.graph.sharded_together(0, count)
            if any(arriving[other] for other in unit) for index in unit
        )

    def ungathered(self, first: int, last: int) -> frozenset[int]:
        """Blocks of a stage whose parameters torch does not gather for their backward pass under ZeRO 3: they share some, and
        the last of them ends in values that get no gradient, at whose end FSDP2 waits for the backward pass to begin
        (``_fsdp_state.py``, ``_register_pre_backward_hook``)."""
        reached = self._reached(first, last)
        return frozenset(
            index for unit in self.graph.sharded_together(first, last) if not reached[unit[-1]]
            for index in unit if any(reached[other] for other in unit)
        )

    def ungathered_by(self, pipeline: int) -> frozenset[int]:
        """The blocks that no plan of so many pipeline ranks can have under ZeRO 3, wherever its cuts are."""
        return self.ungathered_whole if pipeline == 1 else self.ungathered_somewhere

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
        """By block of a stage, whether a gradient comes to one of its outputs."""
        return {index: bool(outputs) for index, outputs in self._arriving(first, last, zeros=True).items()}

    def _arriving(self, first: int, last: int, *, zeros: bool) -> Mapping[int, frozenset[str]]:
        """By block of a stage, the outputs that a gradient comes to. ``zeros``: also those of which the block that reads them
        makes none, where torch makes zeros of what the first block of a unit reads (``_fsdp_param_group.py``,
        ``RegisterPostBackwardFunction``)."""
        begins = {unit[0] for unit in self.graph.sharded_together(first, last)} if zeros else set[int]()
        wanted = {self.graph.loss, *self.graph.crossing(last)}
        found: dict[int, frozenset[str]] = {}
        for index in range(last - 1, first - 1, -1):
            block, body = self.graph.blocks[index], self._body(index)
            written = zip(block.writes, body.outputs, strict=True)
            found[index] = body.differentiable.intersection(value for name, value in written if name in wanted)
            asked = body.asked_by(found[index])
            read = [(name, value) for name, value in zip(block.reads, body.inputs, strict=True) if value.differentiable]
            led = {name for name, value in read if value.name in asked}
            wanted |= {name for name, _ in read} if led and block.parameters and index in begins else led
        return found

    def _body(self, index: int) -> Body:
        return self.graph.body_of[self.graph.blocks[index].body]
