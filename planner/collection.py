"""Python's collection of cycles, where it costs much and frees nothing.

It walks over all objects whenever a quarter more have been made. Importing torch and tracing a model makes a million that stay
until the end: walking over them again and again is a seventh of a plan's seconds.
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


@contextlib.contextmanager
def only_new_collected() -> Iterator[None]:
    """Collect within, but walk only over what is made within."""
    enabled = gc.isenabled()
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()
        if not enabled:
            gc.disable()


def leave_at_exit() -> None:
    """Let the system take the memory back when the process ends: Python's last collection takes a second after torch."""
    atexit.register(gc.freeze)
