"""A chain made by hand (embedding, layers of two matrices, head), with its own small table of rules and prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.ir.body import Body, BodyValue, Node
from planner.ir.graph import BatchInput, Block, ModelGraph, Parameter
from planner.ir.placement import (
    PARTIAL,
    REPLICATE,
    SHARED,
    Conversion,
    OpStrategy,
    Placement,
    Transfer,
    even,
    shard,
    transfers,
)
from planner.ir.types import Argument, BatchMultiple, Ref, TensorType

HIDDEN, SEQUENCE, VOCABULARY = 64, 32, 128
ACTIVATION = TensorType((BatchMultiple(1), SEQUENCE, HIDDEN), "float32")
WIDE = TensorType((BatchMultiple(1), SEQUENCE, 4 * HIDDEN), "float32")
LOGITS = TensorType((BatchMultiple(1), SEQUENCE, VOCABULARY), "float32")
IDS = TensorType((BatchMultiple(1), SEQUENCE), "int64")
SCALAR = TensorType((), "float32")
VIEWS = frozenset({"reshape", "view", "transpose", "permute", "split", "chunk", "unsqueeze", "expand", "slice"})


def _node(name: str, op: str, type_: TensorType, *operands: str) -> Node:
    arguments: tuple[tuple[str, Argument], ...] = tuple((f"a{at}", Ref(operand)) for at, operand in enumerate(operands))
    return Node(name, op, arguments, (type_,), differentiable=True)


def layer() -> Body:
    """x + down(unary(up(norm(x))))."""
    return Body(
        "Layer",
        (BodyValue("x", ACTIVATION, True),),
        (
            BodyValue("a", TensorType((HIDDEN,), "float32"), True),
            BodyValue("b", TensorType((4 * HIDDEN, HIDDEN), "float32"), True),
            BodyValue("c", TensorType((HIDDEN, 4 * HIDDEN), "float32"), True),
        ),
        (),
        (
            _node("n0", "norm", ACTIVATION, "x", "a"),
            _node("n1", "linear", WIDE, "n0", "b"),
            _node("n2", "unary", WIDE, "n1"),
            _node("n3", "linear", ACTIVATION, "n2", "c"),
            _node("n4", "add", ACTIVATION, "x", "n3"),
        ),
        ("n4",),
    )


def chain(layers: int, *, tied: bool) -> ModelGraph:
    """Embedding, layers, and a head with its loss; the embedding's and the head's weight may be one."""
    weight = TensorType((VOCABULARY, HIDDEN), "float32")
    first = Body(
        "First", (BodyValue("ids", IDS),), (BodyValue("w", weight, True),), (),
        (_node("e0", "embedding", ACTIVATION, "ids", "w"),), ("e0",),
    )
    last = Body(
        "Last", (BodyValue("h", ACTIVATION, True), BodyValue("t", IDS)), (BodyValue("w", weight, True),), (),
        (_node("l0", "linear", LOGITS, "h", "w"), _node("l1", "loss", SCALAR, "l0", "t")), ("l1",),
    )
    head = "first.w" if tied else "last.w"
    names = [parameter.name for parameter in layer().parameters]
    middle = [
        Block(f"m{at}", "Layer", (f"h{at}",), (f"h{at + 1}",), tuple((name, f"m{at}.{name}") for name in names), ())
        for at in range(layers)
    ]
    blocks = (
        Block("first", "First", ("ids",), ("h0",), (("w", "first.w"),), ()),
        *middle,
        Block("last", "Last", (f"h{layers}", "targets"), ("loss",), (("w", head),), ()),
    )
    parameters = [Parameter("first.w", weight, ()), *([] if tied else [Parameter("last.w", weight, ())])]
    parameters += [Parameter(f"{b.name}.{p.name}", p.type, ()) for b in middle for p in layer().parameters]
    inputs = BatchInput("ids", IDS, "tokens", VOCABULARY), BatchInput("targets", IDS, "targets")
    return ModelGraph(
        "chain", inputs, tuple(parameters), (), Body("Context", (), (), (), (), ()),
        (first, layer(), last), blocks, "loss", "weight", "float32", SEQUENCE,
    )


def shared_stacks(layers: int) -> ModelGraph:
    """Two blocks of different kinds, each so many layers, that share all parameters."""
    bodies = _stack("Once", layers), _stack("Again", layers)
    shared = bodies[0].parameters
    blocks = tuple(
        Block(f"b{at}", body.name, (f"h{at}",), (f"h{at + 1}",), tuple((p.name, p.name) for p in shared), ())
        for at, body in enumerate(bodies)
    )
    return ModelGraph(
        "stacks", (), tuple(Parameter(p.name, p.type, ()) for p in shared), (), Body("Context", (), (), (), (), ()),
        bodies, blocks, "h2", "weight", "float32", SEQUENCE,
    )


def _stack(name: str, layers: int) -> Body:
    one, nodes, parameters = layer(), list[Node](), list[BodyValue]()
    for at in range(layers):
        renamed = {value.name: f"{value.name}_{at}" for value in (*one.nodes, *one.parameters)}
        renamed["x"] = f"n4_{at - 1}" if at else "x"
        nodes += [_node(renamed[node.name], node.op, node.type, *map(renamed.__getitem__, node.operands)) for node in one.nodes]
        parameters += [BodyValue(renamed[p.name], p.type, True) for p in one.parameters]
    return Body(name, one.inputs, tuple(parameters), (), tuple(nodes), (nodes[-1].name,))


def table(body: Body, degree: int) -> Mapping[str, Sequence[OpStrategy]]:
    """Strategies of a body's nodes."""
    return {node.name: _strategies(node, body.types, degree) for node in body.nodes}


