"""The simulated step: hand-drawn grids, closed forms, an independent event simulation, and cuts that bound."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import pipeline as pipeline_of
from cost_models.live import LIVE, in_flight, instants
from cost_models.pipeline import NOTHING, StageTimes, Timeline, _depths, actions_of, is_long, lengths, simulate
from cost_models.schedules import SCHEDULES, actions, legal, rank_of_stage, stages_of_rank

UNIT = StageTimes(forward_s=1, input_gradient_s=1, weight_gradient_s=1)
CASES = [case for case in product(SCHEDULES, (1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 6, 8, 9)) if legal(*case) is None]


def equal(name: str, pipeline: int, virtual: int, microbatches: int, times: StageTimes = UNIT) -> Timeline:
    stages = pipeline * virtual
    return simulate(name, pipeline, virtual, microbatches, [times] * stages, [0.0] * stages)


def drawn(timeline: Timeline, rank: int, width: int) -> str:
    """One character a second: F, B, I, W or a dot while the rank idles."""
    cells = ["."] * width
    for event in timeline.events:
        if event.rank == rank:
            for second in range(round(event.start_s), round(event.end_s)):
                cells[second] = event.action.kind
    return "".join(cells)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_number_of_actions(case: tuple[str, int, int, int]) -> None:
    assert actions_of(*case) == sum(map(len, actions(*case)))


def test_the_grid_of_1f1b() -> None:
    """Narayanan 2021, figure 4: 2 ranks, 3 micro-batches, backward twice as long as forward."""
    timeline = equal("1f1b", 2, 1, 3)
    assert timeline.total_s == 12
    assert drawn(timeline, 0, 12) == "FF..BBFBB.BB"
    assert drawn(timeline, 1, 12) == ".FBBFBBFBB.."


def test_the_grid_of_gpipe() -> None:
    """Huang 2019, figure 2."""
    timeline = equal("gpipe", 2, 1, 3)
    assert drawn(timeline, 0, 12) == "FFF...BBBBBB"
    assert drawn(timeline, 1, 12) == ".FFFBBBBBB.."


def test_the_grid_of_zero_bubble() -> None:
    """Qi 2023, figure 3 (ZB-H1 on 2 ranks): the weight gradients of the second rank come one backward late."""
    timeline = equal("interleaved-zero-bubble", 2, 1, 3)
    assert drawn(timeline, 0, timeline.total_s.__ceil__()) == "FF.IWFIWIW"
    assert drawn(timeline, 1, timeline.total_s.__ceil__()) == ".FIFIWFIWW"


@pytest.mark.parametrize(("pipeline", "microbatches"), [(1, 1), (2, 2), (4, 4), (4, 16), (8, 9)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_meet_their_closed_form(name: str, pipeline: int, microbatches: int) -> None:
    times = StageTimes(1.0, 1.5, 0.5)
    total = equal(name, pipeline, 1, microbatches, times).total_s
    assert total == pytest.approx((microbatches + pipeline - 1) * 3.0)


@pytest.mark.parametrize(("pipeline", "virtual", "rounds"), [(2, 2, 2), (4, 2, 2), (4, 3, 4), (8, 2, 1)])
def test_interleaving_divides_the_bubble(pipeline: int, virtual: int, rounds: int) -> None:
    """Narayanan 2021, section 2.2: the bubble is (pipeline - 1) (forward + backward) / virtual of a rank's stages."""
    timeline = equal("interleaved-1f1b", pipeline, virtual, pipeline * rounds)
    assert timeline.total_s == pytest.approx(virtual * pipeline * rounds * 3 + (pipeline - 1) * 3)


@pytest.mark.parametrize("pipeline", [2, 4, 8])
def test_zbv_has_only_its_fill(pipeline: int) -> None:
    """Qi 2023, section 6: with equal times the ranks wait pipeline - 1 forwards, never again."""
    microbatches = 3 * pipeline
    assert equal("zbv", pipeline, 2, microbatches).total_s == 2 * 3 * microbatches + pipeline - 1


