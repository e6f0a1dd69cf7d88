"""Decoders that published runs trained and the examples do not have: plain networks with grouped queries, and experts.

Which expert a token goes to changes no cost while the experts' loads are balanced, so tokens are dealt to them in turn:
every expert computes the same number of tokens, as a balancing loss or a capacity of one make it.

Shapes: B samples, T tokens, H hidden, N query heads, K key/value heads, D head dim, F feed-forward, V vocabulary, E experts
of which a token meets k, L experts that the rank holds, C = T k / L tokens of a sample for each of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Tables that turn each pair of channels by an angle proportional to the position (Su et al. 2021)."""

    inv_freq: Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        channels = torch.arange(0, head_dim, 2, dtype=torch.float32)
        self.register_buffer("inv_freq", 1.0 / 10000.0 ** (channels / head_dim), persistent=False)

    def forward(self, seq: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, D]."""
        positions = torch.arange(seq, device=self.inv_freq.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [B, heads, T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


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
        attended = F.scaled_dot_product_attention(
            rotate(queries, cos, sin), rotate(keys, cos, sin), values, is_causal=True, enable_gqa=True
        )
        update: Tensor = self.out(attended.transpose(1, 2).reshape(batch, seq, -1))
        return update


class FeedForward(nn.Module):
    """Two linears around a squared ReLU (So et al. 2021), or SwiGLU's three (Shazeer 2020)."""

    def __init__(self, hidden: int, ffn_hidden: int, gated: bool) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn_hidden, bias=False)
        self.gate = nn.Linear(hidden, ffn_hidden, bias=False) if gated else None
        self.down = nn.Linear(ffn_hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        expanded = self.up(x)
        activated = torch.relu(expanded).square() if self.gate is None else F.silu(self.gate(x)) * expanded
        update: Tensor = self.down(activated)
        return update


class Experts(nn.Module):
    """A router and feed-forward networks, each for the tokens that it is dealt."""

    def __init__(self, hidden: int, ffn_hidden: int, gated: bool, experts: int, held: int, active: int) -> None:
        super().__init__()
        self.held, self.active = held, active
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.empty(held, hidden, ffn_hidden))
        self.gate = nn.Parameter(torch.empty(held, hidden, ffn_hidden)) if gated else None
        self.down = nn.Parameter(torch.empty(held, ffn_hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        batch, seq, hidden = x.shape
        weights = F.softmax(self.router(x), dim=-1)[:, :, : self.active]
        copies = x.unsqueeze(2).expand(batch, seq, self.active, hidden)
        share = seq * self.active // self.held
        dealt = copies.reshape(batch, share, self.held, hidden).permute(2, 0, 1, 3).reshape(self.held, batch * share, hidden)
        expanded = torch.bmm(dealt, self.up)
        activated = F.gelu(expanded) if self.gate is None else F.silu(torch.bmm(dealt, self.gate)) * expanded
        answers = torch.bmm(activated, self.down).reshape(self.held, batch, share, hidden).permute(1, 2, 0, 3)
        collected = answers.reshape(batch, seq, self.active, hidden)
        return (collected * weights.unsqueeze(-1)).sum(dim=2)


class DecoderLayer(nn.Module):
    """Attention, then a feed-forward network or experts, each on a normalised copy of the residual stream."""

    def __init__(self, hidden: int, attention: Attention, network: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.attention = attention
        self.network_norm = nn.RMSNorm(hidden, eps=1e-5)
        self.network = network

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        x = x + self.network(self.network_norm(x))
        return x


class Decoder(nn.Module):
    """Token embedding, the layers, a last norm, and the head."""

    def __init__(self, layers: list[DecoderLayer], hidden: int, head_dim: int, vocab: int, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.rotary = RotaryEmbedding(head_dim)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids [B, T] -> logits [B, T, V]"""
        x = self.tokens(input_ids)
        cos, sin = self.rotary(input_ids.shape[1])
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def decoder(
    layers: int = 2, hidden: int = 128, heads: int = 4, kv_heads: int = 2, ffn_hidden: int = 256, vocab: int = 256,
    seq: int = 128, gated: bool = True, tied: bool = False, head_dim: int | None = None, experts: int = 0, active: int = 2,
    held: int = 0,
) -> Decoder:
    """A decoder; ``experts``: 0 for one network a layer; ``held``: experts of a rank (0: all of them)."""
    del seq
    width = head_dim or hidden // heads

    def network() -> nn.Module:
        if experts:
            return Experts(hidden, ffn_hidden, gated, experts, held or experts, active)
        return FeedForward(hidden, ffn_hidden, gated)

    built = [DecoderLayer(hidden, Attention(hidden, heads, kv_heads, width), network()) for _ in range(layers)]
    return Decoder(built, hidden, width, vocab, tied)
