"""Gradients that wait for others in a backward pass: of blocks that share parameters, which FSDP2 shards together."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from planner.ir.graph import ModelGraph
from planner.ir.placement import BodyPlacement, local_type


def waiting_gradients(
    graph: ModelGraph, placements: Mapping[str, BodyPlacement], degree: int
) -> dict[str, tuple[int, int]]:
    """By body, bytes of gradients that wait while one of its blocks runs its backward pass on a stage of all blocks, and of
    those that still wait when its own are reduced, at most.

    Autograd hands a parameter's gradient over when all blocks that make a part of it have: the part of the last waits for the
    others, and where two meet their sum is a third tensor (torch/csrc/autograd/input_buffer.cpp). The blocks are one unit,
    whose gradients of any parameter are reduced when the backward pass of its first block is over (``post_backward``); where
    that leaves no gradient, when all backward passes are (``_root_post_backward_final_callback``).
    """
    asked = graph.gradients.asked_whole
    running, reducing = [0] * len(graph.blocks), [0] * len(graph.blocks)
    for unit in graph.sharded_together(0, len(graph.blocks)):
        users: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        for at in unit if len(unit) > 1 else ():
            block = graph.blocks[at]
            bound, placed = dict(block.parameters), placements[block.body].parameters
            for value, where in zip(graph.body_of[block.body].parameters, placed, strict=True):
                fqn = bound[value.name]
                if value.name in asked[at] and at not in users.setdefault(fqn, []):
                    users[fqn].append(at)
                    sizes[fqn] = local_type(value.type, where, degree).size_bytes(1)
        ends = unit[0] if _leaves_gradient(graph, unit[0], asked[unit[0]]) else 0
        for fqn, using in users.items():
            for at in range(ends, using[-1]):
                running[at] += sizes[fqn] * (1 + (at in using))
                reducing[at] += 0 if at in unit else sizes[fqn]
    found: dict[str, tuple[int, int]] = {}
    for block, *sizes_at in zip(graph.blocks, running, reducing, strict=True):
        most = found.get(block.body, (0, 0))
        found[block.body] = max(most[0], sizes_at[0]), max(most[1], sizes_at[1])
    return found


def _leaves_gradient(graph: ModelGraph, at: int, asked: Collection[str]) -> bool:
    """Whether a block makes a gradient of what it reads."""
    return any(value.name in asked for value in graph.body_of[graph.blocks[at].body].inputs)
