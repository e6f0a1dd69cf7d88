"""Checkpoints under the user's own FQNs, in torch's distributed checkpoint format.

Every state key has the model's own whole shape; each rank writes and reads the boxes of it that it holds, so that a
checkpoint saved under one plan resumes under any other. Optimizer state is kept as ``optimizer.exp_avg.<fqn>`` and
``optimizer.exp_avg_sq.<fqn>``; ``training.json`` beside it holds what is not a tensor. A checkpoint is written into
``step-00000010.partial`` and renamed when every rank is done and its files outlast a power cut, so that only complete
ones carry the name.
"""

from __future__ import annotations

import functools
import json
import operator
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_state
from torch.distributed.checkpoint.state_dict_saver import save as write_state

from .boxes import BoxedTensor, BoxLoadPlanner, BoxSavePlanner, BoxWriter
from .data import Identity
from .errors import ProgramError, raise_together, unwritable, writing_together
from .folders import INCOMPLETE, MANGLED, REPLACE, UNREADABLE, check_files, checkpoints_in, is_checkpoint, read_progress, sync
from .optimizer import LossScale, Optimizer
from .parameters import Held
from .state import NOTHING, Unchanging

MOMENTS = ("exp_avg", "exp_avg_sq")
LARGEST = 2**62
"""Counts of steps and samples beyond this are damage."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training stands: ``step`` steps done under ``seed`` (data and random draws follow), ``updates`` of them made, with
    ``samples`` in all. ``loss_scale``: None where none was needed.

    ``aliases``: further names of tied parameters, each with the FQN it is tied to. ``data``: what the data is told by, an
    :class:`Identity` as JSON has it (None: not said). ``model``: what tells the model from others (empty: not said).
    """

    step: int
    seed: int
    updates: int
    samples: int
    loss_scale: float | None
    clean_steps: int
    aliases: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    model: str = ""


def save(
    directory: Path, parameters: Sequence[Held], optimizer: Optimizer, step: int, samples: int, seed: int,
    data: Identity, loss_scale: LossScale, aliases: Mapping[str, str], others: Unchanging = NOTHING,
    model: str = "",
) -> Path:
    """Write ``directory/step-XXXXXXXX``. Collective over the world. ``aliases``: of the parameters, see
    :class:`Progress`."""
    target = directory / f"step-{step:08d}"
    partial = target.with_name(target.name + ".partial")
    with writing_together(partial):
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    try:
        _write(partial, _boxed(parameters) | others.boxed() | _moments(optimizer))
    except ProgramError:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # It takes room that is asked for.
        raise
    names = {**aliases, **others.aliases}
    value = loss_scale.value if loss_scale.enabled else None
    progress = Progress(step, seed, optimizer.updates, samples, value, loss_scale.clean_steps, names, data.said(), model)
    with writing_together(partial):
        if dist.get_rank() == 0:
            (partial / "training.json").write_text(json.dumps(asdict(progress)) + "\n")
            sync(partial / "training.json")  # torch has done so with the others.
            sync(partial)
            _check_written(partial)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            sync(directory)
    return target


def _check_written(partial: Path) -> None:
    """Raise ProgramError where a file that some rank has written is not here."""
    try:
        check_files(partial)
    except ProgramError as error:
        raise ProgramError(error.where, f"{error.wrong}, of what was saved", "give a folder that all nodes share") from None


def newest(directory: Path) -> Path | None:
    """The newest checkpoint in a directory that lacks no file, or None where there are none. Collective: rank 0 looks, and says
    which it passes over; all get its answer. Raises ProgramError where none is whole."""
    answer: list[Path | None] = [None]
    error = None
    if dist.get_rank() == 0 and directory.is_dir():
        try:
            answer = [_whole_one(checkpoints_in(directory))]
        except ProgramError as found:
            error = found
    raise_together(error)
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def _whole_one(folders: Sequence[Path]) -> Path | None:
    """The first of these checkpoints that lacks no file. Raises what is wrong with the first where all do."""
    passed: list[ProgramError] = []
    for folder in folders:
        try:
            check_files(folder)
        except ProgramError as error:
            passed.append(error)
            continue
        for fault in passed:
            print(f"warning: {fault.where}: {fault.wrong}; passed over for {folder.name}", file=sys.stderr, flush=True)
        return folder
    if passed:
        raise passed[0]
    return None


