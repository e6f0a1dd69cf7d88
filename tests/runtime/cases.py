"""What the workers run."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime import claim, launch
from runtime.agreement import check_alike
from runtime.data import Batches, make_batches
from runtime.errors import ProgramError
from runtime.initialize import initial_value
from runtime.loop import Trainer, train
from runtime.parameters import piece
from runtime.schedule import run_step
from tests.runtime.toy_program import DECAYS, INPUTS, RECIPES, PlainModel, Toy, build


def plain(seed: int, dtype: torch.dtype = torch.float64) -> PlainModel:
    """The plain model with the initial values of a seed."""
    model = PlainModel().to(dtype)
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            parameter.copy_(initial_value(fqn, parameter.shape, dtype, RECIPES[fqn], seed))
    return model


def whole_batch(trainer: Trainer, step: int) -> dict[str, Tensor]:
    """The global batch."""
    batches = trainer.batches
    samples = [batches._sample(step * batches.total + index) for index in range(batches.total)]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def gradient_error(toy: Toy) -> tuple[float, float, float]:
    """The largest difference from the plain model's of any gradient element, the loss and the norm; two passes."""
    trainer = Trainer(build(toy), launch.parse_options([]))
    worst = [0.0, 0.0, 0.0]
    for _ in range(2):
        loss, norm = trainer.gradients()
        model = plain(0)
        batch = whole_batch(trainer, 0)
        reference = model(**batch) / batch["labels"].numel()
        reference.backward()
        expected = {fqn: parameter.grad for fqn, parameter in model.named_parameters()}
        for held in trainer.parameters:
            assert held.gradient is not None or not held.local.numel(), held.fqn
            for box in held.boxes:
                offsets, sizes, _ = box
                want = piece(expected[held.fqn], (sizes, sizes, offsets))
                worst[0] = max(worst[0], float((piece(held.gradient, box) - want).abs().max()))
            held.parameter.grad = None
        square = sum(float(gradient.square().sum()) for gradient in expected.values())
        worst[1] = max(worst[1], abs(loss - float(reference)))
        worst[2] = max(worst[2], abs(norm - square**0.5))
    dist.barrier()
    return tuple(worst)


