"""What a step reports: a line for people, a line of JSON for tools."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .errors import unwritable


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step. ``loss``: mean over the weighted terms; ``step_s``: seconds; ``memory_bytes``: this rank's peak."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    step_s: float
    tokens_per_s: float
    mfu: float
    memory_bytes: int

    def line(self, steps: int, batch: int) -> str:
        """The progress line; ``batch``: samples a step, told where they are no sequences of tokens."""
        rate = f"{self.tokens_per_s:,.0f} tokens/s" if self.tokens_per_s else f"{batch / self.step_s:,.0f} samples/s"
        return (
            f"step {self.step}/{steps}  loss {self.loss:.6f}  grad norm {self.grad_norm:.4f}  lr {self.lr:.2e}  "
            f"{self.step_s:.3f} s  {rate}  MFU {self.mfu:.1%}  "
            f"{self.memory_bytes / 2**30:.2f} GiB"
        )


def say(line: str) -> None:
    """Print a line. Raises ProgramError where standard output cannot be written to."""
    try:
        print(line, flush=True)
    except OSError as cause:
        raise unwritable("standard output", cause) from None


def append(path: Path, report: StepReport) -> None:
    """Add one JSON line to a file, flushed. What is not finite (the norm of a step that overflowed) is ``null``.

    Raises ProgramError where the file cannot be written; then nothing of the line is in it.
    """
    finite = {name: value if math.isfinite(value) else None for name, value in asdict(report).items()}
    kept = path.stat().st_size if path.is_file() else 0
    try:
        begin = "" if _ends_a_line(path, kept) else "\n"
        with path.open("a") as file:
            file.write(f"{begin}{json.dumps(finite)}\n")
    except OSError as cause:
        with contextlib.suppress(OSError):  # The file may not be there, or be a pipe.
            os.truncate(path, kept)
        raise unwritable(path, cause) from None


def _ends_a_line(path: Path, size: int) -> bool:
    """Whether what is appended begins a line: a machine that went down may have left a part of one."""
    if not size:
        return True
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) == b"\n"


def peak_memory_bytes(device: torch.device) -> int:
    """The accelerator memory that tensors took at most, or the process's largest resident set where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, ValueError):  # Not every system has the file, or the line.
        # What getrusage counts is on Linux handed on to a program by whoever starts it: a large notebook, say.
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        (most,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(most) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