def load(
    path: Path, parameters: Sequence[Held], optimizer: Optimizer, loss_scale: LossScale, others: Unchanging = NOTHING
) -> Progress:
    """Read parameters, buffers and optimizer state back, whatever plan wrote them. Collective.

    Raises ProgramError where the checkpoint lacks a key, holds one that this model has not, or another shape.
    """
    error, progress = None, None
    try:
        progress = _progress(path)
    except ProgramError as found:
        error = found
    raise_together(error)
    assert progress is not None
    _read_model(path, parameters, others, _moments(optimizer), whole=True)
    optimizer.updates = progress.updates
    if loss_scale.enabled and progress.loss_scale is not None:  # What was saved without one says nothing about it.
        loss_scale.value, loss_scale.clean_steps = progress.loss_scale, progress.clean_steps
    return progress


def _progress(path: Path) -> Progress:
    file = path / "training.json"
    try:
        progress = Progress(**read_progress(path))
    except TypeError:
        raise ProgramError(str(file), *MANGLED) from None
    for name, (right, holds) in _FORMS.items():
        if not holds(value := getattr(progress, name)):
            raise ProgramError(f"{file}: {name}", f"is {str(json.dumps(value))[:60]}", right)
    return progress


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _is_scale(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and value is not True and 0 < value < 2.0**1000)


def _are_names(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value.values())


def _is_identity(value: object) -> bool:
    kinds = {part.name: type(part.default) for part in fields(Identity)}
    if not isinstance(value, dict):
        return value is None
    return {"length": int} | {name: type(part) for name, part in value.items()} == kinds


_FORMS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("step", "updates", "samples", "clean_steps"), ("a whole number from 0 up", _is_count)),
    "seed": ("a whole number", lambda value: type(value) is int),
    "loss_scale": ("a positive number or null", _is_scale),
    "aliases": ("names of parameters by other names", _are_names),
    "data": ("what its tokens are told by, or null", _is_identity),
    "model": ("what its model is told by", lambda value: isinstance(value, str)),
}
"""What :class:`Progress` may hold: in words, and the test."""


def load_parameters(path: Path, parameters: Sequence[Held], others: Unchanging = NOTHING) -> None:
    """Read parameters and buffers alone (``--init-from``), from a checkpoint or the newest in a directory of them.
    Collective."""
    _read_model(_checkpoint_at(path), parameters, others, {})


def _checkpoint_at(path: Path) -> Path:
    """A checkpoint, or the newest in a directory of them. Collective: rank 0 looks, for each way leads to other collectives."""
    itself = [dist.get_rank() == 0 and is_checkpoint(path)]
    dist.broadcast_object_list(itself, src=0)
    return path if itself[0] else newest(path) or path


def _read_model(
    path: Path, parameters: Sequence[Held], others: Unchanging, more: Mapping[str, BoxedTensor], *, whole: bool = False
) -> None:
    """``whole``: nothing else may be in it."""
    before = [buffer.value.clone() for buffer in others.buffers]
    _read(path, {**_boxed(parameters), **others.boxed(), **more}, whole=whole)
    others.check_fixed(str(path), before)


def load_plain(path: Path) -> dict[str, Tensor]:
    """All parameters and buffers of a checkpoint, whole, by every name they have: what the plain model's
    ``load_state_dict`` takes.

    One process. Raises ProgramError where the checkpoint is not complete.
    """
    aliases = _progress(path).aliases
    try:
        whole = _whole(path)
        return whole | {alias: whole[fqn] for alias, fqn in aliases.items()}
    except UNREADABLE:
        raise ProgramError(str(path), *INCOMPLETE) from None


