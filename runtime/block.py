"""Block: one link of the model's chain, holding this rank's part of its parameters under the user's attribute paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .collectives import TensorAxis
from .layout import Layout


@dataclass(frozen=True, slots=True)
class Declaration:
    """What is known of one parameter: its state key, how it lies over the tensor axis, and whether every tensor rank's
    gradient is only a part of the sum."""

    fqn: str
    layout: Layout
    partial_gradient: bool


class Block(nn.Module):
    """A module whose parameters are declared by whole shape and kept by local shape.

    ``zero_stage`` and ``data_mesh`` are set when ZeRO is applied. ``bindings`` gives the state key (the user's own FQN)
    of each path; ``constants`` the values of constants by key (on the CPU). ``recomputes``: what the backward pass makes
    again, ``all`` or ``attention``. Build it under ``torch.device("meta")`` and
    a default dtype; :func:`runtime.initialize.initialize` fills it.
    """

    recomputes = ""

    def __init__(
        self, name: str, tensor: TensorAxis, bindings: Mapping[str, str] | None = None,
        constants: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.name, self.tensor = name, tensor
        self.declarations: dict[str, Declaration] = {}
        self.constant_keys: dict[str, str] = {}
        self.zero_stage = 0
        self.data_mesh: DeviceMesh | None = None
        self._bindings = dict(bindings or {})
        self._constants = constants or {}

    def declare(
        self, path: str, shape: Sequence[int], shard: int | None = None, segments: Sequence[int] = (), unit: int = 1,
        partial_gradient: bool = False, trainable: bool = True, dtype: torch.dtype | None = None,
    ) -> None:
        """Register the own part of a parameter of whole ``shape`` under a dotted ``path``.

        ``shard``: the dim that is split over the tensor axis (None: replicated), in ``segments`` and multiples of
        ``unit`` elements. ``partial_gradient``: each rank's gradient is a part, to be summed over the axis once a step.
        A parameter without dims is kept as one element (FSDP2 shards no scalars); its state has none all the same.
        """
        layout = Layout(tuple(shape), self.tensor.degree, shard, tuple(segments), unit)
        local = torch.empty(layout.local_shape(self.tensor.rank) or (1,), dtype=dtype)
        container, leaf = self._container(path)
        container.register_parameter(leaf, nn.Parameter(local, requires_grad=trainable))
        partial = partial_gradient and trainable and self.tensor.degree > 1
        self.declarations[path] = Declaration(self._bindings.get(path, path), layout, partial)

    def share(self, path: str, other: Block, other_path: str) -> None:
        """Tie the parameter declared under ``path`` to another block's: one tensor, two names."""
        container, leaf = self._container(path)
        container.register_parameter(leaf, other.get_parameter(other_path))

    def constant(self, path: str, key: str) -> None:
        """Register the constant ``key`` as a buffer that is in no state."""
        container, leaf = self._container(path)
        container.register_buffer(leaf, torch.empty_like(self._constants[key], device=self._device()), persistent=False)
        self.constant_keys[path] = key

    def fill_constants(self) -> None:
        """Write the constants' values into their buffers (after these left the meta device)."""
        for path, key in self.constant_keys.items():
            self.get_buffer(path).copy_(self._constants[key])

    def entries(self) -> Iterator[tuple[Declaration, nn.Parameter]]:
        """Every declared parameter as it is now (sharded after ZeRO is applied), with what is known of it."""
        for path, declaration in self.declarations.items():
            yield declaration, self.get_parameter(path)

    def _container(self, path: str) -> tuple[nn.Module, str]:
        *names, leaf = path.split(".")
        container: nn.Module = self
        for name in names:
            if name not in container._modules:
                container.add_module(name, nn.Module())
            container = container.get_submodule(name)
        return container, leaf

    @staticmethod
    def _device() -> torch.device:
        return torch.empty(0).device


def blocks_of(module: nn.Module) -> tuple[Block, ...]:
    """The blocks inside a stage module, in order."""
    return tuple(child for child in module.modules() if isinstance(child, Block))
