"""Units are parsed strictly and become SI once."""

from __future__ import annotations

import pytest

from hardware_profiles.errors import ProfileFormatError
from hardware_profiles.units import to_si


@pytest.mark.parametrize(
    ("value", "unit", "dimension", "expected"),
    [
        (80, "GB", "bytes", 80e9),
        (80, "GiB", "bytes", 80 * 2**30),
        (3.35, "TB/s", "bytes/s", 3.35e12),
        (400, "Gbit/s", "bytes/s", 50e9),
        (989, "TFLOP/s", "FLOP/s", 989e12),
        (2, "GFLOP", "FLOP", 2e9),
        (5, "us", "s", 5e-6),
        (76, "percent", "ratio", 0.76),
    ],
)
def test_units_become_si(value: float, unit: str, dimension: str, expected: float) -> None:
    assert to_si(value, unit, dimension, "here") == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(("unit", "dimension"), [("gb", "bytes"), ("GB", "bytes/s"), ("TFLOPS", "FLOP/s"), ("", "s")])
def test_an_unknown_unit_lists_the_known_ones(unit: str, dimension: str) -> None:
    with pytest.raises(ProfileFormatError, match=r"here: unit .* use one of"):
        to_si(1, unit, dimension, "here")
