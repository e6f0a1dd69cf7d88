"""RandomStream: random numbers and masks that depend on where they are drawn, not on what ran before.

A draw is keyed by (seed, step, micro-batch, data rank, block, site) and, where the activation is split over the tensor
axis, by the tensor rank: the same numbers wherever an activation is replicated, others where it is sharded, and the same
again when a forward is repeated for recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .hashing import seed_of


@dataclass(frozen=True, slots=True)
class RandomStream:
    """The randomness of one micro-batch on one rank; :meth:`block` narrows it to one block. What no block draws (noise that
    several stages read) has it as it is."""

    seed: int
    step: int
    microbatch: int
    data_rank: int
    tensor_rank: int
    name: str = ""

    def block(self, name: str) -> RandomStream:
        """The stream of the block ``name``."""
        return replace(self, name=name)

    def dropout(self, x: Tensor, p: float, site: int, sharded: bool) -> Tensor:
        """``x`` with elements zeroed with probability ``p`` and the others scaled by 1 / (1 - p)."""
        with self._seeded(x.device, site, sharded):
            return F.dropout(x, p, training=True)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, site: int = 0,
        sharded: bool = False,
    ) -> Tensor:
        """Scaled dot-product attention whose weights are dropped with probability ``dropout_p``."""
        with self._seeded(query.device, site, sharded):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )

    def normal(self, like: Tensor, site: int, sharded: bool) -> Tensor:
        """Numbers of mean 0 and variance 1, of the shape and dtype of ``like``."""
        with self._seeded(like.device, site, sharded):
            return torch.randn_like(like)

    def uniform(self, like: Tensor, site: int, sharded: bool) -> Tensor:
        """Numbers in [0, 1), of the shape and dtype of ``like``."""
        with self._seeded(like.device, site, sharded):
            return torch.rand_like(like)

    def exponential(self, like: Tensor, site: int, sharded: bool, rate: float = 1.0) -> Tensor:
        """Positive numbers of mean 1 / ``rate``, of the shape and dtype of ``like``."""
        with self._seeded(like.device, site, sharded):
            return torch.empty_like(like).exponential_(rate)

    def integers(self, like: Tensor, low: int, high: int, site: int, sharded: bool) -> Tensor:
        """Whole numbers from ``low`` up, less than ``high``, of the shape and dtype of ``like``."""
        with self._seeded(like.device, site, sharded):
            return torch.randint_like(like.detach(), low, high)

    @contextmanager
    def _seeded(self, device: torch.device, site: int, sharded: bool) -> Iterator[None]:
        """torch's default generator seeded for one site; its state is put back afterwards."""
        part = self.tensor_rank if sharded else -1
        seed = seed_of(self.seed, self.step, self.microbatch, self.data_rank, self.name, site, part)
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices, device_type="cuda"):
            if device.type == "cuda":
                torch.cuda.manual_seed(seed)
            else:
                torch.manual_seed(seed)
            yield
