"""Entry: one set of codes that a call casts, a tensor of TransformerEngine or one direction of a Hybrid one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerocast.cast.partition import ShardData
from zerocast.formats.layout import Span

from .adapters import adapter_of, is_quantized, quantizer_of
from .hybrid import check_hybrid, directions, is_hybrid
from .twin import Twin, twin_of


@dataclass(frozen=True)
class Entry:
    """`tensor` with its twin, the master of `span` that is owned here, and storage for the codes of that span alone, if given."""

    tensor: Any
    twin: Twin
    master: Tensor | None
    start: int | None
    shard: ShardData | None

    def scatter(self) -> None:
        """Put codes that were cast beside the tensor where they belong: into its transpose, in at most three pieces."""
        if not self.twin.codes_in_transpose or self.master is None or self.start is None or not self.master.numel():
            return
        assert isinstance(self.shard, Tensor)
        matrix, done = self.twin.transpose_of(self.tensor), 0
        for offsets, sizes in Span(self.start, self.start + self.master.numel()).boxes(matrix.shape):
            piece = self.shard[done : done + sizes[0] * sizes[1]].view(sizes)
            matrix[offsets[0] : offsets[0] + sizes[0], offsets[1] : offsets[1] + sizes[1]].copy_(piece)
            done += piece.numel()


def entries_of(
    model_weights: Sequence[Any],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    shards: Sequence[Any] | None,
) -> list[Entry]:
    """What a call casts. TypeError, ValueError or RuntimeError, with the weight in the message, for what it cannot."""
    given = [None] * len(model_weights) if shards is None else shards
    lengths = [len(model_weights), len(master_weights), len(start_offsets), len(given)]
    if len(set(lengths)) > 1:
        raise ValueError(
            "lists differ in length: {} model weights, {} master weights, {} start offsets, {} shards".format(*lengths)
        )
    entries: list[Entry] = []
    for index, arguments in enumerate(zip(model_weights, master_weights, start_offsets, given, strict=True)):
        try:
            entries += _entries(*arguments, sharded=shards is not None)
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"model weight {index}: {error}") from error
    return entries


def parts_of(weight: Any) -> list[Any]:
    """The tensors that hold the codes of a weight: itself, or the directions of a Hybrid one that are there."""
    return [part for _, part in directions(weight)] if is_hybrid(weight) else [weight]


def _entries(weight: Any, master: Tensor | None, start: int | None, shard: Any, sharded: bool) -> Iterator[Entry]:
    if master is None or not master.numel():
        master = start = shard = None
    elif sharded and shard is None:
        raise ValueError("it has a master here and no shard to cast it into")
    elif master.dim() != 1 and master.is_contiguous():
        master = master.view(-1)
    if not is_hybrid(weight):
        yield _entry(weight, weight.dtype, master, start, shard)
        return
    check_hybrid(weight, master, start, shard)
    shards = dict(directions(shard)) if is_quantized(shard) and is_hybrid(shard) else {}
    for name, part in directions(weight):
        yield _entry(part, weight.dtype, master, start, shards.get(name, shard))


def _entry(tensor: Any, nominal: torch.dtype, master: Tensor | None, start: int | None, shard: Any) -> Entry:
    twin = twin_of(tensor, nominal)
    twin.follow(tensor)
    storage = _storage(shard, twin.adapter.two_payloads)
    if twin.codes_in_transpose and master is not None:
        if storage is not None:
            raise ValueError("its codes are in its transpose alone, where the codes of a shard do not lie side by side")
        storage = twin.scratch(master.numel())
    return Entry(tensor, twin, master, start, storage)


def _storage(shard: Any, two_payloads: bool) -> ShardData | None:
    """Flat storage of the owned codes, of a tensor, a pair of them, or a tensor of TransformerEngine."""
    if shard is None:
        return None
    if is_quantized(shard):
        quantizer = quantizer_of(shard)
        held = adapter_of(quantizer).buffers(shard, quantizer)
        shard = (held["rowwise_data"], held.get("columnwise_data")) if two_payloads else held["rowwise_data"]
    tensors = tuple(shard) if isinstance(shard, (tuple, list)) else (shard,)
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError(f"its shard is {', '.join(type(t).__name__ for t in tensors)}; tensors of codes are needed")
    flat = tuple(_flat(tensor) for tensor in tensors)
    return (flat[0], flat[1]) if len(flat) == 2 else flat[0]


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().view(-1)
    return flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat
