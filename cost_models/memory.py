"""Bytes of a rank's training state under AdamW and ZeRO 0-3, as FSDP2 of torch 2.13 keeps them.

ZeRO is ``fully_shard`` (1-3) or ``replicate`` (0) over the data axis; 1 and 2 keep ``reshard_after_forward=False``.
What exists, and when (files of ``torch/distributed/fsdp/_fully_shard``):

- *sharded parameter*: the master, in the parameter's own dtype (float32 under bf16 and fp16), dim 0 padded to whole
  shards; always (``_fsdp_param.py``, ``_init_sharded_param``). ``replicate`` holds it whole (its shard world is 1).
- *working copy*: the all-gather's output in ``param_dtype``. A group of one has it too, and also without mixed
  precision: the parameter is copied into ``all_gather_outputs`` (``_fsdp_param_group.py``, ``wait_for_unshard``,
  world_size == 1). Under 0-2 it lives from the block's first forward until the backward that reshards (the last
  micro-batch's); under 3 during the block's forward and backward only. It is gone at the optimizer step.
- *unsharded gradient*: autograd's, in the working dtype, until the block's backward ends. If this backward does not
  reduce, it is cast to ``reduce_dtype`` (float32) and later ones are added to it (``to_accumulated_grad_if_needed``,
  ``accumulate_unsharded_grad_if_needed``): under 0 and 1 with several micro-batches it is whole and lives from the
  first backward to the last one. Pipeline schedules do so whatever the stage, unless each micro-batch is made to
  reduce.
- *sharded gradient*: the reduce's output, in the master's dtype, from the reducing backward until the gradients are
  cleared after the optimizer step (``_fsdp_collectives.py``, ``foreach_reduce``). ``replicate``: whole.
- *reduce input*: one flat buffer of the block's gradients in ``reduce_dtype``, while the reduce runs (same place);
  *gather buffers*: a flat output for the block, copied out afterwards, and the shard cast to ``param_dtype``
  (``foreach_all_gather``).
- *optimizer*: two moments in the master's dtype beside the sharded parameter, from the first step on
  (``torch/optim/adamw.py``); the fused form steps in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

Precision = Literal["bf16", "fp16", "fp32", "fp64"]

WORKING_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
"""Of one element in forward and backward."""
MASTER_BYTES = {"bf16": 4, "fp16": 4, "fp32": 4, "fp64": 8}
"""Of one element of the master, its gradient once reduced, and each moment."""
MOMENTS = 2
"""AdamW keeps an average of the gradient and of its square (Loshchilov 2019)."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of one rank. ``parameters`` and ``optimizer`` are there always; ``gradients`` is their most in a step;
    ``gathered`` is the working copy: resident under ZeRO 0-2, one block at a time under 3."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.gathered + other.gathered,
        )


@dataclass(frozen=True, slots=True)
class TransientBytes:
    """Bytes beyond :class:`StateBytes` while one block is gathered, while its gradients are reduced, and in the
    step."""

    gather: int
    gradient: int
    reduce: int
    step: int


def shard_elements(shape: Sequence[int], group: int) -> int:
    """Elements that each rank of a shard group stores of a parameter of ``shape``: FSDP2 pads dim 0 to whole shards."""
    if not shape:
        return 1
    return -(-shape[0] // group) * prod(shape[1:])


def state_bytes(
    elements: int,
    precision: Precision,
    zero: int,
    group: int,
    *,
    shard: int | None = None,
    accumulates: bool = True,
) -> StateBytes:
    """Bytes of ``elements`` parameters on one rank, under ZeRO stage ``zero`` over ``group`` ranks.

    ``shard``: elements of the rank's shard, padding included (:func:`shard_elements` summed over the parameters); by
    default the even share. ``accumulates``: gradients of several micro-batches are added up before they are reduced
    (stages 0 and 1 with more than one micro-batch; any stage where a pipeline schedule reduces once); then they are
    whole."""
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO stage {zero} is none of 0, 1, 2, 3")
    group = 1 if zero == 0 else group
    kept = elements if group == 1 else shard if shard is not None else -(-elements // group)
    master = MASTER_BYTES[precision]
    return StateBytes(
        parameters=master * kept,
        gradients=master * (elements if accumulates else kept),
        optimizer=MOMENTS * master * kept,
        gathered=WORKING_BYTES[precision] * elements,
    )


def transient_bytes(elements: int, precision: Precision, zero: int, group: int, *, shard: int | None = None) -> TransientBytes:
    """Bytes that come and go with one block of ``elements`` parameters (arguments as in :func:`state_bytes`).

    ``gather``: the flat all-gather output and the shard cast for it; ``gradient``: autograd's gradients of the block;
    ``reduce``: the flat reduce input; ``step``: the square roots of the second moments (of all blocks together: add
    them)."""
    group = 1 if zero == 0 else group
    kept = elements if group == 1 else shard if shard is not None else -(-elements // group)
    working, master = WORKING_BYTES[precision], MASTER_BYTES[precision]
    cast = working * kept if working != master else 0
    return TransientBytes(
        gather=cast if group == 1 else working * kept * group + cast,
        gradient=working * elements,
        reduce=master * kept * group,
        step=master * kept,
    )
