"""Batches: a pure function of (seed, step, sample), so that any plan sees the same ones and a resume needs no state."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import check_alike
from .errors import ProgramError, raise_together
from .hashing import seed_of

FORMAT = "shardwright-tokens"
WIDTHS = {"uint16": (2, torch.int16, 0xFFFF), "uint32": (4, torch.int32, 0xFFFFFFFF)}
IGNORED = -100
SAMPLED_BLOCKS, BLOCK_BYTES = 64, 4096
"""What of a token file is hashed to tell it from others: blocks at even distances, cheap in one of terabytes."""


@dataclass(frozen=True, slots=True)
class BatchInput:
    """A tensor of the batch: ``shape`` of one sample, dtype, exclusive bound ``high`` of integers (0: none known).

    Where none is known, ``shown`` is that of the model's example inputs.

    ``role``: ``tokens`` are drawn from the data, ``targets`` are the tokens shifted by one, a ``share`` is what an average that
    the loss adds is scaled by, which each step works out (runtime/loop.py, ``weighed``), ``other`` is made up. ``like``:
    what made-up floats are: ``normal``, ``positive`` (their magnitudes), ``unit`` (from 0 to 1), ``mask`` (0 or 1) or
    ``constant``, and which. ``argument``: of the stages, that takes it (empty: of its own name).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Literal["tokens", "targets", "share", "other"]
    high: int = 0
    shown: int = 0
    like: tuple[str | float, ...] = ("normal",)
    argument: str = ""

    @property
    def keyword(self) -> str:
        """What the stages call it."""
        return self.argument or self.name

    @property
    def below(self) -> int:
        """Exclusive bound of the integers that are made up."""
        return self.high or max(self.shown, 2)


@dataclass(frozen=True, slots=True)
class Identity:
    """What the tokens of a run are told by: ``tokens`` of ``dtype`` in a file (0: they are made up), ``sampled`` the hash of
    :data:`SAMPLED_BLOCKS` of its blocks, ``length`` that of the windows which are its samples (0: there are none, or it is not
    said)."""

    tokens: int = 0
    dtype: str = ""
    sampled: str = ""
    length: int = 0

    def said(self) -> dict[str, Any]:
        """What a checkpoint says of it; made-up tokens have no windows."""
        return {name: value for name, value in asdict(self).items() if name != "length" or value}

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens of {self.dtype}" if self.tokens else "made-up ones"


class Source(Protocol):
    """Where tokens come from."""

    identity: Identity

    def sequence(self, index: int, length: int) -> Tensor:
        """``length`` tokens of the sample that is ``index``-th in the whole training, int64."""


