"""Chip: what one accelerator (or one CPU process) can do, in SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hardware_profiles.errors import ProfileFormatError


@dataclass(frozen=True, slots=True)
class EfficiencyCurve:
    """Share of the peak rate that a matrix product reaches; it grows with the work and saturates.

    ``efficiency = maximum / (1 + half_dim / smallest + half_work / flops)``

    ``maximum``: the ceiling for large products; ``half_work_flops``: work at which filling and draining the chip costs
    as much as the work; ``half_dim``: size of the smallest dimension whose prologue costs as much as the work;
    ``tile``: rows and columns are computed in whole tiles. So the time is affine in the work:
    ``(flops * (1 + half_dim / smallest) + half_work) / (peak * maximum)``, which no larger dimension can shorten.
    """

    maximum: float
    half_work_flops: float
    half_dim: float
    tile: int

    def __call__(self, flops: float, smallest: float) -> float:
        """Efficiency in (0, maximum] of a call of ``flops`` > 0 whose smallest dimension is ``smallest`` > 0
        elements."""
        return self.maximum / (1 + self.half_dim / smallest + self.half_work_flops / flops)


@dataclass(frozen=True, slots=True)
class Chip:
    """One accelerator. Bytes, bytes/s, FLOP/s (dense) and seconds; dtypes by torch's names.

    ``attention_forward``, ``attention_backward``: share of the peak that the best fused attention reaches with heads of 128;
    ``attention_portable``: what a kernel without the chip's newest instructions reaches of that; ``memory_efficiency`` and
    ``memory_half_bytes``: share of the memory bandwidth that a streaming kernel reaches, and the bytes at half of it;
    ``memory_irregular``: share of that which element-wise kernels reach whose operands do not lie side by side;
    ``launch_s``: what starting one kernel costs; ``reserve_bytes``: context, communication buffers and allocator slack;
    ``training_dtype``: what a job computes in unless it says otherwise. ``attention_half_head``: head size whose softmax costs
    fused attention as much as its products (None: that of GPUs); ``attention_tile``: keys that causal attention computes at
    once; ``hook_s``: what ZeRO's hooks add to one pass of one block, on the host (None: nobody measured it); ``host_s``: what
    the host needs for one operation that it gives to the device (None where the host itself computes, or nobody measured it);
    ``functions``: seconds an element of operations that are bound by arithmetic (``gelu``, ``gelu_backward``...), where that
    can be more than their traffic; ``runs_torch``: whether programs of torch and nothing else run on it (not on TPUs).
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: Mapping[str, float]
    gemm: Mapping[str, EfficiencyCurve]
    attention_forward: float
    attention_backward: float
    memory_efficiency: float
    memory_half_bytes: float
    launch_s: float
    reserve_bytes: int
    training_dtype: str = "bfloat16"
    attention_half_head: float | None = None
    attention_tile: int = 1
    hook_s: float | None = None
    host_s: float | None = None
    functions: Mapping[str, float] = field(default_factory=dict)
    attention_portable: float = 1.0
    memory_irregular: float = 1.0
    runs_torch: bool = True

    @property
    def is_host(self) -> bool:
        """Whether the host itself computes, by torch's CPU kernels; then hooks take from its time."""
        return self.hook_s is not None and self.host_s is None

    def peak(self, dtype: str) -> float:
        """Dense peak FLOP/s of ``dtype``; a dtype that the chip has no rate for raises :class:`ProfileFormatError`."""
        if dtype not in self.peak_flops:
            raise ProfileFormatError(
                f"chip {self.name}", f"no rate for {dtype}", f"it computes in {', '.join(self.peak_flops)}"
            )
        return self.peak_flops[dtype]
