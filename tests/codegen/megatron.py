"""Megatron-LM's split of the GPT example by hand, at tensor degree 2, with or without sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping

from planner.ir.body import Body, Node
from planner.ir.graph import ModelGraph
from planner.ir.placement import (
    PARTIAL,
    REPLICATE,
    SHARED,
    BodyPlacement,
    NodePlacement,
    OpStrategy,
    Placement,
    shard,
)

Strategy = tuple[list[Placement], list[Placement]]
COLUMN, ROWS = shard(2), shard(2, (), 8)


def placements(graph: ModelGraph, sequence_parallel: bool) -> Mapping[str, BodyPlacement]:
    """The placement of each body of ``traced("gpt")`` with hidden 32 and four heads."""
    stream = shard(1) if sequence_parallel else REPLICATE
    state = SHARED if sequence_parallel else REPLICATE
    return {
        body.name: _body(body, stream, state, _Strategies(stream, state, body)) for body in graph.bodies
    }


class _Strategies:
    """The strategy of each node. ``stream``: how hidden states lie between blocks; ``state``: norms' parameters."""

    def __init__(self, stream: Placement, state: Placement, body: Body) -> None:
        self.stream, self.state, self.body = stream, state, body

    def of(self, node: Node) -> Strategy:
        """Operands and outputs."""
        stream, state = self.stream, self.state
        match node.base:
            case "layer_norm":
                return [stream, state, state], [stream]
            case "embedding" if node.operands[0] == "tokens.weight":
                return [shard(0), REPLICATE], [PARTIAL]
            case "embedding":
                return [state, REPLICATE], [state]
            case "cross_entropy_loss":
                return [shard(1), REPLICATE], [REPLICATE]
            case "linear" | "add" if node.operands[1] in self.fixed:
                return self.fixed[node.operands[1]]
            case "split":
                return [shard(2, (32, 32, 32), 8)], [ROWS] * 3
            case "gelu":
                return [COLUMN], [COLUMN]
            case "scaled_dot_product_attention":
                return [shard(1)] * 3, [shard(1)]
            case "transpose" | "reshape":
                return self.views(node)
            case "add" if node.operands[1].endswith("bias"):
                return [stream, state], [stream]
            case "add" if self.body.name == "Embedding" and state == SHARED:
                return [stream, shard(0)], [stream]
        return [stream] * len(node.operands), [stream]

    @property
    def fixed(self) -> dict[str, Strategy]:
        """Strategies of contractions and of their biases, by the parameter."""
        fused = (32, 32, 32)
        return {
            "attention.qkv.weight": ([SHARED, shard(0, fused, 8)], [shard(2, fused, 8)]),
            "attention.qkv.bias": ([shard(2, fused, 8), shard(0, fused, 8)], [shard(2, fused, 8)]),
            "attention.out.weight": ([ROWS, shard(1, (), 8)], [PARTIAL]),
            "feed_forward.up.weight": ([SHARED, shard(0)], [COLUMN]),
            "feed_forward.up.bias": ([COLUMN, shard(0)], [COLUMN]),
            "feed_forward.down.weight": ([COLUMN, shard(1)], [PARTIAL]),
            "tokens.weight": ([SHARED, shard(0)], [COLUMN]),
        }

    @staticmethod
    def views(node: Node) -> Strategy:
        """Between [B, T, H] and heads; the logits are flattened."""
        if node.base == "reshape":
            table: dict[int, Strategy] = {4: ([ROWS], [COLUMN]), 3: ([COLUMN], [ROWS]), 2: ([COLUMN], [shard(1)])}
            return table[node.type.rank]
        return ([shard(1)], [COLUMN]) if node.type.shape[1] == 16 else ([COLUMN], [shard(1)])


def _body(body: Body, stream: Placement, state: Placement, strategies: _Strategies) -> BodyPlacement:
    nodes = []
    parameters: dict[str, Placement] = {}
    for node in body.nodes:
        if node.base == "getitem":
            continue
        operands, outputs = strategies.of(node)
        nodes.append(NodePlacement(node.name, OpStrategy("by hand", tuple(operands), tuple(outputs))))
        parameters |= zip(node.operands, operands, strict=True)
    return BodyPlacement(
        body.name, 2, tuple(stream if value.differentiable else REPLICATE for value in body.inputs),
        tuple(parameters[value.name] for value in body.parameters), tuple(nodes),
        tuple(REPLICATE if body.name == "Head" else stream for _ in body.outputs),
    )