class SyntheticTokens:
    """Tokens that count up by a small stride and now and then jump: learnable, and a function of the seed alone."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.seed, self.vocabulary, self.identity = seed, vocabulary, Identity()

    def sequence(self, index: int, length: int) -> Tensor:
        """See :class:`Source`."""
        generator = torch.Generator().manual_seed(seed_of("tokens", self.seed, index))
        jumps = torch.randint(self.vocabulary, (length,), generator=generator)
        jumping = torch.rand(length, generator=generator, dtype=torch.float32) < 0.125
        stride = torch.randint(1, 4, (1,), generator=generator)
        jumping[0] = True
        return torch.where(jumping, jumps, stride).cumsum(0) % self.vocabulary


class TokenFile:
    """A file of tokens, of which windows are read as they are asked for: a line of JSON, then little-endian integers.

    The line is ``{"format": "shardwright-tokens", "version": 1, "dtype": "uint16" or "uint32", "tokens": count}``.
    Samples are the consecutive windows of ``length`` tokens (and one more, the last target), shuffled anew every epoch.
    Raises ProgramError where the file is missing, not of this format, shorter or longer than its header says, or too short
    for one window, and where what is read is no longer there.
    """

    def __init__(self, path: Path, seed: int, length: int) -> None:
        self.path, self.seed, self.length = path, seed, length
        header, begin = self._header()
        self.width, self._dtype, self._mask = WIDTHS[header["dtype"]]
        self.tokens, self._begin = int(header["tokens"]), begin
        size = path.stat().st_size - begin
        if (present := size // self.width) < self.tokens:
            raise ProgramError(str(path), f"truncated: {present} tokens", f"its header says {self.tokens}")
        if size > self.tokens * self.width:  # Written in a wider dtype, or lengthened: either would go unnoticed.
            said = f"its header says {self.tokens} of {header['dtype']}, {self.tokens * self.width} bytes"
            raise ProgramError(str(path), f"{size} bytes of tokens", said)
        self.windows = (self.tokens - 1) // length
        if self.windows < 1:
            raise ProgramError(str(path), f"{self.tokens} tokens", f"one sample needs {length + 1}")
        self._file = path.open("rb", buffering=0)
        self._order: tuple[int, Tensor] | None = None
        self.identity = Identity(self.tokens, header["dtype"], self._sampled(), length)

    def sequence(self, index: int, length: int) -> Tensor:
        """See :class:`Source`; ``length`` is the window and the one token after it."""
        epoch, position = divmod(index, self.windows)
        return self._read(int(self._permutation(epoch)[position]) * self.length, length)

    def largest(self, part: int = 0, parts: int = 1) -> int:
        """The largest token of one of ``parts`` equal parts of the file."""
        each = -(-self.tokens // parts)
        end, step = min((part + 1) * each, self.tokens), 2**22
        return max((int(self._read(at, min(step, end - at)).max()) for at in range(part * each, end, step)), default=-1)

    def _read(self, start: int, count: int) -> Tensor:
        raw = self._bytes(start * self.width, count * self.width)
        return torch.frombuffer(raw, dtype=self._dtype).to(torch.int64) & self._mask

    def _bytes(self, start: int, count: int) -> bytearray:
        """``count`` bytes of the tokens from byte ``start`` of them on."""
        raw, right = bytearray(count), "a file that stays as it is while a run reads it"
        try:  # A mapping of a file that is cut meanwhile ends the process with a signal.
            present = os.preadv(self._file.fileno(), [raw], self._begin + start)
        except OSError as error:
            raise ProgramError(str(self.path), f"cannot be read ({error.strerror})", right) from None
        if present < len(raw):
            raise ProgramError(str(self.path), "became shorter while the run read it", right)
        return raw

    def _sampled(self) -> str:
        size = self.tokens * self.width
        starts = [place * max(size - BLOCK_BYTES, 0) // (SAMPLED_BLOCKS - 1) for place in range(SAMPLED_BLOCKS)]
        blocks = (self._bytes(at, min(BLOCK_BYTES, size)) for at in starts)
        return hashlib.blake2b(b"".join(blocks), digest_size=16).hexdigest()

    def _permutation(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(seed_of("epoch", self.seed, epoch))
            self._order = epoch, torch.randperm(self.windows, generator=generator)
        return self._order[1]

    def _header(self) -> tuple[dict[str, Any], int]:
        right = "a token file, as examples/prepare_text.py writes it"
        try:
            with self.path.open("rb") as file:
                line = file.readline(4096)
        except OSError as error:
            raise ProgramError(str(self.path), f"cannot be read ({error.strerror})", right) from None
        try:
            header = json.loads(line)
        except ValueError:
            header = None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ProgramError(str(self.path), "no token file", right)
        if header.get("dtype") not in tuple(WIDTHS):
            wrong = f"its tokens are of dtype {str(json.dumps(header.get('dtype')))[:60]}"
            raise ProgramError(str(self.path), wrong, f"write them as {' or '.join(WIDTHS)}")
        if not isinstance(header.get("tokens"), int) or header.get("version") != 1:
            raise ProgramError(str(self.path), "a header without a count of tokens or of another version", right)
        return header, len(line)


class Batches:
    """The local batch of every step: the data rank's consecutive samples of the global batch, for every input but shares.
    ``before``: samples before step 0, negative where the steps that were made had fewer.
    """

    def __init__(
        self, inputs: Sequence[BatchInput], source: Source | None, seed: int, total: int, data_rank: int, data: int,
        device: torch.device, before: int = 0,
    ) -> None:
        self.inputs = tuple(entry for entry in inputs if entry.role != "share")
        self.source, self.seed, self.total, self.device = source, seed, total, device
        self._before = before
        local = total // data
        self._own = range(data_rank * local, (data_rank + 1) * local)

    @property
    def identity(self) -> Identity:
        """What the data is told by in checkpoints."""
        return Identity() if self.source is None else self.source.identity

    def at(self, step: int) -> dict[str, Tensor]:
        """The inputs of step ``step`` (from 0) by the stages' arguments, each [local batch, ...] on the device. Raises
        ProgramError where the data cannot be read."""
        batch = self._zeros()
        for place, index in enumerate(self._own):
            self._fill(batch, place, self._before + step * self.total + index)
        return self._placed(batch)

    def blank(self) -> dict[str, Tensor]:
        """Zeros in the place of a batch that this rank alone cannot read, where others wait for it."""
        return self._placed(self._zeros())

    def _zeros(self) -> dict[str, Tensor]:
        return {entry.keyword: torch.zeros(len(self._own), *entry.shape, dtype=entry.dtype) for entry in self.inputs}

    def _placed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.device.type == "cuda":  # What is pinned is copied while the host goes on.
            batch = {name: values.pin_memory() for name, values in batch.items()}
        return {name: values.to(self.device, non_blocking=True) for name, values in batch.items()}

    def _fill(self, batch: Mapping[str, Tensor], place: int, index: int) -> None:
        """Each sample is gone before the next: those of a batch of images, and the batch, would be twice as much."""
        for name, value in self._sample(index).items():
            batch[name][place] = value

    def _sample(self, index: int) -> Mapping[str, Tensor]:
        tokens = next((entry for entry in self.inputs if entry.role == "tokens"), None)
        sequence = None
        if tokens is not None and self.source is not None:
            sequence = self.source.sequence(index, tokens.shape[-1] + 1)
        return {entry.keyword: self._value(entry, sequence, index) for entry in self.inputs}

    def _value(self, entry: BatchInput, sequence: Tensor | None, index: int) -> Tensor:
        if sequence is not None and entry.role == "tokens":
            return sequence[:-1].reshape(entry.shape).to(entry.dtype)
        if sequence is not None and entry.role == "targets" and entry.shape == (sequence.numel() - 1,):
            return sequence[1:].to(entry.dtype)
        generator = torch.Generator().manual_seed(seed_of("input", self.seed, index, entry.name))
        if entry.dtype.is_floating_point:
            return _floats(entry, generator).to(entry.dtype)
        return torch.randint(entry.below, entry.shape, generator=generator).to(entry.dtype)


def made_up(inputs: Sequence[BatchInput]) -> tuple[str, ...]:
    """Names of the inputs that a token file says nothing of."""
    length = next((entry.shape for entry in inputs if entry.role == "tokens"), None)
    return tuple(
        entry.name for entry in inputs if entry.role == "other" or (entry.role == "targets" and entry.shape != length)
    )


def check_data(trained: Identity, now: Identity) -> None:
    """Warn, on rank 0, where a resumed run goes on with other tokens than it was ``trained`` on, or with the same in windows of
    another length, which are shuffled otherwise: that may be meant. Raises ProgramError, on every rank alike, where they were a
    file's and are made up now: that is a forgotten option."""
    if trained.tokens and not now.tokens:
        raise ProgramError(
            "--data", f"is not given, and the run was trained on {trained} until now",
            "give the file, or begin a run on made-up tokens with --init-from and another --checkpoint",
        )
    if not trained.length:  # What does not say it may have had the same.
        now = replace(now, length=0)
    if trained != now and dist.get_rank() == 0:
        others = "as many others" if str(trained) == str(now) else now
        wrong = f"not the tokens that the run was trained on until now: {trained}, now {others}"
        if replace(trained, length=now.length) == now:
            wrong = f"in windows of {trained.length} tokens until now, now of {now.length}"
        print(f"warning: --data: {wrong}; samples may be repeated or left out", file=sys.stderr, flush=True)


