"""What the system says of the machine: its processor, its cores, its memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path

PROCESS_BYTES = 1 << 29
"""Of a process that measures: 260 MiB once it has joined its group, and its tensors (the operands of its products)."""
_GROUP = Path("/sys/fs/cgroup")


def processor_name() -> str:
    """The processor's name, of /proc/cpuinfo where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = dict(_pair(line) for line in lines)
    name = fields.get("model name") or platform.processor() or platform.machine()
    kind = ", ".join(f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields)
    return f"{name} ({kind})" if kind else name


def _pair(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip(), value.strip()


def usable_cores() -> float:
    """Cores that the processes share: those they may run on, less where a control group's quota allows less."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota = _words(_GROUP / "cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


def most_processes() -> int:
    """That measure at the same time: as many as there is memory for, and one on every core wherever that is more."""
    return max(int(usable_cores()), memory_bytes() // PROCESS_BYTES)


def accelerators() -> int:
    """CUDA devices that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def memory_bytes() -> int:
    """Main memory, less where a control group allows less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _words(_GROUP / "memory.max")
    return min(total, int(limit[0])) if limit and limit[0] != "max" else total


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
