"""The picture can be read whatever the runs: ticks, names, counts."""

from __future__ import annotations

import re

import pytest

from planner.validate.picture import LEFT, SIZE, TOP, draw
from tests.validate.test_score import predicted

LABEL = re.compile(rf'<text x="([0-9.]+)" y="{TOP + SIZE + 18}" text-anchor="middle">([^<]*)</text>')


@pytest.mark.parametrize(("measured", "made", "ticks"), [
    ("3", 3.0, [2, 5]), ("2.6", 4.4, [2, 5, 10]), ("0.3", 3.0, [0.2, 0.5, 1, 2, 5]), ("0.02", 30.0, [0.1, 1, 10]),
])
def test_there_are_ticks_however_near_the_runs_are(measured: str, made: float, ticks: list[float]) -> None:
    """Between ones, twos and fives where powers of ten are few."""
    labels = LABEL.findall(draw([predicted(made, step_time_s=measured)]))
    assert [float(label) for _, label in labels] == ticks
    places = [float(x) for x, _ in labels]
    assert places == sorted(set(places)) and places[0] >= LEFT and places[-1] <= LEFT + SIZE


def test_the_longest_name_fits_with_its_count() -> None:
    """Without runs, or with short names, the picture is as wide as ever."""
    long = "my-own-engine-with-a-name-of-many-words-and-a-version-2.13"
    wide, usual, empty = (
        int(re.search(r'<svg [^>]*width="(\d+)"', drawn)[1])  # type: ignore[index]
        for drawn in (draw([predicted(1.0, engine=long), predicted(1.0)]), draw([predicted(1.0)]), draw([]))
    )
    assert usual == empty == 900
    assert wide >= 900 - 190 + 2 * 22 + 7.5 * len(f"{long} (1)")
    assert f"{long} (1)</text>" in draw([predicted(1.0, engine=long)])


def test_the_title_counts_runs_that_may_be_nobodys_but_the_users() -> None:
    assert "step time, 1 measured run</text>" in draw([predicted(1.0)])
    assert "step time, 2 measured runs</text>" in draw([predicted(1.0), predicted(2.0)])