def _floats(entry: BatchInput, generator: torch.Generator) -> Tensor:
    kind, *constant = entry.like
    if kind == "constant":
        return torch.full(entry.shape, float(constant[0]), dtype=torch.float64)
    if kind == "unit":
        return torch.rand(entry.shape, generator=generator, dtype=torch.float32)
    if kind == "mask":
        return torch.randint(2, entry.shape, generator=generator)
    normal = torch.randn(entry.shape, generator=generator, dtype=torch.float32)
    return normal.abs() if kind == "positive" else normal


def make_batches(
    inputs: Sequence[BatchInput], path: Path | None, seed: int, total: int, data_rank: int, data: int,
    device: torch.device, before: int = 0,
) -> Batches:
    """Batches of ``total`` samples a step from a token file, or synthetic ones, ``before`` of them before step 0. Collective
    where there is a file: what is wrong with it on any rank is raised on all (ProgramError)."""
    tokens = next((entry for entry in inputs if entry.role == "tokens"), None)
    source: Source | None = None
    if path is not None:
        source = _checked_file(path, tokens, seed)
    elif tokens is not None:
        source = SyntheticTokens(seed, tokens.below)
    return Batches(inputs, source, seed, total, data_rank, data, device, before)


def _checked_file(path: Path, tokens: BatchInput | None, seed: int) -> TokenFile:
    """The token file; its tokens are checked against the vocabulary in parts, one a rank."""
    file, error = None, None
    try:
        if tokens is None:
            raise ProgramError("--data", "this model takes no tokens", "leave it out")
        file = TokenFile(path, seed, tokens.shape[-1])
        largest = file.largest(dist.get_rank(), dist.get_world_size())
        if tokens.high and largest >= tokens.high:
            raise ProgramError(
                str(path), f"holds token {largest}",
                f"the model's vocabulary has {tokens.high} (0 to {tokens.high - 1})",
            )
    except ProgramError as found:
        error = found
    raise_together(error)
    assert file is not None
    check_alike({"--data": repr(file.identity)}, "give all nodes the same file")  # Each may have a copy of its own.
    return file