def slow_simulation(case: tuple[str, int, int, int], times: Sequence[StageTimes], send_s: Sequence[float]) -> float:
    """Another way to the total: relax every start until nothing moves."""
    name, pipeline, virtual, _ = case
    orders = actions(*case)
    last = pipeline * virtual - 1
    kinds = {"F": "forward_s", "I": "input_gradient_s", "W": "weight_gradient_s"}

    def length(kind: str, stage: int) -> float:
        one = times[stage]
        return one.input_gradient_s + one.weight_gradient_s if kind == "B" else float(getattr(one, kinds[kind]))

    def arrives(kind: str, stage: int, index: int, neighbour: int, cut: int) -> float:
        same = rank_of_stage(name, pipeline, stage) == rank_of_stage(name, pipeline, neighbour)
        return ends.get((kind, neighbour, index), 0.0) + (0.0 if same else send_s[cut])

    ends: dict[tuple[str, int, int], float] = {}
    moved = True
    while moved:
        moved = False
        for order in orders:
            clock = 0.0
            for action in order:
                kind, stage, index = action.kind, action.stage, action.microbatch
                if kind == "F" and stage > 0:
                    clock = max(clock, arrives("F", stage, index, stage - 1, stage))
                if kind in "BI" and stage < last:
                    clock = max(clock, arrives(kind, stage, index, stage + 1, stage + 1))
                clock += length(kind, stage)
                if ends.get((kind, stage, index)) != clock:
                    ends[kind, stage, index] = clock
                    moved = True
    return max(ends.values())


SECONDS = st.floats(0.01, 10)


@st.composite
def timed_cases(draw: st.DrawFn) -> tuple[tuple[str, int, int, int], list[StageTimes], list[float]]:
    case = draw(st.sampled_from(CASES))
    stages = case[1] * case[2]
    times = [StageTimes(draw(SECONDS), draw(SECONDS), draw(SECONDS)) for _ in range(stages)]
    return case, times, [draw(SECONDS) for _ in range(stages)]


@given(timed_cases())
def test_two_simulations_agree(drawn_case: tuple[tuple[str, int, int, int], list[StageTimes], list[float]]) -> None:
    case, times, sends = drawn_case
    assert simulate(*case, times, sends).total_s == pytest.approx(slow_simulation(case, times, sends))


@given(timed_cases())
def test_the_critical_path_is_the_step(
    drawn_case: tuple[tuple[str, int, int, int], list[StageTimes], list[float]],
) -> None:
    case, times, sends = drawn_case
    timeline = simulate(*case, times, sends)
    assert timeline.critical_path.seconds(times, sends) == pytest.approx(timeline.total_s)
    assert timeline.critical_path.transfers[0] == 0


@pytest.mark.slow
@given(timed_cases(), st.integers(0, 11), SECONDS)
def test_a_critical_path_bounds_every_other_step(
    drawn_case: tuple[tuple[str, int, int, int], list[StageTimes], list[float]], slot: int, seconds: float
) -> None:
    case, times, sends = drawn_case
    cut = simulate(*case, times, sends).critical_path
    other = list(times)
    other[slot % len(times)] = StageTimes(seconds, seconds / 2, seconds * 2)
    assert cut.seconds(other, sends) <= simulate(*case, other, sends).total_s * (1 + 1e-9)


