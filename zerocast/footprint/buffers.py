"""Bytes of the buffers of whole weights, from `zerocast.formats.layout`."""

import math
from collections.abc import Iterable

from torch import Tensor

from zerocast.cast.flat_buffer import ALIGNMENT
from zerocast.formats import Columnwise, FormatSpec
from zerocast.formats.layout import Buffer, amax_counts, buffers, round_up
from zerocast.weight import QuantizedWeight

SCALES = ("rowwise_scale_inv", "columnwise_scale_inv", "amax", "scale", "amax_history")


def quantized(tensors: Iterable[Tensor]) -> list[QuantizedWeight]:
    """Those that are."""
    return [tensor for tensor in tensors if isinstance(tensor, QuantizedWeight)]


def scales(weight: QuantizedWeight) -> int:
    """Scale buffers of both directions with their padding, amax and delayed scaling, in arenas."""
    found = buffers(weight.format, weight.matrix_shape, weight.dtype)
    names = [name for name in SCALES if not (name == "columnwise_scale_inv" and _shared(weight.format))]
    return sum(_in_arena(found[name]) for name in names)


def transposed(weight: QuantizedWeight) -> int:
    """Codes that are made after the all-gather, in a flat buffer; none where they are gathered or not needed."""
    if weight.format.columnwise is not Columnwise.TRANSPOSE:
        return 0
    return _in_arena(buffers(weight.format, weight.matrix_shape, weight.dtype)["columnwise_data"])


def packed_amaxes(weights: Iterable[QuantizedWeight], ranks: int) -> int:
    """The buffer of the one all-reduce, in bf16: amaxes, and two numbers by which several ranks compare their calls."""
    amaxes = sum(sum(amax_counts(weight.format, *weight.matrix_shape)) for weight in weights)
    return 2 * (amaxes + (2 if amaxes and ranks > 1 else 0))


def _shared(fmt: FormatSpec) -> bool:
    return fmt.columnwise is Columnwise.TRANSPOSE and fmt.block is None


def _in_arena(buffer: Buffer | None) -> int:
    return round_up(math.prod(buffer.shape), ALIGNMENT) * buffer.dtype.itemsize if buffer else 0
