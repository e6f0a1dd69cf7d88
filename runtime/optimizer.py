"""AdamW on local shards, the gradient norm over the world, the learning rate and fp16's loss scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .parameters import Held


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Linear warm-up over ``warmup`` steps to ``peak``; then constant, or a cosine to ``floor`` (a part of
    it) at ``decay_steps``, which is more than ``warmup``."""

    peak: float
    warmup: int = 0
    decay_steps: int = 0
    floor: float = 0.1

    def at(self, step: int) -> float:
        """The rate of the update of step ``step`` (from 1)."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        if not self.decay_steps:
            return self.peak
        done = min((step - self.warmup) / (self.decay_steps - self.warmup), 1.0)
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


class LossScale:
    """fp16's dynamic loss scale: halved when a gradient overflows, doubled after ``interval`` steps without."""

    def __init__(self, enabled: bool, value: float = 2.0**16, interval: int = 1000) -> None:
        self.enabled, self.interval = enabled, interval
        self.value = value if enabled else 1.0
        self.clean_steps = 0

    def update(self, overflow: bool) -> None:
        """Take note of a step; all ranks must see the same."""
        if not self.enabled:
            return
        self.clean_steps = 0 if overflow else self.clean_steps + 1
        if overflow:
            self.value = max(self.value / 2, 1.0)
        elif self.clean_steps == self.interval:
            self.value, self.clean_steps = self.value * 2, 0


class Optimizer:
    """torch's AdamW (Loshchilov and Hutter 2019) over the elements that this rank holds, as one kernel that reads and writes
    each once: the ``foreach`` form, the default on CUDA, moves three times as much and makes a whole moment besides.

    ``decays``: whether weight decay applies, by FQN (those that are not named: yes).
    """

    def __init__(
        self, parameters: Sequence[Held], rate: LearningRate, weight_decay: float, decays: Mapping[str, bool],
        betas: tuple[float, float] = (0.9, 0.95), epsilon: float = 1e-8,
    ) -> None:
        self.rate = rate
        self.parameters = tuple(held for held in parameters if held.parameter.requires_grad)
        self.shards = [nn.Parameter(held.local) for held in self.parameters]
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for held, shard in zip(self.parameters, self.shards, strict=True):
            groups[decays.get(held.fqn, True)].append(shard)
        self.adamw = torch.optim.AdamW(
            [
                {"params": shards, "weight_decay": weight_decay if decayed else 0.0}
                for decayed, shards in groups.items()  # empty ones too: a stage may train nothing
            ],
            lr=rate.peak, betas=betas, eps=epsilon, fused=True,
        )
        self._updates = 0
        self.state()  # Before any activation is made: the first step takes the memory that all others take.

    def step(self, step: int, factor: Tensor, overflow: Tensor | None = None) -> float:
        """Update with the gradients times ``factor``; returns the learning rate of this ``step`` (from 1). ``overflow``: one
        where nothing is to change (then :meth:`take_back` says so to the count). Both are 0-dim and on the device: the host
        launches the update before it knows them."""
        learning_rate = self.rate.at(step)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        for held, shard in zip(self.parameters, self.shards, strict=True):
            shard.data, shard.grad = held.local, held.gradient
        gradients = [shard.grad for shard in self.shards if shard.grad is not None]
        scale = None
        if any(gradient.dtype == torch.float64 for gradient in gradients):
            torch._foreach_mul_(gradients, factor)  # The kernel would take its factor in float32.
        else:
            scale = factor.reciprocal().float()
        asked: Any = self.adamw  # As torch.amp's GradScaler asks.
        asked.grad_scale, asked.found_inf = scale, None if overflow is None else overflow.float()
        self.adamw.step()
        asked.grad_scale = asked.found_inf = None
        self._updates += 1
        self.adamw.zero_grad(set_to_none=True)
        return learning_rate

    def take_back(self) -> None:
        """The last update changed nothing."""
        self._updates -= 1

    def state(self) -> dict[str, list[Tensor]]:
        """``exp_avg`` and ``exp_avg_sq`` aligned with :attr:`parameters`; zeros where no step was taken yet."""
        for shard in self.shards:
            if not self.adamw.state[shard]:
                self.adamw.state[shard] = {
                    "step": torch.zeros((), device=shard.device), "exp_avg": torch.zeros_like(shard.data),
                    "exp_avg_sq": torch.zeros_like(shard.data),
                }
        return {name: [self.adamw.state[shard][name] for shard in self.shards] for name in ("exp_avg", "exp_avg_sq")}

    @property
    def updates(self) -> int:
        """How many updates were made (steps that overflowed in fp16 make none)."""
        return self._updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates = count
        self.state()
        for state in self.adamw.state.values():
            state["step"].fill_(count)


def squared_norm(parameters: Sequence[Held], device: torch.device) -> Tensor:
    """This rank's part of the squared gradient norm, float64: local squared sums, each over its replication.

    The sum over all ranks of the world counts every element of every parameter once.
    """
    gradients = ((held.gradient, held.replication) for held in parameters)
    found = [(gradient, copies) for gradient, copies in gradients if gradient is not None and gradient.numel()]
    if not found:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm([gradient for gradient, _ in found])).double()
    of_copies: dict[int, list[int]] = {}
    for index, (_, copies) in enumerate(found):
        of_copies.setdefault(copies, []).append(index)
    if len(of_copies) == 1:
        return norms.square().sum() / found[0][1]
    parts = [torch.stack([norms[index] for index in indices]).square().sum() / copies for copies, indices in of_copies.items()]
    return torch.stack(parts).sum()


def sum_over_world(values: Sequence[Tensor]) -> Tensor:
    """Sums of scalars over all ranks, float64, in one all-reduce."""
    together = torch.stack([value.double() for value in values])
    dist.all_reduce(together)
    return together


class Reading:
    """Numbers on their way to the host, which does not wait for what the device is given to do after them."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)
        self._arrived: Any = None
        if values.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[float]:
        """The numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [float(value) for value in self._values.tolist()]


def clip_factor(norm: Tensor, largest: float) -> Tensor:
    """What gradients of ``norm`` are multiplied by to stay within ``largest`` (0: no limit); as torch has it."""
    return (largest / (norm + 1e-6)).clamp(max=1.0) if largest > 0 else torch.ones_like(norm)
