"""TensorShard: presents a flat shard of a tensor to torch.distributed.checkpoint.

Any flat span of a matrix consists of at most three boxes. Each box is a view of the flat shard, so
that a save copies nothing and a load writes in place, for any number of ranks that saved.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerocast.formats.layout import Span

# Methods that torch.distributed.checkpoint calls before it uses the protocol below.
_ASKED = {"size", "dim", "numel", "nelement", "stride", "storage_offset", "data_ptr", "untyped_storage", "element_size"}
# Methods that torch's DefaultStager calls. It also copies the attributes `flat` and `chunks`.
_STAGED = {"new_empty", "set_"}


class TensorShard(Tensor):
    """One rank's elements of a tensor that is sharded over ranks.

    Implements the protocol of torch.distributed._checkpointable. The tensor itself is a placeholder
    without memory that has the shape and dtype of the full tensor. Computing with it raises
    TypeError.

    Attributes:
        flat: the elements of this rank, one-dimensional.
        span: their range in the flattened full tensor.
        chunks: views of `flat` as boxes, by their offsets in the full tensor.
    """

    flat: Tensor
    span: Span
    chunks: dict[torch.Size, Tensor]

    @staticmethod
    def from_flat(flat: Tensor, span: Span, shape: Sequence[int]) -> "TensorShard":
        """Return the shard of a tensor of `shape`; `flat` is contiguous and has `span.numel`
        elements.
        """
        shard: TensorShard = Tensor._make_subclass(TensorShard, flat.new_empty(()).expand(tuple(shape)))
        shard.flat = flat
        shard.span = span
        shard.chunks = {}
        start = 0
        for offsets, sizes in span.boxes(shape):
            numel = torch.Size(sizes).numel()
            shard.chunks[torch.Size(offsets)] = flat[start : start + numel].view(sizes)
            start += numel
        return shard

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return the boxes that this rank writes, for torch.distributed.checkpoint."""
        properties = TensorProperties.create_from_tensor(self.flat)
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(offsets, box.size()), properties, self.size()),
            )
            for offsets, box in self.chunks.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes that this rank reads, for torch.distributed.checkpoint."""
        return [ChunkStorageMetadata(offsets, box.size()) for offsets, box in self.chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the view of the flat shard that holds a box."""
        assert index.offset is not None
        return self.chunks[index.offset]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Return the shape, span and dtype, without the elements."""
        return f"TensorShard(shape={tuple(self.shape)}, span=[{self.span.start}, {self.span.stop}), dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise TypeError for every function that would read the placeholder."""
        name = getattr(func, "__name__", "")
        if name in _ASKED or name in _STAGED or name == "__get__" or name.startswith("is_"):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise TypeError(f"{name} of a TensorShard: its elements are on several ranks; this rank's are in `flat`")

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorShard":
        """Return a shard with its own elements, which a step does not change."""
        return TensorShard.from_flat(self.flat.clone(), self.span, self.shape)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError: one rank's shard is not a checkpoint."""
        raise TypeError("the state of several ranks is saved with torch.distributed.checkpoint, not with torch.save")
