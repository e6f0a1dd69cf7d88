"""Dropout in emitted programs: one mask where an activation is replicated, another where it is split; the same again when
a forward pass is repeated or a run resumed. Float64 on gloo."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.matrix.build import Row
from tests.matrix.programs import emitted, losses, small_graph
from tests.matrix.reference import worst_gradient
from tests.matrix.workers import Workers
from tests.wide import wide

pytestmark = pytest.mark.slow
RATE = 0.1
TRAINS = "    train(build(), options)\n"
SPIES = '''    from pathlib import Path
    from runtime.random_stream import RandomStream
    plain, masks = RandomStream.dropout, []

    def spied(stream, x, p, site, sharded):
        dropped = plain(stream, x, p, site, sharded)
        place = (stream.step, stream.microbatch, stream.data_rank, stream.name, site, stream.tensor_rank, sharded)
        masks.append((place, dropped != 0))
        return dropped

    RandomStream.dropout = spied
    program = build()
    train(program, options)
    torch.save(masks, Path(__file__).with_name(f"masks-{program.world.rank}.pt"))
'''


class Place(NamedTuple):
    """Where a mask was used."""

    step: int
    microbatch: int
    data_rank: int
    block: str
    site: int
    tensor_rank: int
    sharded: bool


def masks_of(workers: Workers, row: Row, directory: Path, steps: int = 2) -> Mapping[Place, list[Tensor]]:
    """Every mask that any rank drew, by place."""
    program = emitted(small_graph("gpt", dropout=RATE), row, directory)
    program.edit("train.py", TRAINS, SPIES)
    program.train(workers, steps)
    found: dict[Place, list[Tensor]] = defaultdict(list)
    for rank in range(row.devices):
        for place, mask in torch.load(directory / f"masks-{rank}.pt"):
            found[Place(*place)].append(mask)
    return found


def distinct(masks: list[Tensor]) -> bool:
    return not any(a.shape == b.shape and torch.equal(a, b) for a, b in itertools.combinations(masks, 2))


def test_replicated_activations_have_one_mask_on_all_tensor_ranks(workers: Workers, tmp_path: Path) -> None:
    masks = masks_of(workers, Row(tensor=2, data=2, accumulation=2), tmp_path / "program")
    assert not any(place.sharded for place in masks)
    first = {place: drawn[0] for place, drawn in masks.items() if place.tensor_rank == 0}
    assert {(p.step, p.microbatch, p.data_rank) for p in first} == set(itertools.product(range(2), repeat=3))
    assert len({(p.block, p.site) for p in first}) == 5, "after the embedding, and twice in each of two layers"
    for place, mask in first.items():
        (other,) = masks[place._replace(tensor_rank=1)]
        assert torch.equal(mask, other), place
    assert distinct(list(first.values())), "steps, micro-batches, data ranks, layers and sites all differ"
    kept = torch.cat([mask.flatten() for mask in first.values()]).double().mean().item()
    assert kept == pytest.approx(1 - RATE, abs=0.01)


def test_split_activations_have_a_mask_of_their_own_on_every_rank(workers: Workers, tmp_path: Path) -> None:
    masks = masks_of(workers, Row(tensor=2, sequence_parallel=True), tmp_path / "program")
    split = {place: drawn[0] for place, drawn in masks.items() if place.sharded}
    assert {place.tensor_rank for place in split} == {0, 1} and {place.step for place in split} == {0, 1}
    assert distinct(list(split.values()))


@pytest.mark.parametrize("row", [
    Row(tensor=2, data=2, sequence_parallel=True, zero=3), wide(Row(tensor=2, pipeline=2, accumulation=2, zero=1)),
], ids=lambda row: row.label)
def test_recomputation_repeats_the_masks(workers: Workers, row: Row, tmp_path: Path) -> None:
    found = {}
    for kind in ("none", "selective", "full", "mixed"):
        decisions = Row(**{**vars(row), "recompute": kind})
        program = emitted(small_graph("gpt", dropout=RATE), decisions, tmp_path / kind)
        gradients = tmp_path / f"{kind}.pt"
        found[kind] = losses(program.train(workers, 3, "--dump-gradients", str(gradients))), torch.load(gradients)
    expected, gradients_expected = found["none"]
    for kind, (got, gradients_got) in found.items():
        assert got == pytest.approx(expected, rel=1e-12), kind
        assert worst_gradient(gradients_got, gradients_expected)[1] <= 1e-3, kind
    masks = masks_of(workers, Row(**{**vars(row), "recompute": "full"}), tmp_path / "spied", steps=1)
    assert all(torch.equal(drawn[0], again) for drawn in masks.values() for again in drawn[1:])
    repeated = {place.block for place, drawn in masks.items() if len(drawn) == 2}
    assert repeated == {"blocks.0", "blocks.1"}, "drawn in the forward pass and again (all but a block's last)"


def test_masks_of_replicated_activations_do_not_depend_on_the_plan(workers: Workers, tmp_path: Path) -> None:
    """Without dropout on the (split) attention weights, tensor parallelism and pipelining change nothing."""
    found = []
    for row in (Row(accumulation=2), Row(tensor=2, accumulation=2), Row(tensor=2, pipeline=2, accumulation=2)):
        program = emitted(small_graph("gpt", dropout=RATE), row, tmp_path / row.label)
        program.edit("model.py", f"dropout_p={RATE}, ", "")
        gradients = tmp_path / f"{row.label}.pt"
        found.append((losses(program.train(workers, 3, "--dump-gradients", str(gradients))), torch.load(gradients)))
    for got, gradients_got in found[1:]:
        assert got == pytest.approx(found[0][0], rel=1e-10)
        assert worst_gradient(gradients_got, found[0][1])[1] <= 1


@pytest.mark.wide
def test_a_resumed_run_draws_the_same_masks(workers: Workers, tmp_path: Path) -> None:
    row = Row(tensor=2, data=2, sequence_parallel=True, zero=2, accumulation=2, recompute="mixed")
    program = emitted(small_graph("gpt", dropout=RATE), row, tmp_path / "program")
    whole = losses(program.train(workers, 4))
    kept = str(tmp_path / "kept")
    begun = losses(program.train(workers, 2, "--checkpoint", kept))
    assert begun + losses(program.train(workers, 4, "--checkpoint", kept)) == pytest.approx(whole, rel=1e-12)
    plain = emitted(small_graph("gpt"), row, tmp_path / "plain")
    assert losses(plain.train(workers, 1))[0] != pytest.approx(whole[0], rel=1e-6), "dropout does something"
