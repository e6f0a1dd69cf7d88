"""The replay of a rank's step as bytes: what it remembers of passes is what they do."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from random import Random

import pytest

from planner.evaluate.heap import CATEGORIES, STREAMS, Heap
from planner.evaluate.replay import replay
from planner.evaluate.stage_replay import StageReplay
from tests.costing.test_ledger_memory import graph_of
from tests.matrix.build import make_plan
from tests.matrix.test_matrix import ROWS


def acts(random: Random) -> Callable[[Heap], None]:
    """Some things that are made and freed, never more than 40 bytes of a category."""
    made = [
        (random.choice(CATEGORIES), random.randint(-4, 4), random.choice(STREAMS), random.random() < 0.3)
        for _ in range(random.randint(0, 10))
    ]

    def act(heap: Heap) -> None:
        for category, size, stream, passing in made:
            if passing:
                heap.passing(**{category: abs(size)})
            else:
                heap.add(category, size, stream)

    return act


@pytest.mark.parametrize("seed", range(40))
def test_an_effect_is_what_happens(seed: int) -> None:
    random = Random(seed)
    direct, told = Heap(), Heap()
    for heap in (direct, told):
        for category in CATEGORIES:
            heap.add(category, 1000)
    for _ in range(20):
        act = acts(random)
        before = deepcopy(vars(told))
        effect = told.effect(lambda act=act: act(told))  # type: ignore[misc]
        assert vars(told) == before
        act(direct)
        told.have(effect)
        assert vars(told) == vars(direct)
        held, turns = random.randint(0, 3), random.random() < 0.2
        for heap in (direct, told):
            heap.held = held
            if turns:
                heap.turn()


def test_what_was_never_made_is_not_freed() -> None:
    roomy, heap = Heap(), Heap()
    roomy.add("gradients", 8)
    effect = roomy.effect(lambda: roomy.add("gradients", -8))
    heap.add("gradients", 7)
    with pytest.raises(AssertionError, match="1 bytes of gradients are freed"):
        heap.have(effect)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_passes_that_are_remembered_are_those_that_run(monkeypatch: pytest.MonkeyPatch, model: str, precision: str) -> None:
    graph = graph_of(model, precision)
    plans = [make_plan(graph, row, precision=precision) for row in ROWS if row.tensor == 1]
    remembered = [replay(plan, graph, rank) for plan in plans for rank in range(plan.mesh.pipeline)]
    runs = list[object]()

    def run_each(self: StageReplay, kind: object, run: Callable[[], None]) -> None:
        runs.append(kind)
        run()

    monkeypatch.setattr(StageReplay, "_pass", run_each)
    assert [replay(plan, graph, rank) for plan in plans for rank in range(plan.mesh.pipeline)] == remembered
    assert {kind[0] for kind in runs} == {"forward", "full", "input", "weight"}  # type: ignore[index]
