"""What a placed graph does on one rank, counted once and priced as often as rates change.

Nothing here depends on a rate, a link or an engine: operations with their FLOPs and bytes, collectives with their sizes,
bytes that autograd keeps. :mod:`planner.costing.blocks` and :mod:`planner.costing.graphs` price it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hardware_profiles import Engine
from planner.costing.activations import repeated_steps, saved_bytes
from planner.costing.exchanges import Exchange, exchanges, over_context
from planner.costing.kept import Keeping, loss_operands
from planner.costing.liveness import backward_peak_bytes, forward_peak_bytes
from planner.costing.local import LocalBody, localise
from planner.costing.operations import Operation, measure_operation
from planner.costing.passes import BlockPasses, Emitted
from planner.ir.costed import RECOMPUTE_LEVELS, Recompute
from planner.ir.graph import Body
from planner.ir.placement import REPLICATE, BodyPlacement, OpStrategy, local_type
from planner.ir.types import DTYPE_BYTES, TensorType
from planner.ops.work import backward_work, work
from planner.placement.ledger import CollectiveCount, collectives

DEFAULT_ENGINE = Engine()


@dataclass(frozen=True)
class LevelWork:
    """What a recomputation level changes. ``repeated``: nodes that run again; ``backward``: collectives of the backward
    pass, the repeated ones included; bytes as in :class:`~planner.ir.costed.BlockCost`."""

    repeated: frozenset[str]
    backward: tuple[CollectiveCount, ...]
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    waiting_bytes: int = 0
    split_peak_bytes: int = 0


@dataclass(frozen=True)
class BlockWork:
    """One block for one micro-batch on rank 0 (which holds the most). ``forward``, ``backward``: collectives over the tensor
    axis without recomputation; ``exchanges``: over the context and the expert axis; ``master_bytes``: of the trained
    parameters' masters; ``flops``: model FLOPs of all tensor and context ranks."""

    operations: tuple[Operation, ...]
    forward: tuple[CollectiveCount, ...]
    backward: tuple[CollectiveCount, ...]
    exchanges: tuple[Exchange, ...]
    levels: Mapping[Recompute, LevelWork]
    parameter_elements: int
    master_bytes: int
    buffer_bytes: int
    flops: float


def measure_block(
    body: Body, placement: BodyPlacement, microbatch: int, levels: tuple[Recompute, ...] = RECOMPUTE_LEVELS,
    context: int = 1, engine: Engine = DEFAULT_ENGINE,
) -> BlockWork:
    """Count one block under one placement for ``microbatch`` samples, under each recomputation level. ``context``: degree of
    the axis that the sequence is divided over; the body is that of one rank's tokens; ``engine``: by whose
    bookkeeping bytes are kept (nothing else of it counts)."""
    degree = placement.degree
    strategies = {node.node: node.strategy for node in placement.nodes}
    forward, backward = collectives(body, placement, degree, microbatch)
    trained = _trained(body, placement)
    exchanged = exchanges(body, placement, microbatch)
    return BlockWork(
        operations=tuple(
            over_context(measure_operation(body, node, strategies[node.name], degree, microbatch), exchanged, context)
            for node in body.nodes
        ),
        forward=forward, backward=backward,
        exchanges=exchanged,
        levels=_levels(body, placement, microbatch, levels, engine),
        parameter_elements=sum(type_.elements() for type_ in trained),
        master_bytes=sum(type_.elements() * max(4, DTYPE_BYTES[type_.dtype]) for type_ in trained),
        buffer_bytes=sum(value.type.size_bytes(microbatch) for value in body.buffers),
        flops=model_flops(body, microbatch, context),
    )


def _levels(
    body: Body, placement: BodyPlacement, microbatch: int, levels: tuple[Recompute, ...], engine: Engine
) -> Mapping[Recompute, LevelWork]:
    local = localise(body, placement, microbatch)
    emitted = Emitted(local)
    found: dict[Recompute, LevelWork] = {}
    for level in levels:
        if level == "selective" and engine.selective == "alternate":
            repeated, moved = Keeping(local, engine).repeated()
        else:
            repeated = frozenset(step.node.name for step in repeated_steps(local, level) if step.node is not None)
            moved = repeated
        _, again = collectives(body, placement, placement.degree, microbatch, repeated=moved)
        passes = BlockPasses(emitted, level)
        apart = _split(passes) if level == "none" else (0, 0)  # Split passes exclude recomputation.
        found[level] = LevelWork(repeated, again, *_level_bytes(local, passes, level, engine), *apart)
    return found


