"""What a block keeps from forward to backward for one micro-batch, by storage.

Convention: a block counts every storage that its own operations keep, block inputs that carry a gradient included (a
residual stream is kept by the block that normalises it, not by the one that produced it). Parameters and
buffers are state. Inputs without gradient (rotary tables, masks, token ids) are shared by all blocks of a stage: they
are left out here, listed by :func:`shared_bytes`, and counted once a stage by :func:`context_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.costing.local import LocalBody, Step, localise
from planner.ir.costed import Recompute
from planner.ir.graph import ModelGraph
from planner.ir.regions import recompute_region


@dataclass(frozen=True, slots=True)
class KeptStorages:
    """What is kept under one recomputation level: storages by their roots, state left out, and the bytes of tensors that are no
    values."""

    local: LocalBody
    roots: frozenset[str]
    extra_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Of the block's own: what all blocks of a stage share is left out."""
        return self.extra_bytes + sum(map(self.local.storage_bytes, self.roots - _shared(self.local)))


def kept_storages(local: LocalBody, recompute: Recompute = "none") -> KeptStorages:
    """``full`` keeps the inputs alone; ``selective`` drops what only the region keeps, and keeps what the region reads."""
    kept, extra = _kept(local, recompute)
    return KeptStorages(local, frozenset(kept - _state(local)), extra)


def saved_bytes(local: LocalBody, recompute: Recompute = "none") -> int:
    """Bytes kept under a recomputation level."""
    return kept_storages(local, recompute).saved_bytes


def shared_bytes(local: LocalBody) -> dict[str, int]:
    """Inputs without gradient that the block keeps: name -> bytes."""
    kept, _ = _kept(local, "none")
    return {root: local.storage_bytes(root) for root in sorted(kept & _shared(local))}


def context_bytes(graph: ModelGraph, batch: int) -> int:
    """Values of the context that a stage holds for one micro-batch of ``batch`` samples, at most: the distinct storages
    that blocks read, parts of the batch itself left out."""
    local = localise(graph.context, None, batch)
    given = {value.name for value in (*graph.context.inputs, *graph.context.buffers)}
    read = {name for block in graph.blocks for name in block.reads}
    roots = {local.root[name] for name in graph.context.outputs if name in read}
    return sum(local.storage_bytes(root) for root in roots - given)


def kept_roots(local: LocalBody, recompute: Recompute = "none") -> frozenset[str]:
    """Storages that are kept, state left out."""
    return kept_storages(local, recompute).roots


def repeated_steps(local: LocalBody, recompute: Recompute) -> tuple[Step, ...]:
    """The steps that the backward pass runs again."""
    if recompute == "none":
        return ()
    if recompute == "full":
        return local.steps
    region = set(recompute_region(local.body))
    return tuple(
        step for step in local.steps
        if (step.node is not None and step.node.name in region)
        or (step.node is None and step.operands[0] in region and step.outputs[0] in _region_reads(local, region))
    )


def _region_reads(local: LocalBody, region: set[str]) -> set[str]:
    return {
        operand for step in local.steps if step.node is not None and step.node.name in region for operand in
        step.operands
    }


def _kept(local: LocalBody, recompute: Recompute) -> tuple[set[str], int]:
    if recompute == "full":
        return {value.name for value in local.body.inputs}, 0
    region = set(recompute_region(local.body)) if recompute == "selective" else set()
    kept: set[str] = set()
    extra = 0
    inside = {
        output for step in local.steps
        if step.node is not None and step.node.name in region for output in step.outputs
    }
    for step in local.steps:
        if step.node is not None and step.node.name in region:
            kept |= {local.root[operand] for operand in step.operands if operand not in inside}
            continue
        if step.node is None or step.node.name in local.body.asked:
            kept |= set(step.kept)
            extra += step.extra_bytes
    return kept, extra


def _state(local: LocalBody) -> set[str]:
    values = {value.name for value in (*local.body.parameters, *local.body.buffers)}
    return values | {key for key in local.types if " -> " in key and key.split(" -> ")[0] in values}


def _shared(local: LocalBody) -> set[str]:
    return {value.name for value in local.body.inputs if not value.differentiable}
