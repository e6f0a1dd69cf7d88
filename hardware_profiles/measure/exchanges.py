"""The call that times a collective, among the groups of one size that the ranks form: neighbours together."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from .clock import Call
from .settings import Probe

_operators = torch.ops._c10d_functional
"""The operators that emitted programs call."""


def group_of(size: int) -> dist.ProcessGroup:
    """This rank's group of ``size`` neighbours. Collective over all ranks."""
    own, rank = None, dist.get_rank()
    for first in range(0, dist.get_world_size(), size):
        made = dist.new_group(list(range(first, first + size)))
        if first <= rank < first + size:
            own = made
    assert isinstance(own, dist.ProcessGroup)
    return own


def prepare_exchange(probe: Probe, group: dist.ProcessGroup, device: torch.device) -> Call:
    """One call of a collective whose input on one rank has the probe's bytes; ``send``: one message, back and forth in turns,
    counts as one call each way."""
    size, members, name = probe.sizes[0], group.size(), group.group_name
    elements = max(members, size // 4 // members * members)
    x, done = torch.ones(elements, device=device), _operators.wait_tensor
    if probe.subject == "all_reduce":
        return lambda: done(_operators.all_reduce(x, "sum", name))
    if probe.subject == "all_gather":
        return lambda: done(_operators.all_gather_into_tensor(x, members, name))
    if probe.subject == "reduce_scatter":
        return lambda: done(_operators.reduce_scatter_tensor(x, "sum", members, name))
    if probe.subject == "all_to_all":
        parts = [elements // members] * members
        return lambda: done(_operators.all_to_all_single(x, parts, parts, name))
    return _there_and_back(x, group)


def _there_and_back(x: torch.Tensor, group: dist.ProcessGroup) -> Call:
    """As a pipeline sends: a posted operation that is then waited for."""
    rank = dist.get_rank()
    ranks = dist.get_process_group_ranks(group)
    mine = ranks.index(rank)
    peer = ranks[1 - mine]

    def post(operation: Callable[..., dist.Work | None]) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(operation, x, peer)]):
            work.wait()

    def both() -> None:
        post(dist.isend if mine == 0 else dist.irecv)
        post(dist.irecv if mine == 0 else dist.isend)

    return both
