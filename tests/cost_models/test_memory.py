"""Bytes of the training state: the ZeRO table by hand, and torch itself."""

from __future__ import annotations

import pytest

from cost_models.memory import StateBytes, shard_elements, state_bytes, transient_bytes


@pytest.mark.parametrize(
    ("precision", "zero", "accumulates", "expected"),
    [
        ("bf16", 0, True, StateBytes(4000, 4000, 8000, 2000)),
        ("bf16", 0, False, StateBytes(4000, 4000, 8000, 2000)),
        ("bf16", 1, True, StateBytes(500, 4000, 1000, 2000)),
        ("bf16", 1, False, StateBytes(500, 500, 1000, 2000)),
        ("bf16", 2, False, StateBytes(500, 500, 1000, 2000)),
        ("bf16", 3, False, StateBytes(500, 500, 1000, 2000)),
        ("fp32", 0, True, StateBytes(4000, 4000, 8000, 4000)),
        ("fp32", 3, False, StateBytes(500, 500, 1000, 4000)),
        ("fp64", 3, False, StateBytes(1000, 1000, 2000, 8000)),
        ("fp16", 3, True, StateBytes(500, 4000, 1000, 2000)),
    ],
)
def test_the_zero_table(precision: str, zero: int, accumulates: bool, expected: StateBytes) -> None:
    assert state_bytes(1000, precision, zero, 8, accumulates=accumulates) == expected  # type: ignore[arg-type]


def test_one_rank_shards_nothing() -> None:
    for zero in range(4):
        assert state_bytes(1000, "bf16", zero, 1) == state_bytes(1000, "bf16", 0, 1)


def test_dim_0_is_padded_to_whole_shards() -> None:
    assert shard_elements((257, 8), 4) == 65 * 8
    assert shard_elements((3,), 4) == 1
    assert shard_elements((), 4) == 1
    padded = state_bytes(257 * 8, "bf16", 3, 4, shard=65 * 8, accumulates=False)
    assert padded.parameters == 4 * 65 * 8


def test_states_add_up() -> None:
    one = state_bytes(1000, "bf16", 3, 8, accumulates=False)
    assert one + one == state_bytes(2000, "bf16", 3, 8, accumulates=False)


def test_a_stage_beyond_three_is_refused() -> None:
    with pytest.raises(ValueError, match="ZeRO stage 4"):
        state_bytes(1, "bf16", 4, 1)


def test_transients_of_a_block() -> None:
    block = transient_bytes(1000, "bf16", 3, 8)
    assert (block.gather, block.gradient, block.reduce, block.step) == (2000 + 250, 2000, 4000, 500)
    whole = transient_bytes(1000, "fp32", 0, 8)
    assert (whole.gather, whole.gradient, whole.reduce, whole.step) == (0, 4000, 4000, 4000)
