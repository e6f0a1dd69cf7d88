"""Starting a program: its arguments, its process group and mesh, and how it ends when its input is wrong.

The only module that reads the environment (torchrun's RANK, WORLD_SIZE, LOCAL_RANK).
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .agreement import check_alike, flag
from .collectives import TensorAxis
from .errors import ProgramError, raise_together
from .folders import is_checkpoint

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

LEAVES_AFTER_S = 30.0
"""How long a rank that was refused waits for rank 0 to say why: torchrun ends all ranks as soon as one has left."""
SAYS_AFTER_S = 2.0
"""How long each rank of a node waits more than the one before it, for torchrun to end it."""

MOST_STEPS = 10**9
"""Beyond it a number is a slip of the keyboard, and with hundreds of digits no float: rates are computed with it."""
LEAST_STEPS = {"steps": 1, "checkpoint_every": 0, "warmup": 0, "decay_steps": 0}
"""Options that are numbers of steps, and the least of each."""
AMOUNTS = ("learning_rate", "weight_decay", "clip")
_KINDS: Mapping[Any, tuple[Any, str]] = {
    int: (int, "a whole number"), float: (int | float, "a number"), bool: (bool, "True or False"),
}
"""What an option of a type may be by default, and in words; the others are paths."""
FILES = ("metrics", "export_start", "dump_gradients")
"""Options that name a file which rank 0 writes."""
PROGRAM = Path(__file__).parent.parent
PROGRAM_FILES = (
    "train.py", "model.py", "README.md", "initialization.json", "constants.json", "launch.sh", "launch.sbatch", "plan.yaml",
    "plan.graph.json", "plan.cluster.yaml",
)


@dataclass(frozen=True)
class World:
    """This rank's place in the mesh.

    ``data_mesh``: 1-D over the data ranks, or 2-D (replicate x shard) where a ZeRO group spans fewer. ``data_group``:
    all data ranks. ``pipeline_group``: the ranks of one pipeline (None without). ``stands_in``: whether the device is a CPU
    that nobody asked for, in the place of an accelerator.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    pipeline: int
    pipeline_rank: int
    pipeline_group: ProcessGroup | None
    data: int
    data_rank: int
    data_mesh: DeviceMesh
    data_group: ProcessGroup
    tensor: TensorAxis
    stands_in: bool = False


@dataclass(frozen=True)
class Options:
    """The program's arguments. ``None``: what the plan says, or not asked for."""

    steps: int
    data: Path | None
    seed: int
    metrics: Path | None
    checkpoint: Path | None
    checkpoint_every: int
    init_from: Path | None
    export_start: Path | None
    learning_rate: float
    warmup: int
    decay_steps: int
    weight_decay: float
    clip: float
    compile: bool
    dump_gradients: Path | None


class _Parser(argparse.ArgumentParser):
    """Wrong arguments become the program's one kind of error."""

    def error(self, message: str) -> NoReturn:
        """Raise ProgramError instead of printing the usage on every rank."""
        raise ProgramError("arguments", message, "see --help")

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print it once, not on every rank."""
        if _is_first():
            super().print_help(file)


def parse_options(arguments: Sequence[str] | None = None, **defaults: object) -> Options:
    """The command line's options; ``defaults`` replace the built-in ones by name."""
    parser = _Parser(description="Train the model that this program was emitted for.")
    add = parser.add_argument
    add("--steps", type=int, default=10, help="the last step, counted from the beginning of training")
    add("--data", type=Path, help="token file (examples/prepare_text.py writes one); default: synthetic tokens")
    add("--seed", type=int, default=0)
    add("--metrics", type=Path, help="append one JSON line a step to this file")
    add("--checkpoint", type=Path, help="save here, and resume from the newest complete checkpoint in it")
    add("--checkpoint-every", type=int, default=0, help="steps between checkpoints; 0: only after the last step")
    add("--init-from", type=Path, help="start from the parameters of this checkpoint, at step 0")
    add("--export-start", type=Path, help="write the initial parameters to this file, for the plain model; not on a resume")
    add("--learning-rate", type=float, default=3e-4)
    add("--warmup", type=int, default=0, help="steps of linear warm-up")
    add("--decay-steps", type=int, default=0, help="step at which a cosine decay of the rate, to a tenth, ends; 0: constant")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    add("--compile", action="store_true", help="compile every block")
    add("--dump-gradients", type=Path, help="write the whole gradients of the first step to this file; not on a resume")
    for name, value in defaults.items():
        _check_kind(name, value)
    parser.set_defaults(**defaults)
    options = Options(**vars(parser.parse_args(arguments)))
    for name, value in vars(options).items():
        _check_range(flag(name), name, value)
    if 0 < options.decay_steps <= options.warmup:
        right = f"more than the {options.warmup} steps of --warmup, or 0"
        raise ProgramError("--decay-steps", f"{options.decay_steps} ends within the warm-up", right)
    if options.checkpoint is None and options.checkpoint_every != parser.get_default("checkpoint_every"):
        raise ProgramError("--checkpoint-every", "there is no --checkpoint", "give the directory")
    return options