def _peaks(passes: BlockPasses, saved: int) -> tuple[int, int]:
    """(forward, backward): the most beyond what is kept, storage by storage (:mod:`planner.costing.passes`). The block's
    inputs, and the gradients that arrive at its outputs, are alive all the while; parameters' gradients are made too."""
    local = passes.local
    inputs = sum(local.storage_bytes(value.name) for value in local.body.inputs if value.differentiable)
    return max(0, passes.forward.peak[0] + inputs - saved), sum(passes.gradient_bytes) + sum(passes.backward().peak)


def _split(passes: BlockPasses) -> tuple[int, int]:
    """Of a backward pass in two parts: what the weight part will read beyond what the input part still keeps for it, and the
    most that lives in either part beyond both."""
    inward = passes.backward("input")
    waiting = max(0, inward.after[0])
    return waiting, max(sum(passes.gradient_bytes) + sum(inward.peak) - waiting, sum(passes.backward("weight").peak))


def _level_bytes(local: LocalBody, passes: BlockPasses, level: Recompute, engine: Engine) -> tuple[int, int, int]:
    """(saved, forward peak, backward peak) by the engine's bookkeeping."""
    if engine.keeps == "operations" and (level != "selective" or engine.selective != "alternate"):
        saved = saved_bytes(local, level)
        forward, backward = _peaks(passes, saved)
    elif engine.keeps == "operations":
        saved = Keeping(local, engine).saved_bytes(level)
        forward, backward = forward_peak_bytes(local, level), backward_peak_bytes(local) + max(0, saved_bytes(local) - saved)
    else:
        keeping = Keeping(local, engine)
        saved = keeping.saved_bytes(level)
        forward = forward_peak_bytes(local, level)
        backward = backward_peak_bytes(local) + max(0, keeping.saved_bytes("none") - saved)
    logits = loss_operands(local)
    if engine.loss and logits:
        forward = backward = max(0, round(engine.loss * logits[0]) - logits[1])
    moved = round(engine.offloaded * saved)
    # What a block keeps waits in the host's memory; one block's is on its way there or back.
    return saved - moved, forward + moved, backward + moved


def measure_whole(body: Body, microbatch: int) -> tuple[Operation, ...]:
    """A body that every rank computes whole (the context)."""
    return tuple(
        measure_operation(
            body, node, OpStrategy("replicate", (REPLICATE,) * len(node.operands), (REPLICATE,) * len(node.types)), 1,
            microbatch,
        )
        for node in body.nodes
    )


def parameter_elements(body: Body, placement: BodyPlacement) -> int:
    """Trained elements that rank 0 of the tensor axis holds."""
    return sum(type_.elements() for type_ in _trained(body, placement))


def _trained(body: Body, placement: BodyPlacement) -> list[TensorType]:
    return [
        local_type(value.type, placed, placement.degree)
        for value, placed in zip(body.parameters, placement.parameters, strict=True) if value.differentiable
    ]


def model_flops(body: Body, batch: int, context: int = 1) -> float:
    """FLOPs of forward and backward of the whole block for ``batch`` samples: products and attention, without the
    causal half and without recomputation (Chowdhery et al. 2022, appendix B). Of ``context`` ranks, each has its tokens,
    and attends to those of all."""
    parameters = {value.name for value in body.parameters}
    total = 0.0
    for node in body.nodes:
        if node.base == "getitem":
            continue
        operands = [body.types[name] for name in node.operands]
        needs = body.made(node)
        own = [name in parameters for name in node.operands]
        done = (work(node, operands, node.types, batch), *backward_work(node, operands, node.types, batch, needs, own))
        scale = context**2 if done[0].attention is not None else context
        total += scale * sum(part.flops for part in done)
    return total
