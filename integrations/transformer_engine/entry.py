"""Entry: one set of codes that a call casts, with its master.

The codes are in a tensor of TransformerEngine, or in one direction of a Hybrid tensor. A Hybrid
tensor has two directions, each a tensor with its own quantizer, and both are cast from one master.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerocast.cast.partition import ShardData
from zerocast.formats.layout import Span

from . import host
from .adapters import adapter_of, hybrid, is_quantized, quantizer_of, shares_codes
from .weight_view import WeightView, view_of


@dataclass(frozen=True)
class Entry:
    """A tensor with its view and the master of the elements that this rank owns.

    Attributes:
        tensor: a tensor of TransformerEngine, or a direction of one.
        view: the QuantizedWeight over the tensor's buffers, and how to find these.
        master: the flat master of the elements; None where this rank owns none.
        start: the row-major position of the master's first element; None if there is no master.
        shard: flat storage for the codes of these elements only; None to cast into the tensor.
    """

    tensor: Any
    view: WeightView
    master: Tensor | None
    start: int | None
    shard: ShardData | None

    def scatter(self) -> None:
        """Copy the codes from the scratch buffer into the transpose, if that is where they belong.

        Codes of consecutive elements are not consecutive in a transpose. They are up to three boxes
        of the matrix: the rest of a row, full rows and the start of a row.
        """
        if not self.view.codes_in_transpose or self.master is None or self.start is None or not self.master.numel():
            return
        assert isinstance(self.shard, Tensor)
        matrix = self.view.transpose_of(self.tensor)
        done = 0
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
    """Return the entries that a call casts.

    TypeError, ValueError or RuntimeError, with the weight's index in the message, for arguments
    that cannot be cast.
    """
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
    """Return the tensors with a weight's codes: itself, or the directions of a Hybrid tensor."""
    return [part for _, part in directions(weight)] if is_hybrid(weight) else [weight]


def is_hybrid(tensor: Any) -> bool:
    """Return True for a Hybrid tensor, whose two directions are two tensors."""
    return type(quantizer_of(tensor)) is hybrid()


def directions(tensor: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of the directions of a Hybrid tensor that were not dropped."""
    for name in ("rowwise", "columnwise"):
        with host.known_api():
            part = getattr(tensor, f"_{name}_storage")
        if part is not None:
            yield name, part


def _check_hybrid(tensor: Any, master: Tensor | None, start: int | None, shard: Any) -> None:
    """Raise ValueError with the reason where the directions of a Hybrid tensor are not cast."""
    present = dict(directions(tensor))
    if not present:
        raise ValueError("both directions of the Hybrid tensor were dropped: there is nothing to cast into")
    for name, part in present.items():
        reason = adapter_of(quantizer_of(part)).alone
        if reason:
            kind = type(quantizer_of(part)).__name__
            raise ValueError(f"{kind} is not cast as the {name} direction of a Hybrid tensor: {reason}")
    if "columnwise" in present and getattr(quantizer_of(tensor), "columnwise_source", "original") != "original":
        raise ValueError(
            "the columnwise direction of the Hybrid tensor is made from the rowwise one, which is complete only after the "
            "all-gather; keep the rowwise direction only, or columnwise_source='original'"
        )
    if master is None or len(present) < 2 or (start == 0 and master.numel() == tensor.numel()):
        return
    if not (is_quantized(shard) and is_hybrid(shard) and len(dict(directions(shard))) == 2):
        raise ValueError(
            f"{master.numel()} of {tensor.numel()} elements are on this rank, and an all-gather of one direction's codes leaves "
            "the other direction of the Hybrid tensor stale: pass full masters, a Hybrid shard, or keep one direction"
        )


def _entries(weight: Any, master: Tensor | None, start: int | None, shard: Any, sharded: bool) -> Iterator[Entry]:
    if master is None or not master.numel():
        master = start = shard = None
    elif sharded and shard is None:
        raise ValueError("it has a master on this rank and no shard to cast it into")
    elif master.dim() != 1 and master.is_contiguous():
        master = master.view(-1)
    if not is_hybrid(weight):
        yield _entry(weight, weight.dtype, master, start, shard)
        return
    _check_hybrid(weight, master, start, shard)
    shards = dict(directions(shard)) if is_quantized(shard) and is_hybrid(shard) else {}
    for name, part in directions(weight):
        yield _entry(part, weight.dtype, master, start, shards.get(name, shard))


def _entry(tensor: Any, nominal: torch.dtype, master: Tensor | None, start: int | None, shard: Any) -> Entry:
    view = view_of(tensor, nominal)
    view.locate(tensor)
    storage = _storage(shard, view.weight.format.casts_columnwise)
    if view.codes_in_transpose and master is not None:
        if storage is not None:
            raise ValueError("its codes are in its transpose only, where the codes of a shard are not contiguous")
        storage = view.scratch(master.numel())
    return Entry(tensor, view, master, start, storage)


def _storage(shard: Any, two_payloads: bool) -> ShardData | None:
    """Flat storage for the owned codes, from a tensor, a pair of them (rowwise, columnwise) or a
    tensor of TransformerEngine.
    """
    if shard is None:
        return None
    if is_quantized(shard):
        quantizer = quantizer_of(shard)
        if shares_codes(shard):
            raise TypeError(
                f"its shard is a {type(shard).__name__} of tiles, which reads codes twice: pass its codes only"
            )
        buffers = adapter_of(quantizer).buffers(shard, quantizer)
        rowwise = buffers["rowwise_data"]
        shard = (rowwise, buffers.get("columnwise_data")) if two_payloads else rowwise
    tensors = tuple(shard) if isinstance(shard, (tuple, list)) else (shard,)
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError(f"its shard is {', '.join(type(t).__name__ for t in tensors)}; tensors of codes are needed")
    flat = tuple(_flat(tensor) for tensor in tensors)
    return (flat[0], flat[1]) if len(flat) == 2 else flat[0]


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().view(-1)
    return flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat
