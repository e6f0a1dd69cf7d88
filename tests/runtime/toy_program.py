"""A hand-written program in the style of an emitted one, and the plain model it trains: the oracle of these tests.

Tensor-parallel with sequence parallelism between the blocks, a fused projection in segments, a vocabulary that does not
divide, an embedding tied to the head in another stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runtime import launch
from runtime.block import Block
from runtime.collectives import TensorAxis
from runtime.data import BatchInput
from runtime.loop import Program
from runtime.parameters import TiedParameter
from runtime.random_stream import RandomStream
from runtime.schedule import make_schedule, stages_of_rank
from runtime.stage import ZeroStage
from runtime.zero import COMPUTE_DTYPE, MASTER_DTYPE, shard

VOCABULARY, WIDTH, HEADS, SEQUENCE, LAYERS = 51, 16, 4, 8, 4
EMBEDDING, HEAD = "embedding", "head"


class PlainLayer(nn.Module):
    """A pre-norm transformer layer with a fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 6 * WIDTH, bias=False)
        self.down = nn.Linear(6 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, WIDTH] to the same."""
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class PlainModel(nn.Module):
    """The whole model; ``head.weight`` is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(SEQUENCE, WIDTH))
        self.layers = nn.ModuleList(PlainLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Summed cross-entropy."""
        x = self.embedding(input_ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


RECIPES = {
    "embedding.weight": [("normal", 0.0, 0.5)], "positions": [("uniform", -0.1, 0.1)],
    "norm.weight": [("constant", 1.0)], "norm.bias": [("normal", 0.0, 0.1)],
} | {
    f"layers.{index}.{name}": recipe for index in range(LAYERS) for name, recipe in {
        "norm.weight": [("uniform", 0.5, 1.5)], "norm.bias": [("normal", 0.0, 0.1)],
        "qkv.weight": [("normal", 0.0, 1.0), ("scale", 0.3)], "qkv.bias": [("normal", 0.0, 0.1)],
        "out.weight": [("normal", 0.0, 0.3)], "out.bias": [("normal", 0.0, 0.1)],
        "up.weight": [("normal", 0.0, 0.3)], "down.weight": [("trunc_normal", 0.0, 0.3, -0.6, 0.6)],
    }.items()
}

DECAYS = {fqn: "weight" in fqn and "norm" not in fqn for fqn in RECIPES}
INPUTS = (
    BatchInput("input_ids", (SEQUENCE,), torch.int64, "tokens", VOCABULARY),
    BatchInput("labels", (SEQUENCE,), torch.int64, "targets", VOCABULARY),
)


class Embedding(Block):
    """Vocabulary-parallel embedding; leaves the sequence split."""

    def __init__(self, tensor: TensorAxis) -> None:
        super().__init__("embedding", tensor, {"table.weight": "embedding.weight", "positions": "positions"})
        self.declare("table.weight", (VOCABULARY, WIDTH), shard=0)
        self.declare("positions", (SEQUENCE, WIDTH), partial_gradient=True)

    def forward(self, input_ids: Tensor, rng: RandomStream | None) -> Tensor:
        tp = self.tensor
        rows = tp.reduce_scatter(tp.embedding(input_ids, self.table.weight, vocabulary=VOCABULARY), dim=1)
        x = rows + tp.slice(self.positions, dim=0, gradient="pad")
        return x if rng is None else rng.block(self.name).dropout(x, 0.1, site=0, sharded=True)


class Layer(Block):
    """Column- then row-parallel, heads split, sequence split outside."""

    def __init__(self, index: int, tensor: TensorAxis, recompute: bool) -> None:
        names = [fqn.removeprefix("layers.0.") for fqn in RECIPES if fqn.startswith("layers.0.")]
        super().__init__(f"layers.{index}", tensor, {name: f"layers.{index}.{name}" for name in names})
        self.recompute = recompute
        fused, head = (WIDTH, WIDTH, WIDTH), WIDTH // HEADS
        self.declare("norm.weight", (WIDTH,), partial_gradient=True)
        self.declare("norm.bias", (WIDTH,), partial_gradient=True)
        self.declare("qkv.weight", (3 * WIDTH, WIDTH), shard=0, segments=fused, unit=head)
        self.declare("qkv.bias", (3 * WIDTH,), shard=0, segments=fused, unit=head)
        self.declare("out.weight", (WIDTH, WIDTH), shard=1)
        self.declare("out.bias", (WIDTH,), partial_gradient=True)
        self.declare("up.weight", (6 * WIDTH, WIDTH), shard=0)
        self.declare("down.weight", (WIDTH, 6 * WIDTH), shard=1)

    def forward(self, x: Tensor, rng: RandomStream | None) -> Tensor:
        return checkpoint(self._body, x, rng, use_reentrant=False) if self.recompute else self._body(x, rng)

    def _body(self, x: Tensor, rng: RandomStream | None) -> Tensor:
        tp = self.tensor
        normed = F.layer_norm(x, (WIDTH,), self.norm.weight, self.norm.bias)
        fused = F.linear(tp.all_gather(normed, dim=1), self.qkv.weight, self.qkv.bias)
        query, key, value = fused.unflatten(-1, (3, tp.size(HEADS), -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected = F.linear(mixed.transpose(1, 2).flatten(2), self.out.weight)
        x = x + tp.reduce_scatter(projected, dim=1) + self.out.bias
        x = x if rng is None else rng.block(self.name).dropout(x, 0.1, site=0, sharded=True)
        wide = F.gelu(F.linear(tp.all_gather(x, dim=1), self.up.weight))
        return x + tp.reduce_scatter(F.linear(wide, self.down.weight), dim=1)


class Head(Block):
    """Final norm, vocabulary-parallel head and loss."""

    def __init__(self, tensor: TensorAxis) -> None:
        super().__init__("head", tensor, {
            "norm.weight": "norm.weight", "norm.bias": "norm.bias", "table.weight": "embedding.weight",
        })
        self.declare("norm.weight", (WIDTH,), partial_gradient=True)
        self.declare("norm.bias", (WIDTH,), partial_gradient=True)
        self.declare("table.weight", (VOCABULARY, WIDTH), shard=0)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        tp = self.tensor
        normed = tp.all_gather(F.layer_norm(x, (WIDTH,), self.norm.weight, self.norm.bias), dim=1)
        logits = F.linear(normed, self.table.weight)
        return tp.cross_entropy(logits.flatten(0, 1), labels.flatten(), classes=VOCABULARY)


class Stage(nn.Module):
    """A contiguous range of the chain: embedding, layers, head."""

    def __init__(self, first: int, last: int, tensor: TensorAxis, recompute: bool) -> None:
        super().__init__()
        chain = [EMBEDDING, *range(LAYERS), HEAD][first:last]
        self.embedding = Embedding(tensor) if EMBEDDING in chain else None
        self.layers = nn.ModuleList(Layer(entry, tensor, recompute) for entry in chain if isinstance(entry, int))
        self.head = Head(tensor) if HEAD in chain else None
        if self.embedding is not None and self.head is not None:
            self.head.share("table.weight", self.embedding, "table.weight")

    def forward(
        self, *received: Tensor, input_ids: Tensor, labels: Tensor, rng: RandomStream | None = None
    ) -> Tensor:
        """The loss sum in the last stage, the hidden states in the others."""
        x = received[0] if self.embedding is None else self.embedding(input_ids, rng)
        for layer in self.layers:
            x = layer(x, rng)
        return x if self.head is None else self.head(x, labels)


@dataclass(frozen=True)
class Toy:
    """A plan by hand. ``zero``: one stage per link of the chain (embedding, layers, head)."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    zero_group: int | None = None
    schedule: str = "1f1b"
    virtual: int = 1
    microbatches: int = 2
    zero: Sequence[int] = (0,) * (LAYERS + 2)
    precision: str = "fp64"
    dropout: bool = False
    recompute: bool = False
    batch: int = 16
    options: dict[str, object] = field(default_factory=dict)


def weigh(input_ids: Tensor, labels: Tensor, rng: RandomStream | None = None) -> tuple[Tensor]:
    """Labels that count."""
    return ((labels != -100).sum(),)


def build(toy: Toy) -> Program:
    """What an emitted train.py does, up to the loop."""
    world = launch.start(toy.pipeline, toy.data, toy.tensor, toy.zero_group, device="cpu")
    count = toy.pipeline * (2 if toy.schedule == "zbv" else toy.virtual)
    cuts = [round(index * (LAYERS + 2) / count) for index in range(count + 1)]
    indices = stages_of_rank(toy.schedule, toy.pipeline, world.pipeline_rank, toy.virtual)
    torch.set_default_dtype(MASTER_DTYPE[toy.precision])
    with torch.device("meta"):
        modules = [Stage(cuts[index], cuts[index + 1], world.tensor, toy.recompute) for index in indices]
    torch.set_default_dtype(torch.float32)
    for module, index in zip(modules, indices, strict=True):
        units = [module.embedding, *module.layers, module.head]
        stages = list(toy.zero[cuts[index] : cuts[index + 1]])
        units = [unit for unit in units if unit is not None]
        if module.embedding is not None and module.head is not None:
            units, stages = [[module.embedding, module.head], *module.layers], stages[:-1]
        shard(units, stages, world.data_mesh, toy.precision)
    micro = toy.batch // toy.data // toy.microbatches
    hidden = torch.empty(
        micro, world.tensor.size(SEQUENCE), WIDTH, dtype=COMPUTE_DTYPE[toy.precision], device="meta", requires_grad=True
    )
    stages = modules if toy.pipeline == 1 else [
        ZeroStage(
            module, index, count, world.device, world.pipeline_group, receives=[hidden] if index else [], sends=[hidden]
        )
        for module, index in zip(modules, indices, strict=True)
    ]
    ranks = [
        rank for stage in range(count) for rank in range(toy.pipeline)
        if stage in stages_of_rank(toy.schedule, toy.pipeline, rank, toy.virtual)
    ]
    return Program(
        world=world, modules=modules, runner=make_schedule(toy.schedule, stages, toy.microbatches), weigh=weigh,
        inputs=INPUTS,
        batch=toy.batch, microbatches=toy.microbatches, sequence=SEQUENCE, precision=toy.precision, recipes=RECIPES,
        decays=DECAYS,
        tied=[TiedParameter("embedding.weight", (0, count - 1))] if count > 1 else [], stage_ranks=ranks,
        random=toy.dropout, aliases={"head.weight": "embedding.weight"},
    )
