"""Random nets under random plans: emitted, rehearsed, and compared with what was predicted; or trained.

    python benchmarks/run_drawn.py [--from 0] [--count 100] [--gradients]

Net and plan follow from the seed, so what parts can be looked at again. Prints a line for every rank that parts, as
``benchmarks/run_zoo.py`` does; ``--gradients``: one for every plan whose loss or gradients, of a step of real ranks in float64,
are not the plain model's (``benchmarks/zoo_gradients.py``). How many were right comes last. Needs transformers.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.run_zoo import DTYPES, SEQUENCE, compare, show  # noqa: E402
from benchmarks.zoo_gradients import examine, trace  # noqa: E402
from planner.ir.errors import ShardwrightError  # noqa: E402
from planner.trace import load_model, trace_model  # noqa: E402
from tests.matrix.build import Row  # noqa: E402
from tests.matrix.workers import Workers  # noqa: E402
from tests.rehearse.server import Server  # noqa: E402

SPLIT = ("interleaved-zero-bubble", "zbv")
SEVERAL = (*SPLIT, "interleaved-1f1b")


def row_of(draw: random.Random) -> Row:
    """A plan that any of the nets can have."""
    pipeline = draw.choice((1, 2, 2))
    schedule = draw.choice(("1f1b", "gpipe", *SEVERAL, *SPLIT)) if pipeline > 1 else "1f1b"
    tensor = draw.choice((1, 2, 2))
    data = draw.choice((1, 2))
    split = schedule in SPLIT
    return Row(
        tensor=tensor, sequence_parallel=tensor > 1 and draw.random() < 0.4, pipeline=pipeline, schedule=schedule, data=data,
        zero=draw.choice((0, 1, 2) if split else (0, 1, 2, 3)) if data > 1 else 0,
        recompute="none" if split else draw.choice(("none", "selective", "full")),
        accumulation=draw.choice((2, 4)), microbatch=draw.choice((1, 2)),
    )


def rehearse(seeds: range) -> Iterator[bool]:
    """Whether calls and memory of each rank that stands for others are as predicted."""
    server = Server()
    try:
        for seed in seeds:
            draw = random.Random(f"plan {seed}")
            row, precision = row_of(draw), draw.choice(("fp32", "fp32", "bf16"))
            try:
                source = load_model(f"{ROOT / 'benchmarks' / 'zoo' / 'drawn.py'}:make", {"name": str(seed)}, None)
                graph = trace_model(source, sequence=SEQUENCE, dtype=DTYPES[precision])
                found = list(compare(graph, row, precision, server))
            except (ShardwrightError, AssertionError) as error:
                print(f"{seed} {precision} {row.label}: {error}", flush=True)
                yield False
                continue
            right = [not rank["parts"] and not rank["calls"] for rank in found]
            if not all(right):
                show(f"{seed} {precision}", {"blocks": len(graph.blocks), "kinds": len(graph.bodies), "ranks": found})
            yield from right
    finally:
        server.stop()


def train(seeds: range) -> Iterator[bool]:
    """Whether loss and gradients of each plan, over four ranks at most, are the plain model's."""
    workers = Workers(4)
    try:
        for seed in seeds:
            row = row_of(random.Random(f"plan {seed}"))
            row = replace(row, data=1, zero=0) if row.devices > 4 else row
            try:
                found = examine(trace("drawn", str(seed)), row, seed, workers)
            except ShardwrightError as error:
                found = {"refused": str(error)}
            if "left_out" in found:
                continue
            if not found.get("right"):
                print(f"{seed} {row.label}: {found}", flush=True)
            yield bool(found.get("right"))
    finally:
        workers.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--gradients", action="store_true", help="train a step instead of rehearsing one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.first, options.first + options.count)
    right = list(train(seeds) if options.gradients else rehearse(seeds))
    what = "plans" if options.gradients else "ranks"
    print(f"seeds {seeds.start} to {seeds.stop - 1}: {sum(right)} of {len(right)} {what} right")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
