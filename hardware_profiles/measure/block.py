"""A transformer block in plain torch: what the host and the device do again and again in an eager step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .clock import Call

SMALL_BLOCK = (1, 64, 128, 2, 512)
"""batch, tokens, hidden size, heads, inner size: so small that a step is the host's."""
SMALL_BLOCKS = 4


class Block(nn.Module):
    """Norm, attention, norm, network; each with biases and beside a sum, as GPT has them."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.projected, self.joined = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] to the same."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.projected(self.first(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return result


def passes(sizes: tuple[int, ...], count: int, device: torch.device) -> Call:
    """Forward and backward of ``count`` blocks, in bfloat16. ``sizes``: as of :data:`SMALL_BLOCK`."""
    batch, tokens, hidden, heads, inner = sizes
    blocks = nn.Sequential(*(Block(hidden, heads, inner) for _ in range(count))).to(device, torch.bfloat16)
    x = torch.randn(batch, tokens, hidden, device=device).to(torch.bfloat16).requires_grad_()
    gradient, inputs = torch.randn_like(x), (x, *blocks.parameters())
    return lambda: torch.autograd.grad(blocks(x), inputs, gradient)
