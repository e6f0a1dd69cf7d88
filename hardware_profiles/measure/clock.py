"""Timing one call. On a CPU a thread's own seconds count, which no other process of the machine adds to; on CUDA, events, or
the wall clock where the host's own seconds are asked for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from .settings import Settings

Call = Callable[[], Any]

_QUEUED = 250
"""Calls that are timed together on CUDA: a call has four kernels at most, and the driver queues about a thousand."""
_LAUNCH_CYCLES = 100_000
"""Clock cycles, some 50 us, in which the host launches a call."""


def call_s(call: Call, settings: Settings) -> float:
    """Seconds of one call: the least mean of ``passes`` repeats, each of ``least_s`` at least, after a first call that counts
    for nothing."""
    once = _cuda_s if settings.device == "cuda" else _thread_s
    once(call, 1)
    first = once(call, 1)
    most = _QUEUED if settings.device == "cuda" else 2000
    count = max(1, min(most, round(settings.least_s / max(first, 1e-7))))
    return min(once(call, count) for _ in range(settings.passes))


def _thread_s(call: Call, count: int) -> float:
    start = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - start) / count


def _cuda_s(call: Call, count: int) -> float:
    """The device sleeps until the host has launched most calls: what is timed are kernels one after another, not the host."""
    import torch

    torch.cuda.synchronize()
    torch.cuda._sleep(min(count, _QUEUED) * _LAUNCH_CYCLES)  # type: ignore[no-untyped-call]
    return _cuda_busy_s(call, count)


def host_s(call: Call, settings: Settings) -> float:
    """Seconds in which the host launches one call's kernels, of which the device's queue must hold all: the median."""
    import torch

    found = []
    for _ in range(2 * settings.passes + 1):
        torch.cuda.synchronize()
        found.append(_wall_s(call, 1))
    torch.cuda.synchronize()
    return statistics.median(found[1:])


def burst_s(call: Call, settings: Settings) -> float:
    """Seconds of one call on CUDA after a rest: the least of ``passes``."""
    _cuda_s(call, 1)
    found = []
    for _ in range(settings.passes):
        time.sleep(settings.rest_s)
        found.append(_cuda_s(call, 1))
    return min(found)


def sustained_s(call: Call, settings: Settings) -> float:
    """Seconds of one call on CUDA after ``sustained_s`` of nothing else."""
    _cuda_s(call, 1)
    before = max(1, round(settings.sustained_s / _cuda_s(call, 1)))
    for _ in range(before):
        call()
    return _cuda_busy_s(call, max(1, before // 4))


def _cuda_busy_s(call: Call, count: int) -> float:
    """As :func:`_cuda_s`, without a rest before."""
    import torch

    make: Callable[..., Any] = torch.cuda.Event
    start, end = make(enable_timing=True), make(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def exchange_s(call: Call, settings: Settings, agree: Callable[[float], float]) -> float:
    """Seconds of one collective call by the wall clock (waiting is what a collective costs), on average: where ranks and their
    backend's threads share cores one in a few takes many times as long as the others, and a step makes many. The median of
    ``exchange_passes`` repeats. ``agree``: the largest of all ranks' values; it makes every rank call equally often and begins
    every repeat together."""
    once = _cuda_s if settings.device == "cuda" else _wall_s
    agree(once(call, 1))
    first = agree(once(call, 1))
    count = max(2, min(1000, round(settings.exchange_s / max(first, 1e-6))))
    found = []
    for _ in range(settings.exchange_passes):
        agree(0.0)
        found.append(once(call, count))
    return statistics.median(found)


def _wall_s(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count
