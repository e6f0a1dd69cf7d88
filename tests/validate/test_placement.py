"""A row's placement is one of the options that a search looks at."""

from __future__ import annotations

import pytest

from planner.costing import Pricing
from planner.placement import place_graph
from planner.validate.prepare import prepare_row
from tests.validate import tables


@pytest.mark.slow
@pytest.mark.parametrize("split", ["True", "False"])
def test_the_divided_option_is_one_of_all(split: str) -> None:
    item = prepare_row(tables.row(n_gpus="2", tp="2", seq_parallel=split, hidden="512", ffn_hidden="2048", layers="2"))
    pricing = Pricing(item.job.cluster, 2, item.job.batch.micro)
    options = place_graph(item.counted.graph, 2, pricing)
    mine = [option for option in options if option.sequence_parallel == (split == "True")]
    least = min(mine, key=lambda option: option.state_elements)
    assert dict(item.plan.placements) == dict(least.placements)