def trajectory(toy: Toy, arguments: list[str]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step that a run with these arguments makes; saves its last step where asked."""
    options = launch.parse_options(arguments)
    trainer = Trainer(build(toy), options)
    reports = []
    while trainer.done < options.steps:
        loss, norm, _ = trainer.step()
        reports.append((loss, norm))
    trainer.save()
    return reports


def diverging(toy: Toy, arguments: list[str]) -> str:
    """What ends a run after its first step, from which on a weight of the first stage is NaN."""
    trainer = Trainer(build(toy), launch.parse_options(arguments))
    trainer.step()
    trainer.save()
    if trainer.world.pipeline_rank == 0:
        trainer.parameters[0].local.fill_(math.nan)
    try:
        trainer.step()
    except ProgramError as error:
        return str(error)
    return ""


def cut_data(toy: Toy, directory: str) -> tuple[float, str]:
    """The loss of a step, and what ends the next, before which the token file of rank 1 alone is cut behind its header."""
    path = Path(directory) / f"tokens-{dist.get_rank()}"
    header = json.dumps({"format": "shardwright-tokens", "version": 1, "dtype": "uint16", "tokens": 1000}).encode() + b"\n"
    path.write_bytes(header + bytes(2000))
    trainer = Trainer(build(toy), launch.parse_options(["--data", str(path)]))
    loss = trainer.step()[0]
    if dist.get_rank() == 1:
        os.truncate(path, len(header))
    try:
        trainer.step()
    except ProgramError as error:
        return loss, str(error)
    return loss, ""


def plain_trajectory(steps: int, batch: int, seed: int, clip: float) -> tuple[list[tuple[float, float]], PlainModel]:
    """The same of the plain model in one process, with torch's AdamW and clipping."""
    model = plain(seed)
    batches = toy_batches(seed, batch)
    decayed = [p for fqn, p in model.named_parameters() if DECAYS.get(fqn, True)]
    spared = [p for fqn, p in model.named_parameters() if not DECAYS.get(fqn, True)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    reports = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min((step + 1) / 2, 1.0)
        inputs = batches.at(step)
        loss = model(**inputs) / inputs["labels"].numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        reports.append((loss.item(), norm.item()))
    return reports, model


def toy_batches(seed: int, total: int) -> Batches:
    """The global batches, on one process."""
    return make_batches(INPUTS, None, seed, total, 0, 1, torch.device("cpu"))


def start_of(toy: Toy, seed: int) -> float:
    """The largest difference between this rank's initial values and the whole ones."""
    trainer = Trainer(build(toy), launch.parse_options(["--seed", str(seed)]))
    whole, worst = dict(plain(seed).named_parameters()), 0.0
    for held in trainer.parameters:
        for box in held.boxes:
            offsets, sizes, _ = box
            want = piece(whole[held.fqn].detach(), (sizes, sizes, offsets))
            worst = max(worst, float((piece(held.local, box) - want).abs().max()))
    return worst


def first_loss(toy: Toy) -> tuple[float, float]:
    """(loss, gradient norm) of the first step."""
    return Trainer(build(toy), launch.parse_options([])).gradients()


def receive_buffers(toy: Toy) -> tuple[int, int]:
    """Distinct receive buffers of the rank's stages after a step: (activations, gradients). What stages of one rank have handed
    over is gone by then: it would count."""
    trainer = Trainer(build(toy), launch.parse_options([]))
    trainer.step()
    return tuple(
        sum(
            len({
                id(info.buffer) for infos in table.values() for info in infos
                if info.buffer is not None and info.buffer.numel()
            })
            for table in (getattr(stage, name) for stage in trainer.program.runner.stages)
        )
        for name in ("args_recv_info", "grad_recv_info")
    )


class CollectiveCount(TorchDispatchMode):
    """Counts collectives of more than one rank's data by kind, with the bytes of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            kind = function._schema.name.split("::")[1].strip("_").removesuffix("_base").removesuffix("_")
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            count, size = self.counts.get(kind, (0, 0))
            self.counts[kind] = count + 1, size + max((t.numel() * t.element_size() for t in tensors), default=0)
        return function(*args, **(kwargs or {}))


def collectives_of_a_step(toy: Toy) -> dict[str, tuple[int, int]]:
    """What the second pass over a step's micro-batches sends, by kind: (calls, bytes)."""
    trainer = Trainer(build(toy), launch.parse_options([]))
    trainer.step()
    with CollectiveCount() as counter:
        run_step(trainer.program.runner, trainer.batches.at(0))
    return counter.counts


def refused_in_folders_of_their_own(toy: Toy, root: str, arguments: list[str]) -> str:
    """What the loop says where every rank works in another folder (``root/rank``), as nodes do that share none."""
    program, before, wait = build(toy), os.getcwd(), claim.SEEN_S
    claim.SEEN_S = 0.3
    os.chdir(os.path.join(root, str(dist.get_rank())))
    try:
        train(program, launch.parse_options(arguments))
    except ProgramError as error:
        return str(error)
    finally:
        os.chdir(before)
        claim.SEEN_S = wait
    return ""


def exported(toy: Toy, file: str, arguments: list[str]) -> None:
    """Run the loop with an export among the arguments."""
    train(build(toy), launch.parse_options([*arguments, file]))


def refusal_of_run(toy: Toy, arguments: list[list[str]]) -> str:
    """Train by each rank's own command line; what the run was refused for, if it was."""
    try:
        train(build(toy), launch.parse_options(arguments[dist.get_rank()]))
    except ProgramError as error:
        return str(error)
    return ""


def refusal_when_told(told: list[dict[str, str]]) -> str:
    """What is wrong, if anything, where each rank was told its own."""
    try:
        check_alike(told[dist.get_rank()], "right")
    except ProgramError as error:
        return str(error)
    return ""
