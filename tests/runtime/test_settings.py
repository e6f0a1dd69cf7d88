"""A program whose numbers contradict one another is refused, in one line that names the variable."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runtime.data import BatchInput
from runtime.errors import ProgramError
from runtime.settings import MadeFor, Settings, check_settings

GOOD = Settings(
    precision="bf16", mesh={"pipeline": 2, "data": 2, "tensor": 1}, zero_group=2, total=16, micro=2, accumulation=4,
    schedule="1f1b", virtual=1, stages=[(0, 3, [0, 1, 2]), (3, 5, [3, 3])], recomputes=["", "all", "attention", "", ""],
    shared={"head.weight": (3, 4)}, sequence=32, inputs=[BatchInput("input_ids", (32,), torch.int64, "tokens", 64)],
    made_for=MadeFor(precision="bf16", tensor=1, cuts=(0, 3)), betas=(0.9, 0.95), epsilon=1e-8,
)
FOUR = [(0, 1, [0]), (1, 2, [0]), (2, 3, [0]), (3, 5, [0] * 2)]
OF_FOUR = MadeFor(precision="bf16", tensor=1, micro=2, cuts=(0, 1, 2, 3))
ONE = {"pipeline": 1, "data": 4, "tensor": 1}


def test_good_settings_pass() -> None:
    check_settings(GOOD)
    check_settings(replace(GOOD, made_for=replace(GOOD.made_for, ungathered=(0, 1, 2))))
    check_settings(replace(GOOD, schedule="gpipe", accumulation=1, micro=8))
    check_settings(replace(GOOD, schedule="interleaved-1f1b", virtual=2, stages=FOUR, made_for=OF_FOUR))
    for schedule in ("zbv", "interleaved-zero-bubble"):
        check_settings(replace(GOOD, schedule=schedule, virtual=2, stages=FOUR, made_for=OF_FOUR, recomputes=[""] * 5))


@pytest.mark.parametrize(("changes", "said"), [
    ({"precision": "fp8"}, "PRECISION: 'fp8' is unknown; one of"),
    ({"mesh": {"pipeline": 2, "dta": 2, "tensor": 1}}, "MESH: .*a positive degree of data, pipeline, tensor"),
    ({"mesh": {"pipeline": 2, "data": 0, "tensor": 1}}, "MESH: "),
    ({"shared": {"wte": {4, 0}}}, r"STAGES: blocks 0, 4 share wte and have ZeRO stages \[0, 3\]; the same for all of them"),
    ({"total": 12}, "BATCH: MICRO x ACCUMULATION x data = 16, not 12"),
    ({"total": 16.0}, r"BATCH: is 16.0; a whole number from 1 up"), ({"micro": "2"}, "MICRO: is '2'"),
    ({"accumulation": True}, "ACCUMULATION: is True"), ({"virtual": 1.0}, "VIRTUAL: is 1.0"),
    ({"zero_group": 0}, "ZERO_GROUP: is 0"),
    ({"stages": [(0, 3.0, [0, 1, 2]), (3, 5, [3, 3])]}, r"STAGES: \(0, 3.0, \[0, 1, 2\]\) is no stage; \(first block, last"),
    ({"stages": [(0, 5, 2)]}, r"STAGES: \(0, 5, 2\) is no stage"), ({"stages": [(0, 5)]}, r"STAGES: \(0, 5\) is no stage"),
    ({"stages": [(0, 3, [0, None, 2]), (3, 5, [3, 3])]}, "STAGES: .* is no stage"),
    ({"mesh": {"pipeline": 2, "data": 2, "tensor": True}}, "MESH: is {.*True}; a positive degree of"),
    ({"mesh": 4}, "MESH: is 4; a positive degree of"), ({"precision": ["bf16"]}, r"PRECISION: \['bf16'\] is unknown"),
    ({"betas": (0.9, 1.0)}, r"BETAS: is \(0.9, 1.0\); two numbers from 0 up and below 1"), ({"betas": (1.5, 0.9)}, "BETAS: is"),
    ({"betas": (0.9, None)}, "BETAS: is"), ({"betas": 0.9}, "BETAS: is 0.9"), ({"betas": (0.9, float("nan"))}, "BETAS: is"),
    ({"epsilon": -1.0}, "EPSILON: is -1.0; a positive number"), ({"epsilon": 0}, "EPSILON: is 0"),
    ({"epsilon": float("inf")}, "EPSILON: is inf"), ({"epsilon": None}, "EPSILON: is None"),
    ({"sequence": 64}, r"SEQUENCE: is 64, and model.py takes input_ids of shape \(32,\); put it back"),
    ({"sequence": "32", "inputs": ()}, "SEQUENCE: is '32'; a whole number from 0 up"), ({"sequence": -1}, "SEQUENCE: is -1; a"),
    ({"sequence": None}, "SEQUENCE: is None"), ({"sequence": 32.0}, "SEQUENCE: is 32.0"),
    ({"precision": "fp32"}, "PRECISION: is 'fp32', and model.py is made for 'bf16'; put it back, or change"),
    ({"mesh": {"pipeline": 2, "data": 1, "tensor": 2}, "zero_group": 1, "total": 8}, "MESH: tensor is 2, and model.py is made"),
    ({"stages": [(0, 2, [0, 1]), (2, 5, [3] * 3)]}, r"STAGES: begin at blocks \(0, 2\), and model.py is made for \(0, 3\)"),
    ({"made_for": MadeFor(precision="bf16", tensor=1, micro=4, cuts=(0, 3))}, "MICRO: is 2, and model.py is made for 4"),
    ({"made_for": MadeFor(precision="bf16", tensor=1, cuts=(0, 3), ungathered=(1, 4))},
     "STAGES: block 4 shares parameters with one after it whose values are only detached, and has ZeRO 3; 0, 1 or 2: torch"),
    ({"zero_group": 3}, "ZERO_GROUP: 3 does not divide data 2"),
    ({"virtual": 2}, r"STAGES: there are 2; pipeline x VIRTUAL = 4"),
    ({"stages": [(0, 3, [0, 1, 2]), (2, 5, [3] * 3)]}, r"STAGES: \(2, 5\) does not follow block 3"),
    ({"stages": [(0, 3, [0, 1, 2]), (3, 4, [3])]}, "STAGES: end at block 4; the chain has 5"),
    ({"stages": [(0, 3, [0, 1, 4]), (3, 5, [3, 3])]}, r"STAGES: ZeRO stages \[0, 1, 4\]; 3 of 0, 1, 2 or 3"),
    ({"stages": [(0, 3, [0, 1]), (3, 5, [3, 3])]}, "STAGES: ZeRO stages"),
    ({"schedule": "1F1B"}, "SCHEDULE: '1F1B' is unknown; one of gpipe"),
    ({"accumulation": 1, "micro": 8}, "SCHEDULE: 1f1b of 2 stages with 1 micro-batches"),
    ({"virtual": 2, "stages": FOUR}, "VIRTUAL: is 2; 1f1b has one stage a rank"),
    ({"schedule": "interleaved-1f1b"}, "interleaved-1f1b over 2 pipeline rank"),
    ({"schedule": "zbv"}, "2 stages at most"),
    ({"schedule": "zbv", "mesh": ONE, "micro": 1, "virtual": 2}, "zbv over 1 pipeline rank"),
    ({"schedule": "interleaved-1f1b", "virtual": 2, "stages": FOUR, "accumulation": 5, "total": 20}, "a multiple of 2"),
    ({"schedule": "interleaved-zero-bubble"}, "STAGES: ZeRO 3; 0, 1 or 2: interleaved-zero-bubble parts the backward pass"),
    ({"schedule": "zbv", "virtual": 2, "stages": FOUR}, "zbv with blocks that recompute; no recomputation"),
])
def test_a_contradiction_is_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ProgramError, match=said) as caught:
        check_settings(replace(GOOD, **changes))  # type: ignore[arg-type]
    assert str(caught.value).startswith("train.py: ") and "\n" not in str(caught.value)
