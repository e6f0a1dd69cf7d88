"""Measuring the machine that this runs on into a hardware profile: every number of kind ``measured``.

Processes of one thread each (on CUDA: one a GPU) time the same probes at the same time, so that what they share is shared as
in training. torch is imported in those processes only. All but :mod:`~hardware_profiles.measure.document`, which writes the
profile, needs torch and the standard library alone, and may be copied to a machine that has nothing else.
"""

from .machine import PROCESS_BYTES, accelerators, memory_bytes, most_processes, usable_cores
from .pool import measure
from .settings import Machine, MeasureError, Measurement, Observation, Probe, Settings

__all__ = [
    "PROCESS_BYTES", "Machine", "MeasureError", "Measurement", "Observation", "Probe", "Settings", "accelerators", "measure",
    "memory_bytes", "most_processes", "usable_cores",
]  # fmt: skip
