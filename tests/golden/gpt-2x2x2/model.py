"""gpt: the model as it runs on 8 devices (pipeline 2 x data 2 x tensor 2).

Local sizes everywhere; `tp` is the tensor axis, and every collective on it stands where it happens.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from runtime.block import Block as ParallelBlock
from runtime.data import BatchInput
from runtime.settings import MadeFor
from runtime.tables import read_table

HERE = Path(__file__).parent
INITIAL = read_table(HERE / "initialization.json", "steps", "decay")
RECIPES = {fqn: item["steps"] for fqn, item in INITIAL.items()}
DECAYS = {fqn: item["decay"] for fqn, item in INITIAL.items()}
IDLE = {fqn: item["idle"] for fqn, item in INITIAL.items() if "idle" in item}  # shapes of parameters that no block has
INPUTS = [  # of one sample; all else here is made for these sizes
    BatchInput("input_ids", (16,), torch.int64, "tokens", 64),
    BatchInput("labels", (16,), torch.int64, "targets", 64),
]
# Of the numbers at the top of train.py, those that all here depends on: others need another plan.
MADE_FOR = MadeFor(precision="bf16", tensor=2, micro=1, cuts=(0, 2))

CONSTANTS, BUFFERS = {}, []


def make_positions(labels):
    return torch.arange(16, device=labels.device)


def make_flat_labels(labels):
    return labels.reshape(-1)


def make_weight(labels):
    flat_labels = labels.reshape(-1)
    counted = flat_labels != -100
    return counted.sum()


class Embedding(ParallelBlock):
    """embedding · tensor 2 · ZeRO 1"""

    paths = ("tokens.weight", "positions.weight")

    def __init__(self, name, tensor, bindings, constants):
        super().__init__(name, tensor, bindings, constants)
        self.declare("tokens.weight", (64, 32), shard=0)
        self.declare("positions.weight", (16, 32), partial_gradient=True)

    def forward(self, input_ids, positions_2):
        tp = self.tensor
        # tokens
        embedded = tp.embedding(input_ids, self.tokens.weight, vocabulary=64)
        embedded_scattered = tp.reduce_scatter(embedded, dim=1)  # 1 KiB
        embedded_2_local = tp.slice(F.embedding(positions_2, self.positions.weight), dim=0, gradient="pad")
        return embedded_scattered + embedded_2_local


class Block(ParallelBlock):
    """blocks.0, blocks.2 · tensor 2, sequence-parallel · ZeRO 1 · recomputes attention"""

    recomputes = "attention"
    paths = (
        "attention_norm.weight", "attention_norm.bias", "attention.qkv.weight", "attention.qkv.bias",
        "attention.out.weight", "attention.out.bias", "feed_forward_norm.weight", "feed_forward_norm.bias",
        "feed_forward.up.weight", "feed_forward.up.bias", "feed_forward.down.weight",
        "feed_forward.down.bias",
    )

    def __init__(self, name, tensor, bindings, constants):
        super().__init__(name, tensor, bindings, constants)
        self.declare("attention_norm.weight", (32,), partial_gradient=True)
        self.declare("attention_norm.bias", (32,), partial_gradient=True)
        self.declare("attention.qkv.weight", (96, 32), shard=0, segments=(32, 32, 32), unit=8)
        self.declare("attention.qkv.bias", (96,), shard=0, segments=(32, 32, 32), unit=8)
        self.declare("attention.out.weight", (32, 32), shard=1, unit=8)
        self.declare("attention.out.bias", (32,), partial_gradient=True)
        self.declare("feed_forward_norm.weight", (32,), partial_gradient=True)
        self.declare("feed_forward_norm.bias", (32,), partial_gradient=True)
        self.declare("feed_forward.up.weight", (128, 32), shard=0)
        self.declare("feed_forward.up.bias", (128,), shard=0)
        self.declare("feed_forward.down.weight", (32, 128), shard=1)
        self.declare("feed_forward.down.bias", (32,), partial_gradient=True)

    def core(self, total):
        # attention
        query, key, value = total.split(16, dim=2)
        query_2 = query.reshape(-1, 16, 2, 8).transpose(1, 2)
        key_2 = key.reshape(-1, 16, 2, 8).transpose(1, 2)
        value_2 = value.reshape(-1, 16, 2, 8).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query_2, key_2, value_2, is_causal=True)
        return attended.transpose(1, 2).reshape(-1, 16, 16)

    def forward(self, x):
        tp = self.tensor
        # attention.qkv
        normed_gathered = tp.all_gather(  # 512 bytes
            F.layer_norm(x, (32,), self.attention_norm.weight, self.attention_norm.bias), dim=1,
        )
        total = F.linear(normed_gathered, self.attention.qkv.weight, self.attention.qkv.bias)
        merged = checkpoint(self.core, total, use_reentrant=False)
        # attention.out
        projected_2_scattered = tp.reduce_scatter(F.linear(merged, self.attention.out.weight), dim=1)  # 1 KiB
        update = projected_2_scattered + self.attention.out.bias
        x_2 = x + update
        # feed_forward.up
        normed_2_gathered = tp.all_gather(  # 512 bytes
            F.layer_norm(x_2, (32,), self.feed_forward_norm.weight, self.feed_forward_norm.bias), dim=1,
        )
        total_2 = F.linear(normed_2_gathered, self.feed_forward.up.weight, self.feed_forward.up.bias)
        # feed_forward.gelu
        expanded = F.gelu(total_2, approximate="tanh")
        # feed_forward.down
        projected_4_scattered = tp.reduce_scatter(  # 1 KiB
            F.linear(expanded, self.feed_forward.down.weight), dim=1,
        )
        update_2 = projected_4_scattered + self.feed_forward.down.bias
        return x_2 + update_2


class BlockStored(ParallelBlock):
    """blocks.1 · tensor 2, sequence-parallel · ZeRO 1"""

    paths = (
        "attention_norm.weight", "attention_norm.bias", "attention.qkv.weight", "attention.qkv.bias",
        "attention.out.weight", "attention.out.bias", "feed_forward_norm.weight", "feed_forward_norm.bias",
        "feed_forward.up.weight", "feed_forward.up.bias", "feed_forward.down.weight",
        "feed_forward.down.bias",
    )

    def __init__(self, name, tensor, bindings, constants):
        super().__init__(name, tensor, bindings, constants)
        self.declare("attention_norm.weight", (32,), partial_gradient=True)
        self.declare("attention_norm.bias", (32,), partial_gradient=True)
        self.declare("attention.qkv.weight", (96, 32), shard=0, segments=(32, 32, 32), unit=8)
        self.declare("attention.qkv.bias", (96,), shard=0, segments=(32, 32, 32), unit=8)
        self.declare("attention.out.weight", (32, 32), shard=1, unit=8)
        self.declare("attention.out.bias", (32,), partial_gradient=True)
        self.declare("feed_forward_norm.weight", (32,), partial_gradient=True)
        self.declare("feed_forward_norm.bias", (32,), partial_gradient=True)
        self.declare("feed_forward.up.weight", (128, 32), shard=0)
        self.declare("feed_forward.up.bias", (128,), shard=0)
        self.declare("feed_forward.down.weight", (32, 128), shard=1)
        self.declare("feed_forward.down.bias", (32,), partial_gradient=True)

    def forward(self, x):
        tp = self.tensor
        # attention.qkv
        normed_gathered = tp.all_gather(  # 512 bytes
            F.layer_norm(x, (32,), self.attention_norm.weight, self.attention_norm.bias), dim=1,
        )
        # attention
        query, key, value = F.linear(
            normed_gathered, self.attention.qkv.weight, self.attention.qkv.bias,
        ).split(16, dim=2)
        query_2 = query.reshape(-1, 16, 2, 8).transpose(1, 2)
        key_2 = key.reshape(-1, 16, 2, 8).transpose(1, 2)
        value_2 = value.reshape(-1, 16, 2, 8).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query_2, key_2, value_2, is_causal=True)
        merged = attended.transpose(1, 2).reshape(-1, 16, 16)
        # attention.out
        projected_2_scattered = tp.reduce_scatter(F.linear(merged, self.attention.out.weight), dim=1)  # 1 KiB
        update = projected_2_scattered + self.attention.out.bias
        x_2 = x + update
        # feed_forward.up
        normed_2_gathered = tp.all_gather(  # 512 bytes
            F.layer_norm(x_2, (32,), self.feed_forward_norm.weight, self.feed_forward_norm.bias), dim=1,
        )
        total_2 = F.linear(normed_2_gathered, self.feed_forward.up.weight, self.feed_forward.up.bias)
        # feed_forward.gelu
        expanded = F.gelu(total_2, approximate="tanh")
        # feed_forward.down
        projected_4_scattered = tp.reduce_scatter(  # 1 KiB
            F.linear(expanded, self.feed_forward.down.weight), dim=1,
        )
        update_2 = projected_4_scattered + self.feed_forward.down.bias
        return x_2 + update_2


class Head(ParallelBlock):
    """head · tensor 2, sequence-parallel · ZeRO 1"""

    paths = ("norm.weight", "norm.bias", "tokens.weight")

    def __init__(self, name, tensor, bindings, constants):
        super().__init__(name, tensor, bindings, constants)
        self.declare("norm.weight", (32,), partial_gradient=True)
        self.declare("norm.bias", (32,), partial_gradient=True)
        self.declare("tokens.weight", (64, 32), shard=0)

    def forward(self, x, flat_labels):
        tp = self.tensor
        x_2_gathered = tp.all_gather(F.layer_norm(x, (32,), self.norm.weight, self.norm.bias), dim=1)  # 512 bytes
        reshaped = F.linear(x_2_gathered, self.tokens.weight).reshape(-1, 32)
        return tp.cross_entropy(reshaped, flat_labels, classes=64)


CHAIN = [  # name, class, prefix of its state keys
    ("embedding", Embedding, ""),
    ("blocks.0", Block, "blocks.0."),
    ("blocks.1", BlockStored, "blocks.1."),
    ("blocks.2", Block, "blocks.2."),
    ("head", Head, ""),
]
CROSSING = {  # shape of one micro-batch, dtype, dim split over the tensor axis, whether a gradient returns
    "x": ((1, 16, 32), torch.bfloat16, 1, True),
}
SHARED = {"tokens.weight": (0, 4)}
ALIASES = {"head.weight": "tokens.weight"}


class Stage(nn.Module):
    """Blocks first to last (exclusive) of the chain; the last stage returns the loss."""

    def __init__(self, first, last, tensor):
        super().__init__()
        self.first, self.last = first, last
        self.receives = {0: (), 2: ("x",)}[first]
        self.sends = {0: ("x",), 2: ()}[first]
        blocks, owners = [], {}
        for name, cls, prefix in CHAIN[first:last]:
            keys = {path: f"{prefix}{path}" for path in cls.paths}
            block = cls(name, tensor, keys, CONSTANTS)
            for path in block.declarations:
                if keys[path] in owners:
                    block.share(path, *owners[keys[path]])
                owners.setdefault(keys[path], (block, path))
            blocks.append(block)
        self.embedding = nn.ModuleList(blocks[max(0 - first, 0) : max(1 - first, 0)])
        self.blocks = nn.ModuleList(blocks[max(1 - first, 0) : max(4 - first, 0)])
        self.head = nn.ModuleList(blocks[max(4 - first, 0) : max(5 - first, 0)])

    def units(self):
        """Indices of the blocks that are sharded together: those that share a parameter, or one with others that do."""
        units = []
        for index in range(self.first, self.last):
            shared = [set(blocks) for blocks in SHARED.values() if index in blocks]
            tied = [unit for unit in units if any(not blocks.isdisjoint(unit) for blocks in shared)]
            units = [unit for unit in units if unit not in tied]
            units.append(sorted([index, *(member for unit in tied for member in unit)]))
        return sorted(units)

    def forward(self, *received, input_ids, labels):
        if received:
            (x,) = received
        if self.embedding:
            positions = make_positions(labels)
        if self.head:
            flat_labels = make_flat_labels(labels)
        for block in self.embedding:
            x = block(input_ids, positions)
        for block in self.blocks:
            x = block(x)
        for block in self.head:
            loss = block(x, flat_labels)
        if self.last == 5:
            return loss
        return x


def weigh(input_ids, labels):
    """Weight of all terms of one micro-batch's loss."""
    return (make_weight(labels),)
