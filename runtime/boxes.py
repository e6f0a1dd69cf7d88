"""Tensors in boxes, and how torch's distributed checkpoint writes and reads them."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .errors import cause_of
from .layout import Box
from .parameters import piece


@dataclass(frozen=True)
class BoxedTensor:
    """A tensor of whole ``shape`` of which ``local`` holds ``boxes``; ``copies``: others that hold the same boxes."""

    shape: tuple[int, ...]
    local: Tensor
    boxes: tuple[Box, ...]
    copies: tuple[Tensor, ...] = ()

    def with_copy(self, other: BoxedTensor) -> BoxedTensor:
        """The same, with another tensor that is filled alike on loading. Raises ValueError where its boxes differ."""
        if other.boxes != self.boxes:
            raise ValueError("copies of one tensor are split differently")
        return replace(self, copies=(*self.copies, other.local))

    def chunks(self) -> list[ChunkStorageMetadata]:
        """The boxes in the checkpoint's terms."""
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _ in self.boxes]

    def at(self, offsets: torch.Size | None, source: Tensor | None = None) -> Tensor:
        """The view of the box that begins at ``offsets`` of the whole tensor."""
        box = next(box for box in self.boxes if offsets is not None and torch.Size(box[0]) == offsets)
        return piece(self.local if source is None else source, box)


class BoxWriter(FileSystemWriter):
    """Fails with the system's error, which the other ranks are told: what an error came of does not travel. Writes into a
    folder that is there: torch's makes one on every node that has none, so that each would keep a part."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as failure:
            raise cause_of(failure) from None


class BoxSavePlanner(DefaultSavePlanner):
    """Writes every :class:`BoxedTensor` of a flat state dict box by box; replicas are written once."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """One write per box held by this rank."""
        self.plan = SavePlan([
            WriteItem(
                MetadataIndex(key, chunk.offsets), WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(tensor.local), torch.Size(tensor.shape)
                ),
            )
            for key, tensor in self.state_dict.items() for chunk in tensor.chunks()
        ])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The elements of one box."""
        tensor: BoxedTensor = self.state_dict[write_item.index.fqn]
        return tensor.at(write_item.index.offset).detach()


class BoxLoadPlanner(LoadPlanner):
    """Reads into the boxes of a flat state dict whatever overlaps them in the checkpoint."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """``state_dict``: BoxedTensors by key, all of them in the checkpoint."""
        self.state: dict[str, BoxedTensor] = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """The reads that fill this rank's boxes."""
        assert self.metadata is not None
        return LoadPlan([
            item for key, tensor in self.state.items()
            for item in create_read_items_for_chunk_list(
                key, self.metadata.state_dict_metadata[key], tensor.chunks()  # type: ignore[arg-type]
            )
        ])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads for itself."""
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Nothing but tensors is read."""
        raise NotImplementedError("a boxed checkpoint holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where a read goes in the first holder."""
        return self._target(read_item, None)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Give what was read to the other holders."""
        for copy in self.state[read_item.dest_index.fqn].copies:
            self._target(read_item, copy).copy_(tensor)

    def _target(self, item: ReadItem, source: Tensor | None) -> Tensor:
        target = self.state[item.dest_index.fqn].at(item.dest_index.offset, source)
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target