def _strategies(node: Node, types: Mapping[str, TensorType], degree: int) -> tuple[OpStrategy, ...]:
    rank = node.type.rank
    whole = [_every("replicate", node, REPLICATE), _every("shared", node, SHARED)]
    dims = [shard(dim) for dim in range(1, rank) if even(node.type, shard(dim), degree)]
    if node.op == "unary":
        return (*whole, *(_every(str(dim), node, dim) for dim in dims))
    if node.op == "add":
        return (*whole, _every("partial", node, PARTIAL), *(_every(str(dim), node, dim) for dim in dims))
    if node.op == "norm":
        return (*whole, OpStrategy("rows", (shard(1), SHARED), (shard(1),)))
    if node.op == "linear":
        return (
            *whole,
            OpStrategy("column", (SHARED, shard(0)), (shard(2),)),
            OpStrategy("row", (shard(2), shard(1)), (PARTIAL,)),
            OpStrategy("rows", (shard(1), SHARED), (shard(1),)),
        )
    if node.op == "embedding":
        return (
            OpStrategy("replicate", (REPLICATE, REPLICATE), (REPLICATE,)),
            OpStrategy("shared", (REPLICATE, SHARED), (SHARED,)),
            OpStrategy("vocabulary", (REPLICATE, shard(0)), (PARTIAL,)),
            OpStrategy("rows", (shard(1), SHARED), (shard(1),)),
            OpStrategy("columns", (REPLICATE, shard(1)), (shard(2),)),
        )
    each = 4 * SEQUENCE
    return (
        OpStrategy("replicate", (REPLICATE, REPLICATE), (REPLICATE,)),
        OpStrategy("vocabulary", (shard(2), REPLICATE), (REPLICATE,), (Transfer("all_reduce", each),) * 3),
    )


def _every(name: str, node: Node, placement: Placement) -> OpStrategy:
    return OpStrategy(name, (placement,) * len(node.operands), (placement,))


@dataclass(frozen=True)
class DensePricing:
    """1e12 FLOP/s, 1e11 B/s of memory, a wire of 1e10 B/s and 1 us a collective, batch 8, eight micro-batches a step. Views
    are free."""

    degree: int
    batch: int = 8
    accumulation: int = 8
    wire: float = 1e10
    latency_s: float = 1e-6

    def node_seconds(self, body: Body, node: Node, strategy: OpStrategy) -> tuple[float, float, float]:
        """Work divided over the ranks where anything is split."""
        types = [body.types[name] for name in node.operands]
        flops = self._flops(node, types)
        moved = 0 if node.base in VIEWS else sum(type_.size_bytes(self.batch) for type_ in (*types, node.type))
        split = any(p.state in ("shard", "partial") for p in (*strategy.operands, *strategy.outputs))
        seconds = (flops / 1e12 + moved / 1e11) / (self.degree if split else 1)
        return seconds, seconds, seconds if flops else 0.0

    def _flops(self, node: Node, types: Sequence[TensorType]) -> float:
        """Each output of a contraction sums products over the first operand's last dim; attention does so twice."""
        if node.base == "scaled_dot_product_attention":
            return 4.0 * types[0].elements(self.batch) * types[1].sizes(self.batch)[-2]
        if node.base in ("linear", "mm", "matmul"):
            return 2.0 * node.type.elements(self.batch) * types[0].sizes(self.batch)[-1]
        return 0.0

    def strategy_comm_seconds(self, strategy: OpStrategy, *, grows: bool) -> tuple[float, float]:
        """Of the collectives inside."""
        return self._seconds(strategy.forward, self.batch), self._seconds(strategy.backward, self.batch)

    def conversion_seconds(self, conversion: Conversion, whole: TensorType) -> tuple[float, float]:
        """Of the collectives of both steps."""
        forward, backward = (
            self._seconds(transfers(step, whole, conversion.source, self.degree, self.batch), 1)
            for step in (conversion.forward, conversion.backward)
        )
        return forward, backward

    def parameter_seconds(self, whole: TensorType, placement: Placement) -> float:
        """A sum once a step."""
        return 2 * whole.size_bytes() / self.wire / self.accumulation if placement.state == "shared" else 0.0

    def _seconds(self, passed: Sequence[Transfer], scale: int) -> float:
        factor = {"all_reduce": 2 / self.degree, "reduce_scatter": 1 / self.degree, "all_to_all": 1 / self.degree}
        parts = (transfer.size_bytes * factor.get(transfer.kind, 1.0) * (self.degree - 1) for transfer in passed)
        return sum(self.latency_s + part * scale / self.wire for part in parts)
