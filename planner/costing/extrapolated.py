"""What a prediction takes from beyond what rates were fitted to or measured on; a plan says it aloud."""

from __future__ import annotations

from collections.abc import Iterator

from hardware_profiles import Chip, Cluster
from planner.costing.graphs import GraphWork
from planner.costing.operations import Operation
from planner.ir.graph import ModelGraph
from planner.rules import has_rule

FITTED_DIMENSION = 128
"""Smallest dimension of a layer's product in the published runs that chips are fitted to (planner/validate/data: an attention
of hidden size 1,024 over 8 tensor ranks); and of the products that `shardwright profile` times on an accelerator
(hardware_profiles/measure/probes.py)."""
HOST_DIMENSION = 24
"""The same of the products that it times where the host is the device."""
HEADS = (64, 256)
"""Smallest and largest heads of attention in those runs."""
ALIGNED_HEAD = 8
"""What heads are a multiple of in the trusted ones: tensor cores read 16 bytes at a time (NVIDIA Deep Learning Performance
Guide, Matrix Multiplication Background). BLOOM's search has heads of 108 and 150 too: predicted 16 to 29% too fast."""


def extrapolations(counted: GraphWork, cluster: Cluster) -> tuple[str, ...]:
    """One line for each kind of work whose rate is extrapolated."""
    chip = cluster.chip
    least = HOST_DIMENSION if chip.is_host else FITTED_DIMENSION
    found: dict[str, None] = {}
    for option in counted.blocks:
        for name, block in option.items():
            found |= dict.fromkeys(f"{name}: {text}" for text in _of_block(block.operations, chip, least))
    return (*unknown_operations(counted.graph), *found)


def _of_block(operations: tuple[Operation, ...], chip: Chip, least: int) -> Iterator[str]:
    dimensions, heads = [], []
    for operation in operations:
        for done in (operation.forward, operation.to_input, operation.to_weight):
            if done.gemm is not None:
                dimensions.append(min(done.gemm[:3]))
            if done.attention is not None and not chip.is_host:
                heads.append(done.attention.head_dim)
        if operation.forward.gemm is not None and operation.dtype not in chip.gemm:
            yield f"{chip.name} has no rate for products in {operation.dtype}: priced by the bytes that they move"
    if dimensions and 0 < min(dimensions) < least:
        yield f"products with a dimension of {min(dimensions)}: extrapolated, rates come from products of {least} and more"
    for size in sorted({size for size in heads if not HEADS[0] <= size <= HEADS[1]}):
        yield f"attention with heads of {size}: extrapolated, rates come from heads of {HEADS[0]} to {HEADS[1]}"
    for size in sorted({size for size in heads if size % ALIGNED_HEAD}):
        yield f"attention with heads of {size}: extrapolated, rates come from heads that are a multiple of {ALIGNED_HEAD}"


def unknown_operations(graph: ModelGraph) -> tuple[str, ...]:
    """Operations that no rule knows: what they cost is a guess, too."""
    unknown = {(body.name, node.op) for body in graph.bodies for node in body.nodes if not has_rule(node)}
    return tuple(f"{body}: {op} has no rule: priced by the bytes that it moves" for body, op in sorted(unknown))
