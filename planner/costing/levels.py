"""Bytes of one block under one recomputation level, for one micro-batch, by an engine's bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hardware_profiles import Engine
from planner.costing.activations import KeptStorages, saved_bytes
from planner.costing.kept import Keeping, loss_operands
from planner.costing.liveness import backward_peak_bytes, forward_peak_bytes
from planner.costing.passes import BlockPasses
from planner.ir.costed import Recompute


@dataclass(frozen=True, eq=False)
class LevelMemory:
    """Fields of :class:`~planner.ir.costed.BlockCost`, found when they are asked for: a bound asks for what is saved alone."""

    kept: KeptStorages
    passes: BlockPasses
    level: Recompute
    engine: Engine

    @cached_property
    def _kept_bytes(self) -> int:
        if self._by_storage:
            return self.kept.saved_bytes
        return Keeping(self.kept.local, self.engine).saved_bytes(self.level)

    @property
    def _by_storage(self) -> bool:
        """Whether bytes are those of torch's autograd, storage by storage."""
        engine = self.engine
        return engine.keeps == "operations" and (self.level != "selective" or engine.selective != "alternate")

    @property
    def _moved_bytes(self) -> int:
        """What a block keeps waits in the host's memory; one block's is on its way there or back."""
        return round(self.engine.offloaded * self._kept_bytes)

    @property
    def saved_bytes(self) -> int:
        return self._kept_bytes - self._moved_bytes

    @property
    def forward_peak_bytes(self) -> int:
        return self._peaks[0] + self._moved_bytes

    @property
    def backward_peak_bytes(self) -> int:
        return self._peaks[1] + self._moved_bytes

    @property
    def waiting_bytes(self) -> int:
        return self._split[0]

    @property
    def split_peak_bytes(self) -> int:
        return self._split[1]

    @cached_property
    def _peaks(self) -> tuple[int, int]:
        """Of the forward and of the backward pass."""
        local, level, engine, saved = self.kept.local, self.level, self.engine, self._kept_bytes
        logits = loss_operands(local)
        if engine.loss and logits:
            return (max(0, round(engine.loss * logits[0]) - logits[1]),) * 2
        if self._by_storage:
            return _replayed(self.passes, saved)
        plain = saved_bytes(local) if engine.keeps == "operations" else Keeping(local, engine).saved_bytes("none")
        return forward_peak_bytes(local, level), backward_peak_bytes(local) + max(0, plain - saved)

    @cached_property
    def _split(self) -> tuple[int, int]:
        """Of a backward pass in two parts (which exclude recomputation): what the weight part will read beyond what the input
        part still keeps for it, and the most that lives in either part beyond both."""
        if self.level != "none":
            return 0, 0
        passes = self.passes
        weight, inward = passes.backward("weight"), passes.backward("input")  # The former runs the latter.
        waiting = max(0, inward.after[0])
        return waiting, max(sum(passes.gradient_bytes) + sum(inward.peak) - waiting, sum(weight.peak))


def _replayed(passes: BlockPasses, saved: int) -> tuple[int, int]:
    """(forward, backward): the most beyond what is kept, storage by storage (:mod:`planner.costing.passes`). The block's
    inputs, and the gradients that arrive at its outputs, are alive all the while; parameters' gradients are made too."""
    local = passes.local
    inputs = sum(local.storage_bytes(value.name) for value in local.body.inputs if value.differentiable)
    return max(0, passes.forward.peak[0] + inputs - saved), sum(passes.gradient_bytes) + sum(passes.backward().peak)
