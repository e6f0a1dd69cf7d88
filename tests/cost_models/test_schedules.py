"""The orders of actions are torch's own."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from cost_models.schedules import SCHEDULES, Action, actions, legal, rank_of_stage, stages_of_rank

INTERLEAVED = {
    "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
}
SINGLE = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}
COMPUTE = re.compile(r"\d+[FBIW]\d+")
GRID = tuple(product((2, 3, 4, 5), (1, 2, 3), range(1, 14)))


def fake_stage(index: int, pipeline: int, stages: int) -> MagicMock:
    stage = MagicMock(spec=_PipelineStageBase)
    stage.stage_index, stage.group_size, stage.group_rank, stage.num_stages = index, pipeline, 0, stages
    stage.is_first, stage.is_last, stage.has_backward = index == 0, index == stages - 1, True
    stage.submod = MagicMock()
    stage.submod.modules.return_value = []
    return stage


def executed(name: str, rank: int, pipeline: int, microbatches: int) -> list[str]:
    """What a single-stage schedule really calls (its ``_get_pipeline_order`` misnumbers 1F1B's last rank)."""
    stage: Any = fake_stage(rank, pipeline, pipeline)
    called: list[str] = []
    stage.forward_one_chunk.side_effect = lambda index, *_, **__: called.append(f"{rank}F{index}")
    stage.backward_one_chunk.side_effect = lambda index, **_: called.append(f"{rank}B{index}")
    for operations in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, operations).return_value = []
    schedule = SINGLE[name](stage, microbatches)
    with patch.object(schedule, "_initialize_stage"):
        schedule._step_microbatches()
    return called


def torch_orders(name: str, pipeline: int, virtual: int, microbatches: int) -> list[list[str]]:
    """What torch executes on each rank, computation only."""
    if name in SINGLE:
        return [executed(name, rank, pipeline, microbatches) for rank in range(pipeline)]
    mine = stages_of_rank(name, pipeline, virtual, 0)
    stages: list[Any] = [fake_stage(index, pipeline, pipeline * virtual) for index in mine]
    order = INTERLEAVED[name](stages, microbatches).pipeline_order_with_comms
    return [[str(cell) for cell in order[rank] if COMPUTE.fullmatch(str(cell))] for rank in range(pipeline)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_order_is_torchs(name: str) -> None:
    compared = 0
    for pipeline, virtual, microbatches in GRID:
        if legal(name, pipeline, virtual, microbatches) is None:
            ours = actions(name, pipeline, virtual, microbatches)
            theirs = torch_orders(name, pipeline, virtual, microbatches)
            assert [[str(action) for action in order] for order in ours] == theirs, (pipeline, virtual, microbatches)
            compared += 1
    assert compared > 30


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_runs_every_microbatch_once(name: str) -> None:
    for pipeline, virtual, microbatches in GRID:
        if legal(name, pipeline, virtual, microbatches) is not None:
            continue
        counts = Counter(action for order in actions(name, pipeline, virtual, microbatches) for action in order)
        backward = "B" if name in ("gpipe", "1f1b", "interleaved-1f1b") else "IW"
        assert counts == Counter(
            Action(kind, stage, index)  # type: ignore[arg-type]
            for kind in "F" + backward
            for stage in range(pipeline * virtual)
            for index in range(microbatches)
        )


def test_the_hand_drawn_orders() -> None:
    """Narayanan 2021, figure 4: 1F1B on 3 ranks; torch's text."""
    drawn = [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert [" ".join(map(str, order)) for order in actions("1f1b", 3, 1, 4)] == drawn


def test_stages_go_round_or_down_and_up() -> None:
    assert stages_of_rank("interleaved-1f1b", 4, 2, 1) == (1, 5)
    assert stages_of_rank("zbv", 4, 2, 1) == (1, 6)
    assert [rank_of_stage("zbv", 3, stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("name", "pipeline", "virtual", "microbatches", "says"),
    [
        ("zigzag", 2, 1, 4, "unknown; use one of gpipe"),
        ("gpipe", 2, 2, 4, "one stage a rank"),
        ("1f1b", 4, 1, 3, "3 < 4"),
        ("1f1b", 0, 1, 3, "at least 1"),
        ("zbv", 2, 1, 4, "exactly two stages"),
        ("zbv", 1, 2, 4, "at least 2 pipeline ranks"),
        ("interleaved-1f1b", 2, 1, 4, "at least two stages"),
        ("interleaved-1f1b", 4, 2, 9, "9 is no multiple of 2"),
        ("interleaved-zero-bubble", 2, 2, 7, "7 is no multiple of 3"),
    ],
)
def test_what_torch_cannot_run_is_refused_with_a_reason(
    name: str, pipeline: int, virtual: int, microbatches: int, says: str
) -> None:
    reason = legal(name, pipeline, virtual, microbatches)
    assert reason is not None and says in reason
    with pytest.raises(ValueError, match=says):
        actions(name, pipeline, virtual, microbatches)