def _check_kind(name: str, value: object) -> None:
    """Raise ProgramError where an entry of DEFAULTS is no option's, or of another kind than the option's values."""
    where, kinds = f'train.py: DEFAULTS["{name}"]', get_type_hints(Options)
    if name not in kinds:
        raise ProgramError(where, "is no option", f"one of {', '.join(kinds)}")
    taken, right = _KINDS.get(kinds[name], (str | Path | None, "a path"))
    if isinstance(value, bool) != (kinds[name] is bool) or not isinstance(value, taken):
        raise ProgramError(where, f"is {value!r}", right)
    _check_range(where, name, value)


def _check_range(where: str, name: str, value: Any) -> None:
    if name in LEAST_STEPS and not LEAST_STEPS[name] <= value <= MOST_STEPS:
        raise ProgramError(where, str(value), f"a number of steps from {LEAST_STEPS[name]} to {MOST_STEPS:,}")
    if name in AMOUNTS and not (math.isfinite(value) and value >= 0):
        raise ProgramError(where, str(value), "0 or more")


def check_outputs(options: Options) -> None:
    """Raise ProgramError where rank 0 cannot write what the options ask for, or would write over something else of the run.
    Collective over the world."""
    error = None
    if dist.get_rank() == 0:
        error = _within_checkpoint(options.checkpoint) or _twice(options)
        for name in (*FILES, "checkpoint"):
            path = getattr(options, name)
            right = "" if error is not None or path is None else _needed(path, folder=name == "checkpoint")
            if right:
                error = ProgramError(flag(name), f"{path} cannot be written", right)
    raise_together(error)


def _within_checkpoint(directory: Path | None) -> ProgramError | None:
    """What is wrong with a directory for checkpoints that is one: nothing in it would be resumed from."""
    whole = () if directory is None else (directory.resolve(), *directory.resolve().parents)
    found = next(filter(is_checkpoint, whole), None)
    if found is None:
        return None
    wrong = f"{directory} is a checkpoint" if found == whole[0] else f"{directory} is inside the checkpoint {found}"
    return ProgramError("--checkpoint", wrong, "give the folder that it is in, or --init-from")


def _twice(options: Options) -> ProgramError | None:
    """What is wrong where a file that is written is something else too: another output, the data, a checkpoint's or the
    program's own."""
    program = PROGRAM.resolve()
    others = {program / name: f"{name} of this program" for name in PROGRAM_FILES}
    others |= {path.resolve(): flag(name) for name in ("data", "checkpoint") if (path := getattr(options, name)) is not None}
    for name in FILES:
        path = getattr(options, name)
        if path is None:
            continue
        whole = path.resolve()
        within = [
            folder for folder in whole.parents if folder == program / "runtime" or is_checkpoint(folder)
            or (others.get(folder.parent) == "--checkpoint" and folder.name.startswith("step-"))
        ]
        taken = others.get(whole) or (f"inside {within[0]}" if within else None)
        if taken is not None:
            return ProgramError(flag(name), f"{path} is {taken}", "a file of its own")
        others[whole] = flag(name)
    return None


def _needed(path: Path, *, folder: bool) -> str:
    """What would be right where a path cannot be written to; empty where it can. Folders are made where they are missing.

    ``folder``: whether the path is one of files, not a file.
    """
    if not folder and path.exists() and (path.is_dir() or not os.access(path, os.W_OK)):
        return "a file that may be written over"
    within, place = (path, "a folder") if folder else (path.parent, "a file in a folder")
    try:
        within.mkdir(parents=True, exist_ok=True)
    except OSError:
        return f"{place} that can be made"
    return "" if os.access(within, os.W_OK | os.X_OK) else f"{place} that this user may write to"