@pytest.mark.slow
@given(timed_cases(), st.integers(0, 11))
def test_a_slower_stage_never_speeds_the_step(
    drawn_case: tuple[tuple[str, int, int, int], list[StageTimes], list[float]], slot: int
) -> None:
    case, times, sends = drawn_case
    slower = list(times)
    old = slower[slot % len(times)]
    slower[slot % len(times)] = StageTimes(old.forward_s + 1, old.input_gradient_s, old.weight_gradient_s)
    assert simulate(*case, slower, sends).total_s >= simulate(*case, times, sends).total_s


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("case", [
    ("gpipe", 2, 1), ("1f1b", 3, 1), ("interleaved-1f1b", 2, 2), ("interleaved-zero-bubble", 3, 2), ("zbv", 2, 2),
    ("1f1b", 1, 1),
])
def test_a_long_schedule_is_known_from_shorter_ones(
    case: tuple[str, int, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly, and never too slow: stages that are nearly as slow as the slowest take over late."""
    draw = np.random.default_rng(seed)
    timetable, stages = (*case, 600), case[1] * case[2]
    times = [StageTimes(*each) for each in draw.uniform(0.1, 1, (stages, 3))]
    sends = draw.uniform(0, 0.2, stages)
    whole = simulate(*timetable, times, sends)
    monkeypatch.setattr(pipeline_of, "LONG", 100)
    monkeypatch.setattr(pipeline_of, "LONG_ALONE", 100)
    monkeypatch.setattr(pipeline_of, "ENOUGH", 200)
    known = simulate(*timetable, times, sends)
    assert is_long(*timetable) and not known.ends_s
    assert whole.total_s * (1 - 2e-3) <= known.total_s <= whole.total_s * (1 + 1e-9)
    assert known.busy_s == pytest.approx(whole.busy_s) and known.timetable == whole.timetable
    columns = np.array([[[each.forward_s, each.input_gradient_s, each.weight_gradient_s] for each in times]])
    assert lengths(*timetable, columns, sends) == pytest.approx(known.total_s, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("case", [("1f1b", 1, 1), ("gpipe", 4, 1), ("1f1b", 4, 1)])
def test_a_billion_micro_batches(case: tuple[str, int, int]) -> None:
    """Equal stages, as in the closed form."""
    timeline = simulate(*case, 10**9, [UNIT] * case[1], [0.0] * case[1])
    assert timeline.total_s == pytest.approx(3 * (10**9 + case[1] - 1), rel=1e-12) and not list(timeline.events)


@given(timed_cases())
def test_busy_and_idle_fill_the_step(
    drawn_case: tuple[tuple[str, int, int, int], list[StageTimes], list[float]],
) -> None:
    case, times, sends = drawn_case
    timeline = simulate(*case, times, sends)
    for rank, (busy, idle) in enumerate(zip(timeline.busy_s, timeline.idle_s, strict=True)):
        stages = stages_of_rank(case[0], case[1], case[2], rank)
        work = sum(times[k].forward_s + times[k].input_gradient_s + times[k].weight_gradient_s for k in stages)
        assert busy == pytest.approx(case[3] * work)
        assert idle >= -1e-9 * timeline.total_s
    last: dict[int, float] = {}
    for event in timeline.events:
        assert event.start_s >= last.get(event.rank, 0.0) - 1e-9
        last[event.rank] = event.end_s
    assert max(last.values()) == timeline.total_s


def test_transfers_count_only_between_ranks() -> None:
    alone = simulate("zbv", 2, 2, 4, [UNIT] * 4, [9.0, 0.0, 5.0, 0.0])
    assert alone.total_s == equal("zbv", 2, 2, 4).total_s
    assert simulate("gpipe", 2, 1, 1, [UNIT] * 2, [0.0, 5.0]).total_s == 3 + 3 + 5 + 5


def test_the_right_number_of_times_is_required() -> None:
    with pytest.raises(ValueError, match="4 virtual stages need as many times"):
        simulate("zbv", 2, 2, 4, [UNIT] * 3, [0.0] * 4)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (("gpipe", 3, 1, 5), (5, 5, 5)),
        (("1f1b", 4, 1, 8), (4, 3, 2, 1)),
        (("zbv", 4, 2, 12), (8, 8, 8, 8)),
        (("interleaved-1f1b", 4, 2, 8), (11, 9, 7, 5)),
    ],
)
def test_what_is_kept_alive(case: tuple[str, int, int, int], expected: tuple[int, ...]) -> None:
    """1F1B keeps pipeline - rank micro-batches (Narayanan 2021, section 2.2.1); zbv keeps as much on every rank as
    1F1B does on its first (2 x pipeline half-sized stages; Qi 2023, section 6)."""
    assert in_flight(*case) == expected


@pytest.mark.parametrize("case", CASES)
def test_instants_have_the_peaks_for_any_sizes(case: tuple[str, int, int, int]) -> None:
    for rank, (order, found) in enumerate(zip(actions(*case), instants(*case), strict=True)):
        stages = stages_of_rank(case[0], case[1], case[2], rank)
        for sizes in ([1] * len(stages), range(1, len(stages) + 1), range(len(stages), 0, -1)):
            weight = dict(zip(stages, sizes, strict=True))
            live = peak = 0
            for action in order:
                live += weight[action.stage] if action.kind == "F" else 0
                peak = max(peak, live)
                live -= weight[action.stage] if action.kind in "BW" else 0
            assert live == 0
            assert peak == (found[:, LIVE] @ np.array(sizes)).max()


@pytest.mark.slow
def test_a_large_pipeline_is_simulated_alike() -> None:
    equal("1f1b", 64, 1, 512)


def test_ranks_that_wait_for_each_other_are_no_schedule() -> None:
    """Two ranks of two actions, each of whose first waits for the other's second; without that, three waves."""
    starts, ends = np.array([0, 2]), np.array([2, 4])
    assert _depths(starts, ends, np.array([3, NOTHING, 1, NOTHING])) is None
    found = _depths(starts, ends, np.array([NOTHING, NOTHING, 0, NOTHING]))
    assert found is not None and found.tolist() == [1, 2, 2, 3]
