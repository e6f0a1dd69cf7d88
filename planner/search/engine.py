"""The engine that plans are made for."""

from __future__ import annotations

from hardware_profiles import Engine, engine

ENGINE = "torch-eager"


def planning_engine() -> Engine:
    """Its behaviour."""
    return engine(ENGINE)