def _whole(path: Path) -> dict[str, Tensor]:
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    whole = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items() if isinstance(entry, TensorStorageMetadata) and not _is_moment(key, metadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # It is, and one process is meant.
        read_state(whole, storage_reader=FileSystemReader(path), no_dist=True)
    return whole


def export(
    file: Path, parameters: Sequence[Held], tensors: Sequence[Tensor | None], aliases: Mapping[str, str],
    others: Unchanging = NOTHING,
) -> None:
    """Write ``tensors`` (aligned with ``parameters``), whole and by FQN, to one file of ``torch.save``. Collective.

    ``aliases``: further names of tied parameters, each with the FQN it is tied to.
    """
    aliases, whole = {**aliases, **others.aliases}, {}
    with _scratch(file) as scratch:
        _write(scratch, {
            held.fqn: BoxedTensor(held.layout.shape, tensor, held.boxes)
            for held, tensor in zip(parameters, tensors, strict=True) if tensor is not None
        } | others.boxed())
        with writing_together(file):
            if dist.get_rank() == 0:
                whole = _whole(scratch)
    with writing_together(file):
        if dist.get_rank() == 0:
            with file.open("wb") as stream:  # torch's own does not say why it could not write.
                torch.save(whole | {alias: whole[fqn] for alias, fqn in aliases.items() if fqn in whole}, stream)


@contextmanager
def _scratch(file: Path) -> Iterator[Path]:
    """A new folder beside a file, so on its disk, which is removed again. Collective: rank 0 makes it, all get its path."""
    made: list[Path | None] = [None]
    with writing_together(file):
        if dist.get_rank() == 0:
            made = [Path(tempfile.mkdtemp(prefix=f"{file.name}.", suffix=".partial", dir=file.parent))]
    dist.broadcast_object_list(made, src=0)
    scratch = made[0]
    assert scratch is not None
    try:
        yield scratch
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(scratch, ignore_errors=True)


def export_start(
    file: Path, parameters: Sequence[Held], aliases: Mapping[str, str], others: Unchanging = NOTHING
) -> None:
    """Write parameters and buffers as they are now for the plain model. Collective."""
    export(file, parameters, [held.local for held in parameters], aliases, others)


def _boxed(parameters: Sequence[Held]) -> dict[str, BoxedTensor]:
    """The parameters by key. Copies of a tied one hold the same boxes: every copy is filled on loading."""
    return _merge((held.fqn, BoxedTensor(held.layout.shape, held.local, held.boxes)) for held in parameters)


def _moments(optimizer: Optimizer) -> dict[str, BoxedTensor]:
    return _merge(
        (f"optimizer.{name}.{held.fqn}", BoxedTensor(held.layout.shape, tensor, held.boxes))
        for name, tensors in optimizer.state().items()
        for held, tensor in zip(optimizer.parameters, tensors, strict=True)
    )


def _merge(entries: Any) -> dict[str, BoxedTensor]:
    merged: dict[str, BoxedTensor] = {}
    for key, tensor in entries:
        merged[key] = merged[key].with_copy(tensor) if key in merged else tensor
    return merged


def _is_moment(key: str, metadata: Mapping[str, Any]) -> bool:
    prefixes = [f"optimizer.{name}." for name in MOMENTS]
    return any(key.startswith(prefix) and key.removeprefix(prefix) in metadata for prefix in prefixes)


def _write(path: Path, state: dict[str, BoxedTensor]) -> None:
    """Write into a folder that is there. Collective."""
    try:
        write_state(state, storage_writer=BoxWriter(path), planner=BoxSavePlanner())
    except CheckpointException as failure:  # raised on all ranks alike
        causes = [error for error, _ in failure.failures.values() if isinstance(error, OSError)]
        if not causes:
            raise
        raise unwritable(path, causes[0]) from None


def _read(path: Path, state: dict[str, BoxedTensor], *, whole: bool) -> None:
    error, metadata = None, Metadata({})
    try:
        metadata = FileSystemReader(path).read_metadata()
        _check(path, metadata, state)
    except ProgramError as found:
        error = found
    except UNREADABLE:
        error = ProgramError(str(path), *INCOMPLETE)
    raise_together(error)
    if whole:
        _check_whole(path, sorted(metadata.state_dict_metadata), state)
    try:
        read_state(state, storage_reader=FileSystemReader(path), planner=BoxLoadPlanner())
    except CheckpointException as failure:  # raised on all ranks alike
        reasons = {type(wrapped[0]).__name__ for wrapped in failure.failures.values()}
        raise ProgramError(str(path), f"cannot be read ({', '.join(sorted(reasons))})", REPLACE) from None


def _check(path: Path, metadata: Metadata, state: Mapping[str, BoxedTensor]) -> None:
    if not all(isinstance(key, str) for key in metadata.state_dict_metadata):
        raise ProgramError(str(path), *INCOMPLETE)
    for key, tensor in state.items():
        entry = metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise ProgramError(str(path), f"holds no {key}", "a checkpoint of this model")
        if tuple(entry.size) != tensor.shape:
            raise ProgramError(str(path), f"{key} is {tuple(entry.size)}", f"this model's is {tensor.shape}")


def _check_whole(path: Path, keys: Sequence[str], state: Mapping[str, BoxedTensor]) -> None:
    """Raise ProgramError where no rank has one of the checkpoint's keys. Collective; every rank has the same ``keys``."""
    found: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(found, sum(1 << at for at, key in enumerate(keys) if key in state))
    known = functools.reduce(operator.or_, found)
    more = [key for at, key in enumerate(keys) if not known >> at & 1]
    if more:
        raise ProgramError(str(path), f"holds {more[0]}, which this model lacks", "a checkpoint of this model")
