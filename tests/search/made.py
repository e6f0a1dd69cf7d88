"""Costed chains made by hand: no model, no hardware behind them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hardware_profiles import Chip, Cluster, EfficiencyCurve, Level, Link
from planner.ir.body import Body, BodyValue
from planner.ir.costed import BlockCost, CostedGraph, Recompute, StateCost
from planner.ir.graph import Block, ModelGraph, Parameter
from planner.ir.placement import REPLICATE, BodyPlacement
from planner.ir.types import BatchMultiple, TensorType
from planner.search.candidates import Candidate

HIDDEN = TensorType((BatchMultiple(1), 4), "float32")
SCALAR = TensorType((), "float32")


def make_cluster(devices: int, memory: int, bandwidth: float = 1e9) -> Cluster:
    """A round cluster: 1 PFLOP/s chips, slow links, no reserve."""
    curve = EfficiencyCurve(1.0, 0.0, 0.0, 1)
    chip = Chip("chip", memory, 1e12, {"bfloat16": 1e15, "float32": 1e15}, {"bfloat16": curve, "float32": curve},
                1.0, 1.0, 1.0, 0.0, 0.0, 0)
    link = Link("link", bandwidth, 1e-6, 1.0, 0.0, 1e9)
    return Cluster("made", chip, (Level("all", devices, link),), 1, devices)


def make_graph(bodies: Sequence[str], *, tied: bool = False) -> ModelGraph:
    """A chain of blocks whose bodies have the given names; each block has one parameter of its own, or the first and the last
    block share theirs."""
    owners = [0 if tied and i == len(bodies) - 1 else i for i in range(len(bodies))]
    distinct = tuple(
        Body(name, (BodyValue("x", HIDDEN),), (BodyValue("weight", HIDDEN),), (), (), ("x",))
        for name in dict.fromkeys(bodies)
    )
    blocks = tuple(
        Block(f"blocks.{i}", body, (f"v{i}",), (f"v{i + 1}",), (("weight", f"blocks.{owners[i]}.weight"),), ())
        for i, body in enumerate(bodies)
    )
    parameters = tuple(Parameter(f"blocks.{i}.weight", TensorType((4, 4), "float32"), ()) for i in dict.fromkeys(owners))
    context = Body("Context", (), (), (), (), ())
    return ModelGraph("made", (), parameters, (), context, distinct, blocks, f"v{len(bodies)}", "weight", "float32", 4)


def make_costed(
    graph: ModelGraph, seed: int, *, zeros: Sequence[int] = (0,), levels: Sequence[Recompute] = ("none", "full"),
    degree: int = 1, microbatch: int = 1, crossing: int | Sequence[int] = 1000,
) -> CostedGraph:
    """Random prices: recomputation trades time for saved bytes, ZeRO trades traffic for persistent bytes. ``crossing``: over
    every cut, or the cuts have these in turn."""
    draw = random.Random(seed)
    blocks, states, placements = {}, {}, {}
    for body in graph.bodies:
        work, size, saved = draw.uniform(0.5, 2.0), draw.randint(10, 40), draw.randint(10, 60)
        blocks[body.name] = {level: _block(draw, level, work, saved) for level in levels}
        states[body.name] = {zero: _state(draw, zero, size) for zero in zeros}
        placements[body.name] = BodyPlacement(body.name, degree, (REPLICATE,), (REPLICATE,), (), (REPLICATE,))
    sizes = itertools.cycle((crossing,) if isinstance(crossing, int) else crossing)
    cuts = dict(zip(range(1, len(graph.blocks)), sizes))
    return CostedGraph(graph, degree, microbatch, (placements,), (blocks,), (states,), (cuts,))


@dataclass(frozen=True)
class Always:
    """The same prices for every candidate, wherever they are asked for."""

    costed: CostedGraph

    def __call__(self, candidate: Candidate) -> CostedGraph:
        return self.costed


def _block(draw: random.Random, level: Recompute, work: float, saved: int) -> BlockCost:
    part = {"none": 0.0, "selective": 0.3, "full": 1.0}[level]
    kept = max(1, round(saved * (1 - 0.9 * part)))
    input_s = work * draw.uniform(0.9, 1.1)
    return BlockCost(work, input_s + work, input_s, work, part * work, 0.1 * work, 0.1 * work, 0.0,
                     *(0.0,) * 4, kept, kept // 2, draw.randint(1, 10), 16, 1, 3e12, waiting_bytes=kept // 3)


def _state(draw: random.Random, zero: int, size: int) -> StateCost:
    shard = [size, size // 2, size // 4, size // 8]
    gather = {2: size // 2, 3: size}.get(zero, 0)
    traffic = {0: 0.0, 1: 0.0, 2: 0.1, 3: 0.2}[zero]
    return StateCost(shard[0] if zero < 3 else shard[3], shard[0] if zero < 2 else shard[2], 2 * shard[min(zero, 1)],
                     gather, draw.uniform(0.2, 0.5), traffic / 2 if zero == 3 else 0.0, traffic, 0.1, lasting_bytes=gather // 3)
