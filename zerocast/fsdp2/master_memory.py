"""MasterMemory: the shards of a model's masters side by side in a few tensors, so that a stage is given few, however many weights.

FSDP2 allocates a shard when it cuts a parameter, and where that was on the meta device when the module is given storage. Both ask
the parameter for a tensor like it (`master_parameter.py`), which comes from here the first time. A shard that is moved later (to
another device, by `load_state_dict(assign=True)`) has memory of its own.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zerocast.formats.layout import round_up

PIECES = (
    8  # so that FSDP2, which frees a parameter once it is cut, never finds the memory of all shards taken beforehand
)
ALIGNMENT = 64  # elements


class MasterMemory:
    """`sizes` are the elements of whole weights by name."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._waiting = dict(sizes)
        self._piece = -(-sum(sizes.values()) // PIECES)
        self._rest: Tensor | None = None
        self._padded: dict[str, int] = {}  # elements of a shard on the meta device

    def take(self, name: str, size: Sequence[int], device: torch.device) -> Tensor | None:
        """Zeros f32 `size` for a shard of a weight; None where the weight has its place already, or needs none."""
        numel = math.prod(size)
        if device.type == "meta":
            self._padded[name] = numel
        if name not in self._waiting or not numel or device.type == "meta" or numel < self._padded.get(name, 0):
            return None  # a short shard comes again, once FSDP2 pads it
        place = torch.empty(0, device=device)  # no view of a piece: a write to it is no write to the others
        room = round_up(numel, ALIGNMENT)
        if self._rest is None or self._rest.device != place.device or self._rest.numel() < room:
            self._rest = torch.empty(self._next_piece(numel / self._waiting[name], room), device=device)
        del self._waiting[name]
        offset, storage = self._rest.storage_offset(), self._rest.untyped_storage()
        self._rest = self._rest[room:] if self._waiting else None
        place.set_(storage, offset, (numel,), (1,))
        return place.zero_().view(tuple(size))

    def _next_piece(self, part: float, least: int) -> int:
        """Elements of the shards to come, each the same `part` of its weight, until a piece is full."""
        whole, elements = 0, 0
        for size in self._waiting.values():
            if whole >= self._piece:
                break
            whole += size
            elements += round_up(math.ceil(size * part), ALIGNMENT)
        return max(elements, least)
