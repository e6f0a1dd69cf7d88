"""Whether the numbers at the top of ``train.py`` go together: a program is made to be edited by hand."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .data import BatchInput
from .errors import ProgramError
from .schedule import MULTIPLE, SINGLE, SPLIT_BACKWARD
from .zero import MASTER_DTYPE

FILE = "train.py"
AXES = {"pipeline", "data", "tensor"}


@dataclass(frozen=True, kw_only=True)
class MadeFor:
    """What the text of ``model.py`` depends on, besides its inputs. ``tensor``: degree of the axis; ``micro``: samples of what
    passes between two stages (None: nothing does); ``cuts``: the first block of every stage; ``ungathered``: blocks whose
    parameters torch would not gather for their backward pass under ZeRO 3."""

    precision: str
    tensor: int
    micro: int | None = None
    cuts: Sequence[int] = (0,)
    ungathered: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The numbers. ``mesh``: degrees of pipeline, data and tensor; ``total`` and ``micro``: samples; ``stages``: (first
    block, last (exclusive), ZeRO stage of each block); ``recomputes``: what every block of the chain makes again in its
    backward pass; ``shared``: the blocks that each tied parameter is part of; ``sequence``: tokens of a sample (0: it is no
    sequence); ``inputs``: of ``model.py``, where those of tokens are as long; ``made_for``: what of all this ``model.py`` was
    emitted for; ``betas``, ``epsilon``: AdamW's."""

    precision: str
    mesh: Mapping[str, int]
    zero_group: int
    total: int
    micro: int
    accumulation: int
    schedule: str
    virtual: int
    stages: Sequence[tuple[int, int, Sequence[int]]]
    recomputes: Sequence[str]
    shared: Mapping[str, Collection[int]]
    made_for: MadeFor
    betas: Sequence[float]
    epsilon: float
    sequence: int
    inputs: Sequence[BatchInput] = ()


_OF_MODEL = ("recomputes", "shared", "made_for", "inputs")
"""Settings that stand in ``model.py``."""


def by_variable(settings: Settings) -> dict[str, str]:
    """The settings as text, by where they stand: what every rank has to be told alike. As text, for the order of a mesh's axes
    counts too, in which equal dictionaries may differ."""
    told = {f"{FILE}: {name.upper()}": repr(value) for name, value in vars(settings).items() if name not in _OF_MODEL}
    told[f"{FILE}: BATCH"] = told.pop(f"{FILE}: TOTAL")
    return {**told, "model.py": repr([getattr(settings, name) for name in _OF_MODEL])}


def check_settings(settings: Settings) -> None:
    """Raise ProgramError, naming the variable, for the first contradiction. Every rank finds the same."""
    if settings.precision not in tuple(MASTER_DTYPE):
        raise ProgramError(f"{FILE}: PRECISION", f"{settings.precision!r} is unknown", f"one of {', '.join(MASTER_DTYPE)}")
    mesh: object = settings.mesh
    if not isinstance(mesh, Mapping) or set(mesh) != AXES or not all(type(n) is int and n > 0 for n in mesh.values()):
        raise ProgramError(f"{FILE}: MESH", f"is {mesh!r}", f"a positive degree of {', '.join(sorted(AXES))}")
    _check_whole(settings)
    _check_optimizer(settings)
    _check_batch(settings)
    _check_sequence(settings)
    _check_stages(settings)
    _check_shared(settings)
    _check_schedule(settings)
    if settings.schedule in SPLIT_BACKWARD:
        _check_split(settings)
    _check_made_for(settings)


def _check_whole(settings: Settings) -> None:
    """Counts are compared, divided and looped over: 8.0 passes for one until something takes it for no integer."""
    counts: dict[str, object] = {
        "ZERO_GROUP": settings.zero_group, "BATCH": settings.total, "MICRO": settings.micro,
        "ACCUMULATION": settings.accumulation, "VIRTUAL": settings.virtual,
    }
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ProgramError(f"{FILE}: {name}", f"is {value!r}", "a whole number from 1 up")
    for stage in settings.stages:
        if not _is_stage(stage):
            right = "(first block, last (exclusive), [ZeRO stage of each])"
            raise ProgramError(f"{FILE}: STAGES", f"{stage!r} is no stage", right)


def _is_stage(stage: object) -> bool:
    if not (isinstance(stage, (tuple, list)) and len(stage) == 3 and isinstance(stage[2], (tuple, list))):
        return False
    return all(type(number) is int for number in (*stage[:2], *stage[2]))


def _check_optimizer(settings: Settings) -> None:
    """A beta of 1 divides by zero in the correction of the moments' start."""
    betas: object = settings.betas
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not pair or not all(type(beta) in (int, float) and 0 <= beta < 1 for beta in settings.betas):
        raise ProgramError(f"{FILE}: BETAS", f"is {betas!r}", "two numbers from 0 up and below 1")
    if type(settings.epsilon) not in (int, float) or not 0 < settings.epsilon < math.inf:
        raise ProgramError(f"{FILE}: EPSILON", f"is {settings.epsilon!r}", "a positive number")


def _check_sequence(settings: Settings) -> None:
    sequence: object = settings.sequence
    if type(sequence) is not int or sequence < 0:
        raise ProgramError(f"{FILE}: SEQUENCE", f"is {sequence!r}", "a whole number from 0 up")
    for entry in settings.inputs:
        if entry.role == "tokens" and tuple(entry.shape) != (sequence,):
            raise ProgramError(
                f"{FILE}: SEQUENCE", f"is {sequence}, and model.py takes {entry.name} of shape {tuple(entry.shape)}",
                "put it back; for another length trace the model anew (plan --seq)",
            )


