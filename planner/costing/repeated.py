"""What recomputation runs again in the backward pass where torch's checkpoint stops as soon as it has what it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.costing.expressions import in_emitted_order
from planner.costing.local import LocalBody, Step
from planner.ir.costed import Recompute


def repeated_nodes(local: LocalBody, recompute: Recompute) -> frozenset[str]:
    """Names of the nodes, and (under ``full``) of what conversions make; the same for any micro-batch.

    Of the body, or of each region, those up to the last, as the program runs them, that keeps something for the backward pass;
    torch's checkpoint stops there (torch/utils/checkpoint.py, ``set_checkpoint_early_stop``).
    """
    return _again(local, recompute, _until_kept)


def computed_nodes(local: LocalBody, recompute: Recompute) -> frozenset[str]:
    """Those of them whose kernels run: an operation that keeps only what it was given saves that before it computes, so where
    it is the last, as a layer's last product is, it does not."""
    return _again(local, recompute, _until_made)


def _again(
    local: LocalBody, recompute: Recompute, part: Callable[[LocalBody, Sequence[Step]], Sequence[Step]]
) -> frozenset[str]:
    if recompute == "none":
        return frozenset()
    parts = local.body.regions if recompute == "selective" else ()
    steps = in_emitted_order(local, parts).steps
    if recompute == "full":
        again = part(local, steps)
        return frozenset(name for step in again for name in ([step.node.name] if step.node is not None else step.outputs))
    regions = [[step for step in steps if step.node is not None and step.node.name in names] for names in parts]
    return frozenset(step.node.name for region in regions for step in part(local, region) if step.node is not None)


def _until_kept(local: LocalBody, steps: Sequence[Step]) -> Sequence[Step]:
    """Up to the last of which something is kept."""
    last = max((at for at, step in enumerate(steps) if step.kept or step.extra_bytes), default=-1)
    return steps[: last + 1]


def _until_made(local: LocalBody, steps: Sequence[Step]) -> Sequence[Step]:
    """Without the last of these, unless it keeps something that it makes."""
    kept = _until_kept(local, steps)
    makes = any(step.extra_bytes or {local.root[value] for value in step.outputs} & set(step.kept) for step in kept[-1:])
    return kept if makes else kept[:-1]