def start(
    pipeline: int = 1, data: int = 1, tensor: int = 1, zero_group: int | None = None, device: str | None = None,
    order: Sequence[str] = ("pipeline", "data", "tensor"), *, accelerators: bool = False, told: Mapping[str, str] | None = None,
) -> World:
    """Join the process group (made from torchrun's environment unless there is one) and lay the mesh over it.

    ``zero_group``: data ranks that one ZeRO shard group spans (default: all). ``order``: of the axes in which ranks are
    numbered, slowest to fastest. ``accelerators``: whether the plan is for any. ``told``: what the program says, by
    variable. Raises ProgramError where the number of processes is not what the plan was made for, or one that joins was told
    otherwise than the first.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    count, wanted = _processes(), pipeline * data * tensor
    if count != wanted:
        raise ProgramError(
            "torchrun", f"{count} processes", f"this plan needs {wanted} (pipeline {pipeline} x data {data} x tensor {tensor})"
        )
    if not dist.is_initialized():
        _join(kind)
        check_alike(told or {}, "copy one program to all nodes")  # Before the mesh: two of them make the ranks wait.
    if kind == "cpu":
        _keep_freed_memory()
    place = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    world = _lay(place, {"pipeline": pipeline, "data": data, "tensor": tensor}, order, zero_group or data)
    return replace(world, stands_in=accelerators and device is None and kind == "cpu")


def _processes() -> int:
    """How many there are: known before they join, for one that leaves at once would take the others' connections with it."""
    if dist.is_initialized():
        return dist.get_world_size()
    if "RANK" not in os.environ:
        return 1
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ProgramError(name, "is not set beside RANK", "start the program with torchrun")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        value = os.environ.get(name, "0")
        if not value.isdecimal():
            raise ProgramError(name, f"is {value!r}, no number", "start the program with torchrun")
    return int(os.environ["WORLD_SIZE"])


def _keep_freed_memory() -> None:
    """Let the C library hand freed memory out again instead of giving it back to the system, as torch's allocator does on an
    accelerator: every step asks for the same, and a page that comes back is cleared first (60,000 pages and a tenth of a step
    of a small model). What is not glibc has no ``mallopt``; the numbers are malloc.h's for trimming and for ``mmap``."""
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if library is not None and hasattr(library, "mallopt"):
        for threshold in (-1, -3):
            library.mallopt(threshold, 2**31 - 1)


def _join(kind: str) -> None:
    backend = "nccl" if kind == "cuda" else "gloo"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _lay(device: torch.device, degrees: Mapping[str, int], order: Sequence[str], zero_group: int) -> World:
    pipeline, data, tensor = degrees["pipeline"], degrees["data"], degrees["tensor"]
    sizes: dict[str, int] = {}
    for name in order:
        parted = name == "data" and zero_group < data
        sizes |= {"replicate": data // zero_group, "shard": zero_group} if parted else {name: degrees[name]}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "data" in sizes:
        data_mesh = flat = mesh["data"]
    else:
        data_mesh = mesh["replicate", "shard"]
        flat = data_mesh._flatten("data")
    axis = TensorAxis(mesh["tensor"].get_group() if tensor > 1 else None, mesh["tensor"].get_local_rank(), tensor)
    return World(
        rank=dist.get_rank(), size=dist.get_world_size(), device=device, mesh=mesh, pipeline=pipeline,
        pipeline_rank=mesh["pipeline"].get_local_rank(),
        pipeline_group=mesh["pipeline"].get_group() if pipeline > 1 else None,
        data=data, data_rank=flat.get_local_rank(), data_mesh=data_mesh, data_group=flat.get_group(), tensor=axis,
    )


def main_guard(main: Callable[[], None]) -> None:
    """Run ``main``; wrong input becomes one line and exit code 2 on every rank, without a traceback.

    Rank 0 says it, or the rank that alone has found it (:func:`say`). Under torchrun the process ends here; without (in a
    notebook) a run that succeeds returns. Whatever else one rank raises ends it at once, and torchrun ends the others: to
    leave the process group in order could take them, which wait for this one.
    """
    try:
        main()
    except ProgramError as error:
        say(error)
        _leave(error.exit_code)
    except Exception:
        if "RANK" not in os.environ:
            raise
        traceback.print_exc()
        _leave(1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if "RANK" in os.environ:
        _leave(0)


def say(error: ProgramError) -> None:
    """Print the error's line on rank 0. Another rank waits for it, and is ended by torchrun when it has left. One that is still
    there says its own, and where: it may be the only one to have found anything wrong, while rank 0 waits for it."""
    line = f"error: {error}"
    if not _is_first():
        local = os.environ.get("LOCAL_RANK", "0")  # That it may be no number is what some errors say.
        time.sleep(LEAVES_AFTER_S + SAYS_AFTER_S * (int(local) if local.isdecimal() else 0))
        line = f"error: rank {os.environ['RANK']} on {platform.node()}: {error}"
    with contextlib.suppress(OSError):  # A full disk: the exit code says that it went wrong.
        print(line, file=sys.stderr, flush=True)


def _is_first() -> bool:
    """Whether this is rank 0, or one that does not know which it is."""
    rank = os.environ.get("RANK", "0")
    return not rank.isdecimal() or int(rank) == 0


def _leave(code: int) -> NoReturn:
    """End the process without taking Python down: a thread of gloo's that lets go of its last tensor meanwhile asks for a
    lock that is gone, and aborts a run that has succeeded. What was registered to run at exit runs."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # What a full disk kept from being written is still to be flushed.
            stream.flush()
    os._exit(code)
