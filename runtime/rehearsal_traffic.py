"""Traffic: every collective and point-to-point call of a step, as the process groups are asked for it.

Calls are seen where they enter torch's dispatcher: ``c10d::*`` (what ``torch.distributed``, FSDP2 and the pipeline
schedules call) and ``_c10d_functional::*`` (the tensor axis). A call within a group of one rank moves nothing and is not
counted. A communication operator that is not in the table is an error, never skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.utils._pytree import tree_leaves

_c10d, _functional = torch.ops.c10d, torch.ops._c10d_functional
INPUTS: Mapping[Any, tuple[str, int]] = {
    _c10d.allreduce_.default: ("all_reduce", 0),
    _c10d._allgather_base_.default: ("all_gather", 1),
    _c10d.allgather_.default: ("all_gather", 1),
    _c10d._reduce_scatter_base_.default: ("reduce_scatter", 1),
    _c10d.reduce_scatter_.default: ("reduce_scatter", 1),
    _c10d.alltoall_base_.default: ("all_to_all", 1),
    _c10d.alltoall_.default: ("all_to_all", 1),
    _c10d.broadcast_.default: ("broadcast", 0),
    _c10d.reduce_.default: ("reduce", 0),
    _c10d.send.default: ("send", 0),
    _c10d.recv_.default: ("recv", 0),
    _functional.all_reduce.default: ("all_reduce", 0),
    _functional.all_reduce_.default: ("all_reduce", 0),
    _functional.all_gather_into_tensor.default: ("all_gather", 0),
    _functional.all_gather_into_tensor_out.default: ("all_gather", 0),
    _functional.reduce_scatter_tensor.default: ("reduce_scatter", 0),
    _functional.all_to_all_single.default: ("all_to_all", 0),
    _functional.broadcast.default: ("broadcast", 0),
}
"""Kind of each operator and the position of the tensor (or tensors) that a rank gives (of a ``recv``: takes)."""
SILENT = frozenset({_functional.wait_tensor.default, _c10d.barrier.default})
NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})


@dataclass(frozen=True, slots=True, order=True)
class Call:
    """``size_bytes``: of one rank's input tensor. ``group``: ranks in the group; ``axis``: the mesh axis that they lie
    along, ``world`` where they differ in several."""

    kind: str
    axis: str
    group: int
    size_bytes: int


class Traffic:
    """Counts calls by kind, axis, group and bytes. ``degrees``: of the mesh axes, slowest to fastest in rank order."""

    def __init__(self, degrees: Mapping[str, int]) -> None:
        self.counted: Counter[Call] = Counter()
        self._degrees = dict(degrees)
        self._groups: dict[str, tuple[str, int]] = {}

    def see(self, operator: Any, arguments: Sequence[Any]) -> None:
        """Count a call of an operator of one of :data:`NAMESPACES`."""
        if operator in SILENT:
            return
        if operator not in INPUTS:
            raise NotImplementedError(f"the rehearsal does not know the communication operator {operator}")
        kind, position = INPUTS[operator]
        axis, group = self._place(CollectiveOp.get_process_group(operator, arguments))
        if group > 1:
            given = [leaf for leaf in tree_leaves(arguments[position]) if isinstance(leaf, Tensor)]
            self.counted[Call(kind, axis, group, sum(tensor.nbytes for tensor in given))] += 1

    def uncounted(self, action: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Do something whose calls are left out."""
        before = self.counted.copy()
        result = action(*arguments, **keywords)
        self.counted = before
        return result

    def _place(self, group: dist.ProcessGroup) -> tuple[str, int]:
        """The axis that a group lies along, and how many ranks it has."""
        name = group.group_name
        if name not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            places = [tuple(self._coordinates(rank)) for rank in ranks]
            varying = [axis for axis, own in zip(self._degrees, zip(*places, strict=True), strict=True) if len(set(own)) > 1]
            self._groups[name] = varying[0] if len(varying) == 1 else "world", len(ranks)
        return self._groups[name]

    def _coordinates(self, rank: int) -> Iterator[int]:
        stride = 1
        for degree in self._degrees.values():
            stride *= degree
        for degree in self._degrees.values():
            stride //= degree
            yield rank // stride % degree
