"""Gradient sums beside the data axis': over the stages that hold a tied parameter, and over the tensor axis.

Both run once a step, after the backward passes and before the norm; both are in the elements that this rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import TensorAxis
from .launch import World
from .parameters import Held, TiedParameter


class TiedGradients:
    """Sums the gradients of a tied parameter's copies over the stages that hold one.

    The copies are split alike (same tensor placement, same ZeRO stage and group), so each rank sums with the ranks of
    the other stages at its own data and tensor coordinates. ``stage_ranks``: the pipeline rank of every stage. Every rank
    must build this, in the same order.
    """

    def __init__(self, world: World, tied: Sequence[TiedParameter], stage_ranks: Sequence[int]) -> None:
        self._groups: dict[str, ProcessGroup | None] = {}
        self._untrained = frozenset(
            entry.fqn for entry in tied if any(stage_ranks[stage] == world.pipeline_rank for stage in entry.untrained)
        )
        made: dict[tuple[int, ...], ProcessGroup | None] = {}
        for entry in tied:
            distinct = tuple(sorted({stage_ranks[stage] for stage in entry.stages}))
            if distinct not in made:
                made[distinct] = _group_across(world, distinct) if len(distinct) > 1 else None
            self._groups[entry.fqn] = made[distinct]

    def complete(self, parameters: Sequence[Held]) -> None:
        """Give zeros to the copies of which this rank's stages make no gradient: the other stages wait for what they add."""
        for held in parameters:
            if held.fqn in self._untrained and held.parameter.grad is None:
                held.parameter.grad = torch.zeros_like(held.parameter)

    def sum(self, parameters: Sequence[Held]) -> None:
        """Leave in every copy's gradient the sum over all copies."""
        for fqn, group in self._groups.items():
            copies = [held.gradient for held in parameters if held.fqn == fqn]
            gradients = [gradient for gradient in copies if gradient is not None]
            if not gradients:
                continue
            total = gradients[0]
            for gradient in gradients[1:]:
                total.add_(gradient)
            if group is not None:
                dist.all_reduce(total, group=group)
            for gradient in gradients[1:]:
                gradient.copy_(total)


def _group_across(world: World, pipeline_ranks: tuple[int, ...]) -> ProcessGroup | None:
    """This rank's group over ``pipeline_ranks`` at its own data and tensor coordinates; None where it is in none."""
    own, stride = None, math.prod(world.mesh.shape[(world.mesh.mesh_dim_names or ()).index("pipeline") + 1 :])
    for first in range(world.size):
        if first // stride % world.pipeline:
            continue
        members = [first + rank * stride for rank in pipeline_ranks]
        group = dist.new_group(members)
        if world.rank in members:
            own = group
    return own


def sum_partial_gradients(parameters: Sequence[Held], tensor: TensorAxis) -> None:
    """One all-reduce over the tensor axis of all gradients that are partial sums there, laid end to end."""
    gradients = [held.gradient for held in parameters if held.partial_gradient]
    partial: list[Tensor] = [gradient for gradient in gradients if gradient is not None]
    if tensor.degree == 1 or not partial:
        return
    together = torch.cat([gradient.reshape(-1) for gradient in partial])
    dist.all_reduce(together, group=tensor.group)
    for gradient, summed in zip(partial, together.split([gradient.numel() for gradient in partial]), strict=True):
        gradient.copy_(summed.view_as(gradient))