def _check_batch(settings: Settings) -> None:
    data = settings.mesh["data"]
    product = settings.micro * settings.accumulation * data
    if product != settings.total:
        raise ProgramError(
            f"{FILE}: BATCH", f"MICRO x ACCUMULATION x data = {product}, not {settings.total}", "make them equal"
        )
    if data % settings.zero_group:
        raise ProgramError(f"{FILE}: ZERO_GROUP", f"{settings.zero_group} does not divide data {data}", "a divisor of it")


def _check_stages(settings: Settings) -> None:
    where, count = f"{FILE}: STAGES", settings.mesh["pipeline"] * settings.virtual
    if len(settings.stages) != count:
        raise ProgramError(where, f"there are {len(settings.stages)}", f"pipeline x VIRTUAL = {count}")
    edge = 0
    for first, last, zero in settings.stages:
        if first != edge or last <= first:
            raise ProgramError(where, f"({first}, {last}) does not follow block {edge}", "consecutive ranges of blocks")
        if len(zero) != last - first or not set(zero) <= {0, 1, 2, 3}:
            raise ProgramError(where, f"ZeRO stages {list(zero)}", f"{last - first} of 0, 1, 2 or 3 for ({first}, {last})")
        edge = last
    if edge != len(settings.recomputes):
        raise ProgramError(where, f"end at block {edge}", f"the chain has {len(settings.recomputes)}")


def _check_made_for(settings: Settings) -> None:
    """The sizes, dtypes and cuts in ``model.py`` are those of one plan."""
    made, cuts = settings.made_for, tuple(first for first, *_ in settings.stages)
    for name, wrong, value, right in (
        ("PRECISION", "is", settings.precision, made.precision), ("MESH", "tensor is", settings.mesh["tensor"], made.tensor),
        ("MICRO", "is", settings.micro, made.micro), ("STAGES", "begin at blocks", cuts, tuple(made.cuts)),
    ):
        if right is not None and value != right:
            wrong = f"{wrong} {value!r}, and model.py is made for {right!r}"
            raise ProgramError(f"{FILE}: {name}", wrong, "put it back, or change plan.yaml and emit again")
    zero = [stage for *_, stages in settings.stages for stage in stages]
    for block in made.ungathered:
        if zero[block] == 3:
            wrong = f"block {block} shares parameters with one after it whose values are only detached, and has ZeRO 3"
            raise ProgramError(f"{FILE}: STAGES", wrong, "0, 1 or 2: torch gathers none of them for its backward pass")


def _check_shared(settings: Settings) -> None:
    """One ZeRO stage holds a parameter, in whichever blocks it is."""
    zero = [stage for *_, stages in settings.stages for stage in stages]
    for fqn, blocks in settings.shared.items():
        found = sorted({zero[block] for block in blocks})
        if len(found) > 1:
            wrong = f"blocks {', '.join(map(str, sorted(blocks)))} share {fqn} and have ZeRO stages {found}"
            raise ProgramError(f"{FILE}: STAGES", wrong, "the same for all of them")


def _check_schedule(settings: Settings) -> None:
    """torch's own conditions, in our words."""
    name, pipeline, count = settings.schedule, settings.mesh["pipeline"], settings.accumulation
    where = f"{FILE}: SCHEDULE"
    if name not in (*SINGLE, *MULTIPLE):
        raise ProgramError(where, f"{name!r} is unknown", f"one of {', '.join((*SINGLE, *MULTIPLE))}")
    if name in SINGLE:
        if settings.virtual != 1:
            raise ProgramError(f"{FILE}: VIRTUAL", f"is {settings.virtual}", f"{name} has one stage a rank")
        if name == "1f1b" and count < pipeline:
            raise ProgramError(where, f"1f1b of {pipeline} stages with {count} micro-batches", "at least as many, or gpipe")
        return
    virtual = (2, 2) if name == "zbv" else (2 if name == "interleaved-1f1b" else 1, settings.virtual)
    if pipeline < 2 or not virtual[0] <= settings.virtual <= virtual[1]:
        raise ProgramError(
            where, f"{name} over {pipeline} pipeline rank(s) with {settings.virtual} stage(s) each",
            f"2 ranks and {virtual[0]} stages at least" + (", 2 stages at most" if name == "zbv" else ""),
        )
    if name != "zbv" and count % max(1, count // pipeline):
        rounds = max(1, count // pipeline)
        raise ProgramError(where, f"{name} with {count} micro-batches over {pipeline} ranks", f"a multiple of {rounds}")


def _check_split(settings: Settings) -> None:
    """ZeRO 3 frees the parameters between the two parts of a backward pass, and gradients would be lost; recomputation
    would be done for every part."""
    right = f"{settings.schedule} parts the backward pass; use another schedule"
    if any(3 in zero for *_, zero in settings.stages):
        raise ProgramError(f"{FILE}: STAGES", "ZeRO 3", f"0, 1 or 2: {right}")
    if any(settings.recomputes):
        raise ProgramError(f"{FILE}: SCHEDULE", f"{settings.schedule} with blocks that recompute", f"no recomputation: {right}")
