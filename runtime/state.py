"""What the model's state holds beside the parameters that a step computes with: buffers, and parameters that it leaves out.

Neither changes while training. Both are in every checkpoint and export, so that the plain model loads them strictly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .boxes import BoxedTensor
from .errors import ProgramError, raise_together
from .initialize import Step, initial_value


@dataclass(frozen=True)
class StateBuffer:
    """A persistent buffer: the state keys that hold its ``value`` (on the CPU, the very tensor that the program reads).

    ``fixed``: the program has its value built in (a causal mask that became a flag of attention).
    """

    names: tuple[str, ...]
    value: Tensor
    fixed: bool = False


@dataclass(frozen=True)
class Unchanging:
    """The tensors of the state that no step changes. ``idle``: parameters by FQN, on rank 0 alone."""

    buffers: Sequence[StateBuffer] = ()
    idle: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def aliases(self) -> dict[str, str]:
        """Further state keys, each with the one that its value is written under."""
        return {alias: buffer.names[0] for buffer in self.buffers for alias in buffer.names[1:]}

    def boxed(self) -> dict[str, BoxedTensor]:
        """Everything by state key; every rank holds all of a buffer."""
        whole = {buffer.names[0]: buffer.value for buffer in self.buffers} | dict(self.idle)
        return {key: _whole(tensor) for key, tensor in whole.items()}

    def check_fixed(self, where: str, before: Sequence[Tensor]) -> None:
        """Raise ProgramError where a fixed buffer was read back as another than ``before``. Collective."""
        error = None
        for buffer, old in zip(self.buffers, before, strict=True):
            if buffer.fixed and error is None and not torch.equal(buffer.value, old):
                error = ProgramError(
                    where, f"{buffer.names[0]} has another value than this program has built in",
                    "a program that was planned from the model with that buffer",
                )
        raise_together(error)


NOTHING = Unchanging()


def unchanging(
    buffers: Sequence[StateBuffer], idle: Mapping[str, Sequence[int]], recipes: Mapping[str, Sequence[Step]] | None,
    seed: int, dtype: torch.dtype,
) -> Unchanging:
    """The unchanging state at the start. ``idle``: whole shapes of the parameters that no block holds, by FQN; without
    ``recipes`` there are none."""
    if recipes is None or dist.get_rank() != 0:
        return Unchanging(buffers)
    return Unchanging(
        buffers, {fqn: initial_value(fqn, shape, dtype, recipes[fqn], seed) for fqn, shape in idle.items()}
    )


def _whole(tensor: Tensor) -> BoxedTensor:
    shape, start = tuple(tensor.shape), (0,) * tensor.dim()
    return BoxedTensor(shape, tensor, ((start, shape, start),))
