"""Units become SI here, once: decimal prefixes are powers of 1000, binary ones of 1024, a bit an eighth of a byte."""

from __future__ import annotations

from collections.abc import Mapping

from hardware_profiles.errors import ProfileFormatError

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

UNITS: Mapping[str, Mapping[str, float]] = {
    "bytes": {f"{prefix}B": scale for prefix, scale in (_DECIMAL | _BINARY).items()},
    "bytes/s": {f"{prefix}B/s": scale for prefix, scale in (_DECIMAL | _BINARY).items()}
    | {f"{prefix}bit/s": scale / 8 for prefix, scale in _DECIMAL.items()},
    "FLOP/s": {f"{prefix}FLOP/s": scale for prefix, scale in _DECIMAL.items()},
    "FLOP": {f"{prefix}FLOP": scale for prefix, scale in _DECIMAL.items()},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "ratio": {"ratio": 1.0, "percent": 0.01},
    "elements": {"elements": 1.0},
    "s/element": {"s/element": 1.0, "ns/element": 1e-9},
}


def to_si(value: float, unit: str, dimension: str, where: str) -> float:
    """``value`` in the SI unit of ``dimension`` (a key of :data:`UNITS`); an unknown unit raises, naming ``where``."""
    scales = UNITS[dimension]
    if unit not in scales:
        raise ProfileFormatError(where, f"unit {unit!r} is not one of {dimension}", f"use one of {', '.join(scales)}")
    return value * scales[unit]
