"""What a rank lets go of has arrived, under every schedule with several stages a rank; program and plan say the same."""

from __future__ import annotations

import pytest

from cost_models import sends as planned
from cost_models.schedules import Orders, actions, rank_of_stage
from runtime.sends import Event, events_of, releases
from tests.runtime.test_receives import SHAPES, ordered


def event(action: object) -> Event:
    kind, stage, microbatch = action.kind, action.stage, action.microbatch  # type: ignore[attr-defined]
    return "B" if kind == "I" else kind, stage, microbatch


def arrived(orders: Orders, name: str, pipeline: int, silent: frozenset[int]) -> list[dict[Event, set[Event]]]:
    """By rank and pass, all passes anywhere that are certainly over when it begins: by the order of each rank and by what it
    received, followed through all ranks. No gradient comes back to ``silent`` stages."""
    stages = 1 + max(action.stage for order in orders for action in order)
    known: list[dict[Event, set[Event]]] = [{} for _ in orders]
    seen: list[set[Event]] = [set() for _ in orders]
    done: dict[Event, set[Event]] = {}
    at = [0] * len(orders)
    while any(at[rank] < len(order) for rank, order in enumerate(orders)):
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                now = event(order[at[rank]])
                kind, stage, microbatch = now
                source = {"F": stage - 1, "B": stage + 1, "W": stage}[kind]
                needs = (kind, source, microbatch)
                if kind != "W" and 0 <= source < stages and not (kind == "B" and stage in silent):
                    if needs not in done:
                        break
                    if rank_of_stage(name, pipeline, source) != rank:
                        seen[rank] |= done[needs]
                known[rank][now] = set(seen[rank])
                seen[rank].add(now)
                done[now] = set(seen[rank])
                at[rank] += 1
                moved = True
        assert moved
    return known


SMALL = [shape for shape in SHAPES if shape[1] <= 4 and shape[3] <= 9]


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_what_is_let_go_has_been_read_and_is_not_needed(shape: tuple[str, int, int, int], frozen: int) -> None:
    """Also where nothing is trained in the first stages: their backward passes begin before those behind them end."""
    name, pipeline, *_ = shape
    orders, silent = actions(*shape), frozenset(range(frozen))
    known = arrived(orders, name, pipeline, silent)
    for rank, table in enumerate(planned.releases(*shape, silent)):
        for when, sent in table.items():
            for gone in map(event, sent):
                kind, stage, microbatch = gone
                reader = kind, stage + (1 if kind == "F" else -1), microbatch
                assert reader in known[rank][event(when)], f"{gone} may be on its way at {when}"
                own = known[rank][event(when)]
                last = ("W" if any(action.kind == "W" for action in orders[rank]) else "B", stage, microbatch)
                assert last in own, f"{gone} may be kept by autograd at {when}"


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zero-bubble", "zbv"])
def test_a_program_lets_go_when_the_plan_says(name: str, frozen: int) -> None:
    silent = frozenset(range(frozen))
    for shape in (shape for shape in SHAPES if shape[0] == name):
        orders = {rank: events_of(order) for rank, order in ordered(*shape).items()}
        for rank, table in enumerate(planned.releases(*shape, silent)):
            said = {event(when): tuple(map(event, sent)) for when, sent in table.items()}
            assert releases(orders, rank, silent) == said, (shape, rank)


def test_little_of_a_long_step_is_kept() -> None:
    """Of 8 ranks of 4 stages and 32 micro-batches: all activations, and all gradients but those of the last micro-batches."""
    tables = planned.releases("interleaved-1f1b", 8, 4, 32)
    sent = [sum(1 for order in table.values() for action in order) for table in tables]
    assert all(count >= 2 * 4 * 32 - 70 for count in sent[1:-1]), sent
