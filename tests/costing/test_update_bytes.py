"""What DeepSpeed's update makes beside all that is held."""

from __future__ import annotations

from hardware_profiles import engine
from planner.costing.engine_states import update_bytes

DEEPSPEED = engine("deepspeed-megatron")
ELEMENTS, RANKS = 1 << 30, 8


def test_zero_1_makes_the_shard_s_gradients_twice_and_a_bucket() -> None:
    made = update_bytes(2 * ELEMENTS, 8 * ELEMENTS // RANKS, 1, "fp16", DEEPSPEED)
    assert made == 6 * ELEMENTS // RANKS + 2 * 500_000_000


def test_bfloat16_s_float32_sums_are_copied_to_be_sent() -> None:
    assert update_bytes(6 * ELEMENTS, 8 * ELEMENTS // RANKS, 1, "bf16", DEEPSPEED) == 2 * ELEMENTS


def test_others_make_nothing() -> None:
    assert update_bytes(2 * ELEMENTS, 8 * ELEMENTS, 0, "fp16", DEEPSPEED) == 0
    assert update_bytes(4 * ELEMENTS, 8 * ELEMENTS, 1, "fp32", DEEPSPEED) == 0
    assert update_bytes(4 * ELEMENTS, 8 * ELEMENTS // RANKS, 1, "bf16", engine("megatron-core")) == 0
