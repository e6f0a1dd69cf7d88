"""Llama in plain PyTorch (Touvron et al. 2023, Grattafiori et al. 2024): from a toy to a trillion parameters.

    shardwright plan examples/llama.py:llama --set layers=80 --set hidden=8192 --set heads=64 --set kv_heads=8 \
        --set ffn_hidden=28672 --set vocab=128256 --seq 8192 ...

Shapes: B samples, T tokens, H hidden, N query heads, K key/value heads, D head dim, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Tables that turn each pair of channels by an angle proportional to the position (Su et al. 2021)."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        channels = torch.arange(0, head_dim, 2, dtype=torch.float32)
        self.register_buffer("inv_freq", 1.0 / base ** (channels / head_dim), persistent=False)

    def forward(self, seq: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, D]."""
        positions = torch.arange(seq, device=self.inv_freq.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [B, heads, T, D]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos + turned * sin


class RMSNorm(nn.Module):
    """Divide by the root of the mean square, multiply by a learned weight."""

    def __init__(self, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one key/value head (Ainslie et al. 2023)."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.query = nn.Linear(hidden, heads * head_dim, bias=False)
        self.key = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.value = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        batch, seq, _ = x.shape
        queries = self.query(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        keys = self.key(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        values = self.value(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        queries = rotate(queries, cos, sin)
        keys = rotate(keys, cos, sin)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        merged = attended.transpose(1, 2).reshape(batch, seq, -1)
        update: Tensor = self.out(merged)
        return update


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): a linear gated by the SiLU of another."""

    def __init__(self, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn_hidden, bias=False)
        self.up = nn.Linear(hidden, ffn_hidden, bias=False)
        self.down = nn.Linear(ffn_hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        gated = F.silu(self.gate(x)) * self.up(x)
        update: Tensor = self.down(gated)
        return update


class DecoderLayer(nn.Module):
    """Attention, then a feed-forward network, each on a normalised copy of the residual stream."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn_hidden: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden)
        self.attention = Attention(hidden, heads, kv_heads, head_dim)
        self.feed_forward_norm = RMSNorm(hidden)
        self.feed_forward = FeedForward(hidden, ffn_hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x


class Llama(nn.Module):
    """Token embedding, the layers, a last norm, and the head."""

    def __init__(
        self, *, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn_hidden: int, vocab: int,
        rope_base: float, tied: bool,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.rotary = RotaryEmbedding(head_dim, rope_base)
        self.layers = nn.ModuleList(
            DecoderLayer(hidden, heads, kv_heads, head_dim, ffn_hidden) for _ in range(layers)
        )
        self.norm = RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids [B, T] -> logits [B, T, V]"""
        x = self.tokens(input_ids)
        cos, sin = self.rotary(input_ids.shape[1])
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        logits: Tensor = self.head(x)
        return logits


def llama(
    layers: int = 4, hidden: int = 128, heads: int = 4, kv_heads: int = 2, ffn_hidden: int = 352, vocab: int = 256,
    seq: int = 128, rope_base: float = 10000.0, tied: bool = False, head_dim: int | None = None,
) -> Llama:
    """A Llama; ``head_dim`` defaults to hidden // heads. Rotary tables fit any sequence, so ``seq`` only documents it."""
    del seq
    return Llama(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim or hidden // heads,
        ffn_hidden=ffn_hidden, vocab=vocab, rope_base=rope_base, tied=tied,
    )
