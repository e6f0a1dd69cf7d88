"""What the context and the expert axis exchange inside a block, read off the graph of one rank's share.

The graph is that of a rank's own tokens and experts: a model traced at a ``context``-th of the sequence, holding an
``expert``-th of the experts. Two kinds of operations reach beyond that share:

- attention needs the keys and values of the whole sequence: they are gathered over the context axis in the forward pass and
  again in the backward pass, where their gradients are scattered; a ring that passes them on moves the same bytes (Liu et
  al. 2023, Ring Attention). The sequence is dealt so that every rank masks equally much (Megatron Core, context_parallel:
  two chunks a rank, one from each end), so a causal rank works on half of all pairs;
- experts (products of several parameter matrices with as many groups of tokens) get their tokens from all ranks of the
  expert axis and send the answers back: an all-to-all before and one after, and the same for the gradients (Lepikhin et al.
  2020, GShard, section 3). Loads are balanced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from cost_models.collectives import CollectiveKind
from planner.costing.operations import Operation
from planner.ir.body import Body, Node
from planner.ir.placement import BodyPlacement, local_type
from planner.ops.families import ATTENTION, GEMMS
from planner.ops.work import Work

Axis = Literal["context", "expert"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """``node``: whose values move; ``kind`` with an input tensor of ``size_bytes`` on one rank, so many times in the forward
    and in the backward pass of a micro-batch."""

    axis: Axis
    node: str
    kind: CollectiveKind
    size_bytes: int
    forward: int
    backward: int


def exchanges(body: Body, placement: BodyPlacement, microbatch: int) -> tuple[Exchange, ...]:
    """What both axes would exchange for one micro-batch, whatever their degrees (a degree of one exchanges nothing)."""
    strategies = {node.node: node.strategy for node in placement.nodes}
    found: list[Exchange] = []
    for node in body.nodes:
        if node.base == ATTENTION:
            placed = strategies[node.name].operands[1:3]
            types = [body.types[name] for name in node.operands[1:3]]
            pairs = zip(types, placed, strict=True)
            size = sum(local_type(type_, at, placement.degree).size_bytes(microbatch) for type_, at in pairs)
            found.append(Exchange("context", node.name, "all_gather", size, 1, 1))
    found.extend(_dispatches(body, placement.degree, microbatch))
    return tuple(found)


def scattered_gradients(exchange: Exchange, degree: int) -> Exchange | None:
    """The gradients of gathered keys and values, as large as the whole sequence's, summed and scattered."""
    if exchange.kind != "all_gather":
        return None
    return replace(exchange, kind="reduce_scatter", size_bytes=degree * exchange.size_bytes, forward=0, backward=1)


def _dispatches(body: Body, degree: int, microbatch: int) -> Iterator[Exchange]:
    """Tokens to the experts and their answers back; each of the tensor ranks moves its share of them."""
    experts = list(expert_products(body))
    if not experts:
        return
    first, last = experts[0], experts[-1]
    tokens = next(name for name in first.operands if name not in expert_parameters(body))
    for name, type_ in ((first.name, body.types[tokens]), (last.name, last.type)):
        yield Exchange("expert", name, "all_to_all", type_.size_bytes(microbatch) // degree, 1, 1)


def expert_products(body: Body) -> Iterator[Node]:
    """Products of several matrices that are one parameter with several groups of rows."""
    owned = expert_parameters(body)
    yield from (node for node in body.nodes if node.base in GEMMS and owned.intersection(node.operands))


def expert_parameters(body: Body) -> frozenset[str]:
    """Parameters that hold several matrices and are factors of a product: the expert axis divides them."""
    stacked = {value.name for value in body.parameters if value.type.rank > 2}
    return frozenset(name for node in body.nodes if node.base in GEMMS for name in node.operands if name in stacked)


def over_context(operation: Operation, gathered: tuple[Exchange, ...], context: int) -> Operation:
    """A rank's share of attention over the whole sequence; other operations see the rank's own tokens alone."""
    if context == 1 or operation.forward.attention is None:
        return operation
    more = (context - 1) * sum(item.size_bytes for item in gathered if item.node == operation.node)
    forward, to_input = (_over_context(done, more, context) for done in (operation.forward, operation.to_input))
    return replace(operation, forward=forward, to_input=to_input)


def _over_context(done: Work, more_bytes: int, context: int) -> Work:
    shape = done.attention
    if shape is None:
        return done
    keys = context * shape.keys
    seen = (keys + 1) // 2 if shape.causal else keys
    return replace(
        done, flops=context * done.flops, bytes_moved=done.bytes_moved + more_bytes,
        attention=replace(shape, keys=seen, causal=False),
    )
