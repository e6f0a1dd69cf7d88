"""Traffic beside compute."""

from __future__ import annotations

import pytest

from cost_models.overlap import NO_OVERLAP, Overlap


def test_without_overlap_all_traffic_is_waited_for() -> None:
    assert NO_OVERLAP.exposed_s(10.0, 3.0) == 3.0


@pytest.mark.parametrize(("compute_s", "exposed_s"), [(0.0, 4.0), (2.0, 3.0), (6.0, 1.0), (100.0, 1.0)])
def test_compute_hides_traffic_down_to_the_floor(compute_s: float, exposed_s: float) -> None:
    assert Overlap(hidden=0.5, floor=0.25).exposed_s(compute_s, 4.0) == exposed_s


@pytest.mark.parametrize("bad", [{"hidden": 1.5}, {"floor": -0.1}])
def test_parts_beyond_the_whole_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must lie in 0 to 1"):
        Overlap(**bad)
