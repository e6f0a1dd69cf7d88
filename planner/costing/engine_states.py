"""Bytes of a rank's training state under engines that keep it in flat buffers, where :mod:`cost_models.memory` says what
FSDP2 keeps.

Working parameters in the job's half precision, gradients in one contiguous buffer that lives all step long, and, divided
over the shard group from ZeRO 1 on, masters and two moments in float32 (Megatron-LM, megatron/model/distributed.py and
optimizer/distrib_optimizer.py: 2 + 4 + 12 / d bytes an element under bfloat16; DeepSpeed, runtime/zero/stage_1_and_2.py:
2 + 2 + 12 / d under float16; runtime/bf16_optimizer.py: 2 + 2 + 4 + 12 / d). ZeRO 2 divides the gradients too, ZeRO 3 the
parameters, of which two blocks are gathered at a time; a partitioner that gathers each parameter before the product that
reads it holds two of those (Xu et al. 2021, GSPMD: an operator whose operand is sharded gets an all-gather of its own).
"""

from __future__ import annotations

from dataclasses import replace

from cost_models.memory import MASTER_BYTES, MOMENTS, WORKING_BYTES
from hardware_profiles import Engine
from planner.ir.costed import StateCost
from planner.ir.plan import Precision


def flat_state(
    state: StateCost, elements: int, group: int, zero: int, precision: Precision, engine: Engine
) -> StateCost:
    """``state`` with the bytes of ``elements`` trained elements (of one rank, before ZeRO over ``group`` ranks) as such an
    engine keeps them. Its seconds stay."""
    shard = -(-elements // group) if zero else elements
    working, master = WORKING_BYTES[precision], MASTER_BYTES[precision]
    mixed = working < master
    parameters = (working if mixed else 0) * (shard if zero == 3 else elements) + master * shard
    return replace(
        state, parameters_bytes=parameters,
        gradients_bytes=round(held_gradient(precision, engine) * (shard if zero >= 2 else elements)),
        optimizer_bytes=MOMENTS * master * shard,
        gather_bytes=working * round(min(2 * elements, engine.gathered or 2 * elements)) if zero == 3 else 0, lasting_bytes=0,
    )


def gathered_one_by_one(state: StateCost, largest: int, zero: int, precision: Precision) -> StateCost:
    """``state`` where parameters are gathered one at a time, of ``largest`` elements at the most. Two are held."""
    return replace(state, gather_bytes=2 * WORKING_BYTES[precision] * largest, lasting_bytes=0) if zero == 3 else state


def update_bytes(gradients: int, optimizer: int, zero: int, precision: Precision, engine: Engine) -> int:
    """What an update makes, of a rank that holds so many bytes of gradients and of moments.

    It lies beside the activations that were freed before: pieces of gigabytes, in which torch's caching allocator cannot put
    the cached segments of smaller ones together (c10/cuda/CUDACachingAllocator.cpp: blocks are merged within a segment
    alone). That a full device gives cached segments back before it fails is not counted on.
    """
    if zero not in (1, 2):
        return 0
    if precision == "fp16":
        shard = optimizer / (MOMENTS * MASTER_BYTES[precision])
        return round(engine.updated_fp16 * shard + WORKING_BYTES[precision] * engine.bucket)
    return round(engine.reduced_bf16 * gradients / held_gradient(precision, engine)) if precision == "bf16" else 0


def held_gradient(precision: Precision, engine: Engine) -> float:
    """Bytes of an element's gradients until the step."""
    held = {"fp16": engine.held_fp16, "bf16": engine.held_bf16}.get(precision, 0.0)
    return held or MASTER_BYTES[precision]
