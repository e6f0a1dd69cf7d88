"""What is asked of a measurement, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]
Subject = Literal[
    "gemm", "attention", "attention_backward", "stream", "irregular", "function", "launch", "hook", "host", "burst",
    "sustained", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send",
]  # fmt: skip


class MeasureError(Exception):
    """A machine that cannot be measured as asked. ``where``: the option; ``wrong``; ``right``: what to do."""

    def __init__(self, where: str, wrong: str, right: str) -> None:
        self.where, self.wrong, self.right = where, wrong, right
        super().__init__(f"{where}: {wrong}; {right}")


@dataclass(frozen=True, slots=True)
class Settings:
    """``ranks``: processes that run at the same time; on a CPU each has one thread, on CUDA a GPU of its own.
    ``rounds``: times that everything is measured; ``passes``: repeats within a round; ``least_s``: seconds that one repeat
    lasts at least; ``quick``: fewer shapes."""

    ranks: int
    device: DeviceKind
    quick: bool = False

    @property
    def rounds(self) -> int:
        return 2 if self.quick else 3

    @property
    def passes(self) -> int:
        return 2 if self.quick else 3

    @property
    def least_s(self) -> float:
        if self.device == "cuda":
            return 5e-4 if self.quick else 2e-3
        return 2e-3 if self.quick else 6e-3

    @property
    def rest_s(self) -> float:
        """Seconds for which a chip rests before a burst."""
        return 0.1 if self.quick else 0.3

    @property
    def sustained_s(self) -> float:
        """Seconds that a chip works without rest before what it does then is timed: it lowers its clock within one."""
        return 0.5 if self.quick else 1.5

    @property
    def exchange_s(self) -> float:
        """Seconds that one repeat of a collective lasts at least: longer than a time slice of the system's scheduler."""
        return 0.01 if self.quick else 0.02

    @property
    def exchange_passes(self) -> int:
        return 3 if self.quick else 5


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing to time. ``sizes`` by subject:

    ``gemm``: m, n, k; ``attention``: batch, heads, queries = keys, head size, 1 where causal; ``stream``: elements of one
    tensor of three (x + y into a new one); ``irregular``: elements of a tensor of two (one of which the dims lie in another
    order, times a table); ``function``: elements; ``launch``, ``hook``, ``host``: none; ``burst``, ``sustained``: of a
    transformer block (batch, tokens, hidden, heads, inner); collectives: bytes of the input tensor on one rank, ranks of a
    group.
    """

    subject: Subject
    sizes: tuple[int, ...] = ()
    dtype: str = "float32"
    name: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """``seconds`` of one call of ``probe`` on one rank while all ranks run it, on this rank's share of the machine."""

    probe: Probe
    seconds: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured on. ``chip``: the processor's name; ``cores``: that the processes share (CPU), 0 on CUDA;
    ``memory_bytes``: of one device; ``reserve_bytes``: what a process takes before it holds a tensor."""

    chip: str
    device: DeviceKind
    ranks: int
    cores: float
    memory_bytes: int
    reserve_bytes: int
    training_dtype: str
    torch_version: str
    date: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """A machine and the median of every probe over ranks and rounds."""

    machine: Machine
    observations: tuple[Observation, ...]

    def of(self, *subjects: Subject) -> tuple[Observation, ...]:
        """The observations of some subjects, in the order they were made."""
        return tuple(item for item in self.observations if item.probe.subject in subjects)
