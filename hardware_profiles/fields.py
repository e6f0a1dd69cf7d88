"""Fields: what each number of a profile counts, and between which values it may lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hardware_profiles.errors import ProfileFormatError
from hardware_profiles.schema import Quantity
from hardware_profiles.units import UNITS, to_si


@dataclass(frozen=True, slots=True)
class Field:
    """``dimension``: a key of :data:`UNITS`; ``least``, ``most``: in its SI unit. A number whose ``least`` is 0 may be 0; what
    others divide by may not. ``whole``: whether it counts things."""

    dimension: str
    least: float
    most: float
    whole: bool = False


_BYTES = Field("bytes", 0, 1e15)
_RATE = Field("bytes/s", 1e3, 1e18)
_SHARE = Field("ratio", 1e-6, 1)
_SECONDS = Field("s", 0, 100)
_SIZE = Field("elements", 0, 1e6)
_TILE = Field("elements", 1, 1e6, whole=True)

FIELDS = {
    "memory": Field("bytes", 1e6, 1e15), "reserve": _BYTES, "memory_half": _BYTES, "half_message": _BYTES,
    "memory_bandwidth": _RATE, "bandwidth": _RATE, "peer_bandwidth": _RATE,
    "peak": Field("FLOP/s", 1e3, 1e21), "half_work": Field("FLOP", 0, 1e21),
    "maximum": _SHARE, "attention_forward": _SHARE, "attention_backward": _SHARE, "attention_portable": _SHARE,
    "memory_efficiency": _SHARE, "memory_irregular": _SHARE, "efficiency": _SHARE, "send": Field("ratio", 1e-6, 1e6),
    "half_dim": _SIZE, "attention_half_head": _SIZE, "tile": _TILE, "attention_tile": _TILE,
    "launch": _SECONDS, "hook": _SECONDS, "host": _SECONDS, "latency": _SECONDS, "start": _SECONDS,
    "functions": Field("s/element", 0, 1),
}  # fmt: skip
"""By name. The bounds are orders of magnitude beyond any machine: what lies outside is a slip of the pen, and sums of it leave
the numbers (of bytes the integers, of seconds the floats) that searches compare."""


PEAK = "chip.peak."
FUNCTIONS = "chip.functions."
"""Begin the paths of a chip's rate of a dtype and of its function."""


def in_si(path: str, quantity: Quantity, where: str = "") -> float:
    """``quantity``, which a profile has at the dotted ``path``, in its SI unit. An unknown unit raises, naming ``where``."""
    return to_si(quantity.value, quantity.unit, FIELDS[field_of(path)].dimension, where or path)


def check_quantity(path: str, quantity: Quantity, where: str) -> None:
    """Refuse a number out of its field's bounds. Raises ProfileFormatError that names ``where`` and the path."""
    field, at = FIELDS[field_of(path)], f"{where}: {path}"
    value = in_si(path, quantity, at)
    if field is _SHARE and value > 1:
        raise ProfileFormatError(at, f"{value} is above 1", "a share is between 0 and 1")
    if field.least > 0 and value <= 0:
        raise ProfileFormatError(at, f"{value} is not positive", "give a number above 0")
    if field.whole and math.isfinite(value) and value != int(value):
        raise ProfileFormatError(at, f"{value} is no whole number", "a tile is a number of elements")
    if not field.least <= value <= field.most:
        wrong = f"{quantity.value:g} {quantity.unit} is too {'small' if value < field.least else 'large'}"
        unit = next(iter(UNITS[field.dimension]))
        raise ProfileFormatError(at, wrong, f"give the number of one device, from {field.least:g} to {field.most:g} {unit}")


def field_of(path: str) -> str:
    """``chip.peak.bfloat16`` is a ``peak``, ``chip.functions.gelu`` a function; any other path ends in its field, also below
    a link that is called ``peak``."""
    if path.startswith((PEAK, FUNCTIONS)):
        return path.split(".")[1]
    return path.rpartition(".")[2]
