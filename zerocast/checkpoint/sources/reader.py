"""SourceReader: any TensorSource as a storage that torch.distributed.checkpoint loads from, each rank its boxes alone."""

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from zerocast.checkpoint.sources.source import HIGH_PRECISION, Entry

if TYPE_CHECKING:
    from zerocast.checkpoint.sources.source import TensorSource


class SourceReader(StorageReader):
    """Reads the high-precision tensors of a source."""

    def __init__(self, source: "TensorSource") -> None:
        self._source = source

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """There is one source."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Each tensor is one chunk."""
        entries = self._source.entries.items()
        tensors: dict[str, Any] = {name: _metadata(entry) for name, entry in entries if entry.dtype in HIGH_PRECISION}
        return Metadata(tensors, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Box after box."""
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._source.read(item.storage_index.fqn, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """It is not made from a path."""
        return False


def _metadata(entry: Entry) -> TensorStorageMetadata:
    size = torch.Size(entry.shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(getattr(torch, entry.dtype)), size, [whole])
