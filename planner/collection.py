"""Python's collection of cycles, where it costs much and frees nothing.

It walks over all objects whenever a quarter more have been made. Importing torch and tracing a model makes a million that stay
until the end: walking over them again and again is a seventh of a plan's seconds. Walking over what a search makes takes up to
as much.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Collect nothing within."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


MANY = 200_000
"""Objects that are made before new ones are walked over: a search makes a million that stay, and ten thousand in cycles."""


@contextlib.contextmanager
def only_new_collected() -> Iterator[None]:
    """Collect within, but walk only over what is made within, and seldom."""
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.freeze()
    gc.set_threshold(MANY, *thresholds[1:])
    gc.enable()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        if not enabled:
            gc.disable()


def leave_at_exit() -> None:
    """Let the system take the memory back when the process ends: Python's last collection takes a second after torch."""
    atexit.register(gc.freeze)
