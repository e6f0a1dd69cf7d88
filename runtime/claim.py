"""A run's claim to the directory of its checkpoints: two that save there would take each other's files away."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from .errors import ProgramError, raise_together, writing_together
from .folders import FOLDER

FILE = ".in-use"
WAIT_S = 5.0
"""How long a run waits for one that has the directory: processes that are killed take a while."""
SEEN_S = 10.0
"""How long a rank looks for what rank 0 has just written: a node may remember a shared folder's names for seconds."""
OLD_S = 3600.0
"""What no run has touched for so long is left over, whoever began it."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Holder:
    """The process that has claimed a directory last. ``machine``: of this run of the machine alone."""

    process: int
    host: str
    machine: str


@contextmanager
def claimed(directory: Path | None) -> Iterator[None]:
    """Claim the directory (None: there is nothing to claim) for as long as the block runs, and remove the unfinished
    checkpoints that killed runs have left in it. Raises ProgramError where another run has it, or where some rank has another
    folder of that name. Collective over the world."""
    file, error = None, None
    if directory is not None:
        check_shared(directory)
        try:
            file = claim(directory) if dist.get_rank() == 0 else None
        except ProgramError as found:
            error = found
        raise_together(error)
    try:
        yield
    finally:
        if file is not None:
            os.close(file)


def check_shared(directory: Path) -> None:
    """Raise ProgramError where some rank does not see what rank 0 writes into the directory: each node would keep its own
    ranks' part of a checkpoint, and none a whole one. Collective over the world."""
    token, error = [""], None
    with writing_together(directory):
        if dist.get_rank() == 0:
            number, path = tempfile.mkstemp(prefix=".seen-", dir=directory)
            os.close(number)
            token = [Path(path).name]
    dist.broadcast_object_list(token, src=0)
    if not _appears(directory, token[0]):
        wrong = f"rank {dist.get_rank()} on {platform.node()} does not see in {directory} what rank 0 wrote there"
        error = ProgramError("--checkpoint", wrong, "give a folder that all nodes share")
    try:
        raise_together(error)  # When all have looked.
    finally:
        if dist.get_rank() == 0:
            (directory / token[0]).unlink(missing_ok=True)


def _appears(directory: Path, name: str) -> bool:
    """Whether a file is listed in a folder within the time that it may take. A listing asks the file server anew, where a look
    for one name may be answered by what the node remembers."""
    until = time.monotonic() + SEEN_S
    while True:
        with contextlib.suppress(OSError):
            if name in os.listdir(directory):
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)


def claim(directory: Path) -> int | None:
    """Lock the directory's file; the open file, which is to be closed, or None where it cannot be locked.

    The system lets go of the lock when the process that holds it ends, however it ends, so that nothing is left in the way
    of a run that resumes. What another machine holds can outlast it (a file server waits before it takes a lost client's
    locks back): the run is told of it and goes on.
    """
    try:
        file = os.open(directory / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:  # Another user's, or what every other file of the directory will say.
        return None
    try:
        free = _lock(file)
    except OSError:  # A file system without locks.
        os.close(file)
        return None
    if not free:
        holder = _holder(file)
        os.close(file)
        _refuse(directory, holder)
        return None
    before, own = _holder(file), Holder(os.getpid(), platform.node(), _machine())
    with contextlib.suppress(OSError):  # A full disk: the lock holds without a name.
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(asdict(own)).encode(), 0)
    with contextlib.suppress(OSError):
        _clear(directory, sure=before is None or before.machine == own.machine)
    return file


def _lock(file: int) -> bool:
    """Whether the lock was had, for which a run that is being ended is waited for."""
    until = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
        time.sleep(0.1)


def _refuse(directory: Path, holder: Holder | None) -> None:
    """Raise ProgramError where it is sure that the holder runs."""
    process = "another run" if holder is None else f"process {holder.process} on {holder.host}"
    if holder is not None and holder.machine == _machine():
        wrong = f"{directory} is in use by {process}"
        raise ProgramError("--checkpoint", wrong, "another directory, or wait for that run or end it")
    print(f"warning: --checkpoint: {directory} seems to be in use by {process}; two runs spoil each other's checkpoints",
          file=sys.stderr, flush=True)


def _holder(file: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(file, 4096, 0)))
    except (OSError, ValueError, TypeError):
        return None


def _machine() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return platform.node()


def _clear(directory: Path, sure: bool) -> None:
    """Remove unfinished checkpoints. ``sure``: no run can be writing them, for only this machine's have claimed the directory;
    a lock that does not reach from machine to machine says nothing of the others'."""
    now = (directory / FILE).stat().st_mtime
    for path in directory.iterdir():
        name = FOLDER.fullmatch(path.name)
        if name and name[2] and path.is_dir():
            touched = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
            if sure or now - touched > OLD_S:
                shutil.rmtree(path, ignore_errors=True)
