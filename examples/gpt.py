"""GPT-2 in plain PyTorch (Radford et al. 2019): from a toy to a trillion parameters by keyword arguments.

    shardwright plan examples/gpt.py:gpt --set layers=96 --set hidden=12288 --set heads=96 --seq 2048 ...

Shapes: B samples, T tokens, H hidden, N heads, D = H / N, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention; one linear makes query, key and value."""

    def __init__(self, hidden: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = hidden // heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden, 3 * heads * self.head_dim, bias=bias)
        self.out = nn.Linear(heads * self.head_dim, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        batch, seq, _ = x.shape
        query, key, value = self.qkv(x).split(self.heads * self.head_dim, dim=2)
        query = query.view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        key = key.view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        value = value.view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        merged = attended.transpose(1, 2).reshape(batch, seq, self.heads * self.head_dim)
        update: Tensor = self.out(merged)
        return update


class FeedForward(nn.Module):
    """Two linears around a GELU."""

    def __init__(self, hidden: int, ffn_hidden: int, bias: bool, gelu: str) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn_hidden, bias=bias)
        self.gelu = nn.GELU(approximate=gelu)
        self.down = nn.Linear(ffn_hidden, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        expanded = self.gelu(self.up(x))
        update: Tensor = self.down(expanded)
        return update


class Block(nn.Module):
    """Attention, then a feed-forward network, each on a normalised copy of the residual stream."""

    def __init__(self, hidden: int, heads: int, ffn_hidden: int, dropout: float, bias: bool, gelu: str) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden, bias=bias)
        self.attention = Attention(hidden, heads, dropout, bias)
        self.feed_forward_norm = nn.LayerNorm(hidden, bias=bias)
        self.feed_forward = FeedForward(hidden, ffn_hidden, bias, gelu)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]"""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x


class GPT(nn.Module):
    """Token and position embeddings, the blocks, a last norm, and the head (tied to the token embedding)."""

    def __init__(
        self, *, layers: int, hidden: int, heads: int, ffn_hidden: int, vocab: int, seq: int,
        dropout: float, tied: bool, bias: bool, gelu: str,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(seq, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(hidden, heads, ffn_hidden, dropout, bias, gelu) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden, bias=bias)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.initialise(layers)

    def initialise(self, layers: int) -> None:
        """GPT-2's: normal(0.02), zero biases; what writes to the residual stream shrinks with its 2 x layers writes."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids [B, T] -> logits [B, T, V]"""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(positions)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits: Tensor = self.head(x)
        return logits


def gpt(
    layers: int = 4, hidden: int = 128, heads: int = 4, vocab: int = 256, seq: int = 128, dropout: float = 0.0,
    tied: bool = True, bias: bool = True, ffn_hidden: int | None = None, gelu: str = "tanh",
) -> GPT:
    """A GPT; ``ffn_hidden`` defaults to 4 x hidden, ``gelu`` is ``tanh`` (as GPT-2) or ``none`` (exact)."""
    return GPT(
        layers=layers, hidden=hidden, heads=heads, ffn_hidden=ffn_hidden or 4 * hidden, vocab=vocab, seq=seq,
        dropout=dropout, tied=tied, bias=bias, gelu=gelu,
    )
