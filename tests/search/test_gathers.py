"""Blocks that share parameters and end in values that are only detached: torch gathers nothing for their backward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.consistency import check_consistency
from planner.ir.errors import PlanFileError
from planner.ir.plan import BlockDecision
from planner.trace import load_model, trace_model
from tests.commands import run
from tests.matrix.build import Row, make_plan
from tests.search.test_strands import MODELS, graph_of

BARE = """
import torch
from torch import nn
from torch.nn import functional as F
from tests.matrix.models import Average

class Bare(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.layers = nn.ModuleList(Average(16) for _ in range(3))
        self.read = nn.Linear(16, 16) if read else nn.Identity()

    def encoded(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, seen, hidden):
        seen, target = self.encoded(seen), self.encoded(hidden)
        return 1 - F.cosine_similarity(seen, self.read(target.detach()), dim=-1).mean(1)

def make(read: bool = False):
    return Bare(read)

def example_inputs(batch, seq):
    return {"seen": torch.zeros(batch, seq, 16), "hidden": torch.zeros(batch, seq, 16)}

def loss(outputs, batch):
    return outputs.mean()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "whole", "parted"), [
    ("settled", False, True), ("stopped", False, False), ("paired", False, False), ("distilled", True, True),
])
def test_which_blocks_are_not_gathered(model: str, whole: bool, parted: bool) -> None:
    """Cuts can take the block away whose values get a gradient."""
    graph = graph_of(model)
    assert (bool(graph.gradients.ungathered_whole), bool(graph.gradients.ungathered_somewhere)) == (whole, parted)


@pytest.mark.slow
@pytest.mark.parametrize("read", [False, True])
def test_a_target_that_only_a_loss_detaches(read: bool, tmp_path: Path) -> None:
    """What detaches it decides: a block with parameters is handed zeros back for it."""
    (tmp_path / "bare.py").write_text(BARE)
    graph = trace_model(load_model(f"{tmp_path / 'bare.py'}:make", {"read": read}, None), sequence=8, dtype="float32")
    assert graph.gradients.ungathered_whole == (frozenset() if read else {0, 1})


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--pin", "tensor=1"], ["--pin", "data=1", "--pin", "pipeline=2"]])
@pytest.mark.parametrize("pin", ["zero=3", "zero>=3", "repeat.*: zero=3"])
def test_a_pin_of_zero_3_is_refused_by_its_name(pin: str, more: list[str], tmp_path: Path) -> None:
    """Whatever else is pinned, and with the blocks that cannot have it."""
    refused = run(
        "plan", f"{MODELS}:distilled", "--cluster", "local-cpu:1x2", "--batch", "4", "--seq", "24", "--pin", pin, *more,
        "-o", tmp_path / "plan.yaml",
    )
    assert refused.code == 2
    assert "--pin zero: zero=3 is not possible for" in refused.err and "so torch gathers none for their backward" in refused.err


@pytest.mark.slow
def test_no_plan_has_them_under_zero_3() -> None:
    graph = graph_of("distilled")
    plan = make_plan(graph, Row(data=2, zero=2, accumulation=2))
    check_consistency(plan, graph, "plan.yaml")
    stages = tuple(
        replace(stage, decisions=tuple(BlockDecision(3, decision.recompute) for decision in stage.decisions))
        for stage in plan.stages
    )
    with pytest.raises(PlanFileError, match="only detached, and torch gathers none of them"):
        check_consistency(replace(plan, stages=stages), graph, "plan.yaml")
