"""The most that lives transiently beside what autograd keeps, while one block runs for one micro-batch.

Forward: a storage lives from the step that makes it to its last reader (outputs: to the end). Kept storages count
apart. Backward: steps run in reverse; the gradient of a value lives from its last reader's step to its producer's,
one copy a value, views sharing their storage's. Repeated activations live from the beginning of the repetition: all
that the block would keep without recomputation, less what it keeps anyway. Both are upper bounds on eager execution
up to scratch space inside kernels (cross-entropy's, which is as large as the logits, counts); inputs belong to their
producer.
"""

from __future__ import annotations

from planner.costing.activations import kept_roots, saved_bytes
from planner.costing.local import LocalBody, Step
from planner.costing.losses import at_once
from planner.ir.costed import Recompute
from planner.ir.halves import sums_half_logits
from planner.ir.types import DTYPE_BYTES, HALF


def forward_peak_bytes(local: LocalBody, recompute: Recompute = "none") -> int:
    """The most bytes of temporaries alive at one step of the forward pass."""
    outside = kept_roots(local, recompute) | _given(local)
    last = {local.root[value]: index for index, step in enumerate(local.steps) for value in step.operands}
    last |= {local.root[value]: len(local.steps) for value in local.outputs}
    alive: dict[str, int] = {}
    peak = 0
    for index, step in enumerate(local.steps):
        for value in step.outputs:
            root = local.root[value]
            if root not in outside and root not in alive:
                alive[root] = local.storage_bytes(root)
        peak = max(peak, sum(alive.values()) + _scratch_bytes(local, step, backward=False))
        alive = {root: size for root, size in alive.items() if last.get(root, index) > index}
    return peak


def backward_peak_bytes(local: LocalBody, recompute: Recompute = "none") -> int:
    """The most bytes of gradients and repeated activations alive at one step of the backward pass."""
    state = {value.name for value in (*local.body.parameters, *local.body.buffers)}
    alive = {local.root[value]: local.storage_bytes(local.root[value]) for value in local.outputs}
    peak = sum(alive.values())
    for step in reversed(local.steps):
        if not step.differentiable:
            continue
        for value in step.operands:
            root = local.root[value]
            if _has_gradient(local, value) and root not in state:
                alive.setdefault(root, local.storage_bytes(root))
        peak = max(peak, sum(alive.values()) + _scratch_bytes(local, step, backward=True))
        for value in step.outputs:
            if local.root[value] == value:
                alive.pop(value, None)
    repeated = max(0, saved_bytes(local) - saved_bytes(local, recompute))
    return peak + repeated


def _scratch_bytes(local: LocalBody, step: Step, *, backward: bool) -> int:
    """What a summed cross-entropy makes beside its operands and results.

    Over a split class dim, and for half precisions, the runtime computes with a float32 copy of some rows of the logits at a
    time (runtime/vocabulary.py; two where they are whole), or with the gradient itself unless that is half. torch's own makes
    the gradient of ``log_softmax`` from that of ``nll_loss``, beside what it casts of half precisions.
    """
    if step.node is None or step.node.base != "cross_entropy_loss":
        return 0
    logits = local.types[step.operands[0]]
    half, cast = sums_half_logits(step.node), logits.dtype in HALF
    split = step.strategy is not None and bool(step.strategy.forward)
    item = max(4, DTYPE_BYTES[logits.dtype])
    if half or split:
        copies = (0 if backward and not half else 1) if split else 2
        return copies * item * at_once(logits.sizes(local.batch))
    return item * logits.elements(local.batch) * (backward + cast)


def _has_gradient(local: LocalBody, value: str) -> bool:
    return value.split(" -> ")[0].split("#")[0] in local.body.differentiable


def _given(local: LocalBody) -> frozenset[str]:
    return frozenset(value.name for value in (*local.body.inputs, *local.body.parameters, *local.body.buffers))
