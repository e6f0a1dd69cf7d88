"""DropoutStream: random masks that depend on where they are applied, not on what ran before.

A mask is keyed by (seed, step, micro-batch, data rank, block, site) and, where the activation is split over the tensor
axis, by the tensor rank: the same mask wherever an activation is replicated, another where it is sharded, and the same
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
class DropoutStream:
    """The randomness of one micro-batch on one rank; :meth:`block` narrows it to one block."""

    seed: int
    step: int
    microbatch: int
    data_rank: int
    tensor_rank: int
    name: str = ""

    def block(self, name: str) -> DropoutStream:
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
