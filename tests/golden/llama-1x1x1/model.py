"""llama: the model as it runs on 1 device.

Local sizes everywhere; `tp` is the tensor axis, and every collective on it stands where it happens.
"""

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from runtime.block import Block as ParallelBlock
from runtime.data import BatchInput
from runtime.initialize import decode_constant
from runtime.settings import MadeFor
from runtime.state import StateBuffer
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
MADE_FOR = MadeFor(precision="fp32", tensor=1)

STORED = read_table(HERE / "constants.json", "data", "dtype", "shape", "names", "fixed")
CONSTANTS = {
    key: decode_constant(item["data"], getattr(torch, item["dtype"]), item["shape"]) for key, item in STORED.items()
}
BUFFERS = [  # those that the model's state holds
    StateBuffer(tuple(item["names"]), CONSTANTS[key], item["fixed"]) for key, item in STORED.items() if item["names"]
]


@cache
def constant(key, device):
    """A constant of the model on a device."""
    return CONSTANTS[key].to(device)


def make_cosine_and_sine(rotary_inv_freq):
    # rotary
    positions = torch.arange(16, dtype=torch.float32, device=rotary_inv_freq.device)
    angles = torch.outer(positions, rotary_inv_freq)
    angles_2 = torch.cat((angles, angles), dim=-1)
    cosine = angles_2.cos()
    sine = angles_2.sin()
    return cosine, sine


def make_flat_labels(labels):
    return labels.reshape(-1)


def make_weight(labels):
    flat_labels = labels.reshape(-1)
    counted = flat_labels != -100
    return counted.sum()


class Embedding(ParallelBlock):
    """embedding · ZeRO 0 · recomputed whole"""

    recomputes = "all"
    paths = ("tokens.weight",)

    def __init__(self, name, tensor, bindings, constants):
        super().__init__(name, tensor, bindings, constants)
        self.declare("tokens.weight", (64, 32))

    def forward(self, input_ids):
        return F.embedding(input_ids, self.tokens.weight)


class DecoderLayer(ParallelBlock):
    """layers.0 to layers.2 · ZeRO 0 · recomputed whole"""

    recomputes = "all"
    paths = (
        "attention_norm.weight", "attention.query.weight", "attention.key.weight", "attention.value.weight",
        "attention.out.weight", "feed_forward_norm.weight", "feed_forward.gate.weight",
        "feed_forward.up.weight", "feed_forward.down.weight",
    )

    def __init__(self, name, tensor, bindings, constants):
        super().__init__(name, tensor, bindings, constants)
        self.declare("attention_norm.weight", (32,))
        self.declare("attention.query.weight", (32, 32))
        self.declare("attention.key.weight", (16, 32))
        self.declare("attention.value.weight", (16, 32))
        self.declare("attention.out.weight", (32, 32))
        self.declare("feed_forward_norm.weight", (32,))
        self.declare("feed_forward.gate.weight", (352, 32))
        self.declare("feed_forward.up.weight", (352, 32))
        self.declare("feed_forward.down.weight", (32, 352))

    def forward(self, x, cosine, sine):
        # attention_norm
        normed = F.rms_norm(x, (32,), self.attention_norm.weight, eps=1e-05)
        # attention
        queries = F.linear(normed, self.attention.query.weight).reshape(-1, 16, 4, 8).transpose(1, 2)
        keys = F.linear(normed, self.attention.key.weight).reshape(-1, 16, 2, 8).transpose(1, 2)
        values = F.linear(normed, self.attention.value.weight).reshape(-1, 16, 2, 8).transpose(1, 2)
        part, part_2 = queries.chunk(2, dim=-1)
        queries_2 = queries * cosine + torch.cat((-part_2, part), dim=-1) * sine
        part_3, part_4 = keys.chunk(2, dim=-1)
        keys_2 = keys * cosine + torch.cat((-part_4, part_3), dim=-1) * sine
        attended = F.scaled_dot_product_attention(queries_2, keys_2, values, is_causal=True, enable_gqa=True)
        merged = attended.transpose(1, 2).reshape(-1, 16, 32)
        # attention.out
        update = F.linear(merged, self.attention.out.weight)
        x_2 = x + update
        # feed_forward_norm
        normed_2 = F.rms_norm(x_2, (32,), self.feed_forward_norm.weight, eps=1e-05)
        # feed_forward
        activated = F.silu(F.linear(normed_2, self.feed_forward.gate.weight))
        gated = activated * F.linear(normed_2, self.feed_forward.up.weight)
        # feed_forward.down
        update_2 = F.linear(gated, self.feed_forward.down.weight)
        return x_2 + update_2


class Head(ParallelBlock):
    """head · ZeRO 0 · recomputed whole"""

    recomputes = "all"
    paths = ("norm.weight", "head.weight")

    def __init__(self, name, tensor, bindings, constants):
        super().__init__(name, tensor, bindings, constants)
        self.declare("norm.weight", (32,))
        self.declare("head.weight", (64, 32))

    def forward(self, x, flat_labels):
        # norm
        normed = F.rms_norm(x, (32,), self.norm.weight, eps=1e-05)
        reshaped = F.linear(normed, self.head.weight).reshape(-1, 64)
        return F.cross_entropy(reshaped, flat_labels, reduction="sum")


CHAIN = [  # name, class, prefix of its state keys
    ("embedding", Embedding, ""),
    *((f"layers.{i}", DecoderLayer, f"layers.{i}.") for i in range(3)),
    ("head", Head, ""),
]
CROSSING = {}
SHARED = {}
ALIASES = {}


class Stage(nn.Module):
    """Blocks first to last (exclusive) of the chain; the last stage returns the loss."""

    def __init__(self, first, last, tensor):
        super().__init__()
        self.first, self.last = first, last
        self.receives = {0: ()}[first]
        self.sends = {0: ()}[first]
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
        self.layers = nn.ModuleList(blocks[max(1 - first, 0) : max(4 - first, 0)])
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
        if self.layers:
            cosine, sine = make_cosine_and_sine(constant("rotary.inv_freq", input_ids.device))
        if self.head:
            flat_labels = make_flat_labels(labels)
        for block in self.embedding:
            x = checkpoint(block, input_ids, use_reentrant=False)
        for block in self.layers:
            x = checkpoint(block, x, cosine, sine, use_reentrant=False)
        for block in self.head:
            loss = checkpoint(block, x, flat_labels, use_reentrant=False)
        return loss


def weigh(input_ids, labels):
    """Weight of all terms of one micro-batch's loss."""
    return (make_weight(labels),)
