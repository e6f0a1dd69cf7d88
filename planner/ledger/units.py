"""Units: what ZeRO gathers and reduces at once in one stage, and how many elements of each parameter one rank gives.

FSDP2 splits every parameter of a unit on its first dim into ``ceil(rows / ranks)`` rows each, the last ones padded, and lays
them end to end (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``_init_sharded_param``; ``_get_dim0_padded_size``).
Blocks of a stage that share a parameter are one unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from planner.ir.graph import ModelGraph
from planner.ir.placement import local_type
from planner.ir.plan import Plan, StagePlan


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter as one tensor rank holds it, before ZeRO; one without dims as one element.

    ``trained``: the stage's backward passes make a gradient of it, which ZeRO reduces. ``partial``: its gradient is to be
    summed over the tensor axis.
    """

    fqn: str
    shape: tuple[int, ...]
    trainable: bool
    trained: bool
    partial: bool

    def padded(self, ranks: int) -> int:
        """Elements of all ranks' shards, padding included."""
        return -(-self.shape[0] // ranks) * ranks * math.prod(self.shape[1:])

    def held(self, ranks: int, rank: int) -> int:
        """Elements that are on one rank of the shard group, without padding."""
        each = -(-self.shape[0] // ranks)
        rows = max(0, min(each, self.shape[0] - rank * each))
        return rows * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Unit:
    """Blocks (indices in the chain) that are gathered and reduced together, under one ZeRO stage. ``reached``: gradients arrive
    at one of them, which gathers it for the backward pass; ``fetched``: they arrive at the next unit of the stage, which begins
    to gather this one too."""

    blocks: tuple[int, ...]
    zero: int
    parameters: tuple[LocalParameter, ...]
    reached: bool = True
    fetched: bool = True

    def padded(self, ranks: int, *, trained: bool = False) -> int:
        """Elements of all ranks' shards; ``trained``: of the parameters that get a gradient."""
        return sum(p.padded(ranks) for p in self.parameters if p.trained or not trained)


def units_of(plan: Plan, graph: ModelGraph, stage: StagePlan, tensor_rank: int) -> tuple[Unit, ...]:
    """The units of a virtual stage, in the order in which their forward passes end. Units without parameters do nothing."""
    groups = sorted(graph.sharded_together(stage.first, stage.last), key=lambda group: group[-1])
    asked = graph.gradients.asked(stage.first, stage.last)
    reached = [any(_has_gradient(graph, index, asked[index]) for index in group) for group in groups]
    untrained = graph.gradients.untrained(stage.first, stage.last)
    units = [
        Unit(
            group, stage.decisions[group[0] - stage.first].zero,
            tuple({p.fqn: p for index in reversed(group) for p in _local(plan, graph, index, tensor_rank, untrained)}.values()),
            *arrives,
        )
        for group, arrives in zip(groups, zip(reached, [*reached[1:], False], strict=True), strict=True)
    ]
    return tuple(unit for unit in units if unit.parameters)


def _has_gradient(graph: ModelGraph, index: int, asked: frozenset[str]) -> bool:
    """Whether one of a block's outputs gets a gradient."""
    return not asked.isdisjoint(graph.body_of[graph.blocks[index].body].outputs)


def _local(
    plan: Plan, graph: ModelGraph, index: int, tensor_rank: int, untrained: frozenset[str]
) -> Iterator[LocalParameter]:
    """The parameters of one block. ``untrained``: those that the stage makes no gradient of."""
    block, degree = graph.blocks[index], plan.mesh.tensor
    body, fqns = graph.body_of[block.body], dict(block.parameters)
    for value, placed in zip(body.parameters, plan.placements[body.name].parameters, strict=True):
        fqn = fqns[value.name]
        trainable = graph.parameter_of[fqn].trainable
        local = local_type(value.type, placed, degree, tensor_rank)
        partial = trainable and degree > 1 and placed.state == "shared"
        yield LocalParameter(fqn, local.sizes(1) or (1,), trainable, trainable and fqn not in untrained, partial)
