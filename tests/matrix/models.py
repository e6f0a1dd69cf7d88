"""The example models with sizes that are pairwise different, random norms and non-zero biases: no two dims can be mistaken
for each other, and no parameter's gradient hides behind a zero or a one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"


def _example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _scrambled(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.7, 0.3)
        else:
            nn.init.normal_(parameter, 0.0, 0.15)
    return model


def gpt(layers: int = 6, seq: int = 20, dropout: float = 0.0, tied: bool = True) -> nn.Module:
    """Heads (6) and vocabulary (51) do not divide by four; tied embedding and head; fused QKV."""
    return _scrambled(_example("gpt").gpt(
        layers=layers, hidden=30, heads=6, ffn_hidden=46, vocab=51, seq=seq, dropout=dropout, tied=tied,
    ))


def untied_gpt(seq: int = 20) -> nn.Module:
    """The same, shallower, with a head of its own."""
    return gpt(layers=2, seq=seq, tied=False)


def llama(layers: int = 6, seq: int = 24) -> nn.Module:
    """Grouped queries (10 heads on 5), both uneven over two and four; ffn 37, vocabulary 53."""
    return _scrambled(_example("llama").llama(
        layers=layers, hidden=28, heads=10, kv_heads=5, head_dim=6, ffn_hidden=37, vocab=53, seq=seq,
    ))


class _Q(nn.Module):
    """A transformer layer in which no name means anything."""

    def __init__(self, a: int, b: int, c: int) -> None:
        super().__init__()
        self.z1, self.z2, self.b = nn.LayerNorm(a), nn.LayerNorm(a), b
        self.k0, self.k1, self.k2 = (nn.Linear(a, a) for _ in range(3))
        self.k3, self.k4, self.k5 = nn.Linear(a, a), nn.Linear(a, c), nn.Linear(c, a)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        f = nn.functional
        w, v, _ = u.shape
        g = self.z1(u)
        r, s, t = (m(g).reshape(w, v, self.b, -1).transpose(1, 2) for m in (self.k0, self.k1, self.k2))
        g = f.scaled_dot_product_attention(r, s, t, is_causal=True).transpose(1, 2).reshape(w, v, -1)
        u = u + self.k3(g)
        return u + self.k5(f.gelu(self.k4(self.z2(u))))


class _P(nn.Module):
    def __init__(self, n: int, a: int, b: int, c: int, d: int) -> None:
        super().__init__()
        self.i = nn.Embedding(d, a)
        self.j = nn.ModuleList(_Q(a, b, c) for _ in range(n))
        self.l = nn.Linear(a, d, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        u = self.i(input_ids)
        for q in self.j:
            u = q(u)
        return self.l(u)


def nameless() -> nn.Module:
    """Modules and variables with meaningless names."""
    return _scrambled(_P(6, 30, 6, 46, 51))
