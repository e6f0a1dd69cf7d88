"""The plain model in one process: the oracle that knows nothing of plans."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.ir.graph import ModelGraph
from planner.trace.recipes import default_dtype
from planner.trace.source import ModelSource
from runtime.data import Batches, BatchInput, SyntheticTokens
from runtime.initialize import initial_value

LEARNING_RATE, WARMUP, WEIGHT_DECAY, CLIP, BETAS, EPSILON = 1e-2, 2, 0.1, 0.5, (0.9, 0.95), 1e-8
ARGUMENTS = (
    "--learning-rate", str(LEARNING_RATE), "--warmup", str(WARMUP), "--weight-decay", str(WEIGHT_DECAY),
    "--clip", str(CLIP), "--seed", "3",
)
SEED = 3
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Reference:
    """First-step loss and gradients, and the loss of each of the steps."""

    gradients: Mapping[str, Tensor]
    losses: tuple[float, ...]
    norms: tuple[float, ...]


def build_in(source: ModelSource, dtype: torch.dtype) -> nn.Module:
    """The plain model. Constants too (rotary frequencies) are made in ``dtype``, as the tracer makes them."""
    with default_dtype(dtype):
        return source.build()


def give_start(model: nn.Module, graph: ModelGraph, prefix: str = "") -> None:
    """Let the plain model begin as the emitted program does. ``prefix``: of its names before the graph's."""
    start: dict[str, Tensor] = {}
    for p in graph.parameters:
        steps = [(step.op, *step.arguments) for step in p.init]
        value = initial_value(p.fqn, p.type.sizes(1), getattr(torch, p.type.dtype), steps, SEED)
        start |= dict.fromkeys((prefix + name for name in (p.fqn, *p.aliases)), value)
    missing, unexpected = model.load_state_dict(start, strict=False)
    assert not unexpected and not set(missing) & dict(model.named_parameters()).keys()


def batches_of(graph: ModelGraph, total: int) -> Batches:
    """What an emitted program trains on, by step, all ranks together."""
    inputs = [
        BatchInput(i.name, i.type.sizes(1)[1:], getattr(torch, i.type.dtype), i.role, i.high, i.shown, i.like)
        for i in graph.batch_inputs
    ]
    tokens = next((SyntheticTokens(SEED, i.below) for i in inputs if i.role == "tokens"), None)
    return Batches(inputs, tokens, SEED, total, 0, 1, torch.device("cpu"))


def train_plainly(model: nn.Module, batches: list[Mapping[str, Tensor]]) -> Reference:
    """Train the plain ``model`` (its weights as they are) on whole batches, with AdamW, clipping and warm-up."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=LEARNING_RATE, betas=BETAS, eps=EPSILON,
    )
    gradients: dict[str, Tensor] = {}
    losses, norms = [], []
    for step, batch in enumerate(batches, start=1):
        logits = model(*(given for name, given in batch.items() if name != "labels"))
        loss = F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())
        loss.backward()
        if not gradients:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
        factor = min(1.0, CLIP / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP)
        for p in (p for p in model.parameters() if p.requires_grad):
            assert p.grad is not None
            p.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm)
    return Reference(gradients, tuple(losses), tuple(norms))


def worst_gradient(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[str, float]:
    """The parameter whose gradient is furthest off, in units of the tolerance: max|g - ref| over
    :data:`TOLERANCE` x the larger of max|ref| and 1e-3 of the model's largest gradient. Missing ones are infinitely off;
    parameters without elements are not trained, and have none."""
    expected = {name: reference for name, reference in expected.items() if reference.numel()}
    largest = max(float(g.abs().max()) for g in expected.values())
    worst = ("", 0.0)
    for name, reference in expected.items():
        if name not in actual or actual[name].shape != reference.shape:
            return name, math.inf
        tolerance = TOLERANCE * max(float(reference.abs().max()), 1e-3 * largest)
        error = float((actual[name] - reference).abs().max()) / tolerance
        if not error <= worst[1]:
            worst = (name, error)
    return worst
