"""StoredWeight: the buffers of a weight as products read them.

A product with a QuantizedWeight asks for one direction, as stored, dequantized or upcast. A graph
has looked at the weight before it is called, and passes its buffers. To make a tensor of them again
would take the host longer than the product: a StoredWeight is a plain object with the same answers.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast import backends
from zerocast.backends import ops
from zerocast.formats import Block, Columnwise, FormatSpec, get_format, layout


class WeightReader:
    """A weight of a `format` and its `matrix_shape` (rows, columns), as products read it.

    With `makes_columnwise` a columnwise copy is made at each use and not kept.
    """

    __slots__ = ()
    format: Any
    matrix_shape: Any
    amax: Any
    makes_columnwise: Any
    # the stages, here as operators, which a compiler sees
    _dequantized: Callable[..., Tensor] = staticmethod(ops.dequantize)
    _upcast: Callable[..., tuple[Tensor, Tensor]] = staticmethod(ops.upcast)
    _transposed: Callable[..., tuple[Tensor, Tensor]] = staticmethod(ops.transposed)

    def stored(self, columnwise: bool) -> tuple[Tensor, Tensor | None]:
        """(data, scale_inv) of one direction as they lie in memory."""
        raise NotImplementedError

    def cached_per_cast(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The value that `make` derives from the bytes of the last cast."""
        raise NotImplementedError

    def direction(self, columnwise: bool) -> tuple[Tensor, Tensor | None]:
        """(data, scale_inv) of one direction, of a columnwise copy that is not kept a new one."""
        if not (columnwise and self.makes_columnwise):
            return self.stored(columnwise)
        data, scale_inv = self.stored(columnwise=False)
        key, backend = str(self.format), backends.choose(data.device)
        made = self._transposed(backend, key, data, scale_inv, *self.matrix_shape)
        return made[0], made[1] if self.format.block else scale_inv

    def read(self, columnwise: bool, dtype: torch.dtype) -> Tensor:
        """One direction, dequantized to `dtype` `[rows, columns]`; the storage itself where that is
        what it holds. RuntimeError for a stale or missing columnwise copy.
        """
        columnwise = columnwise and self.format.columnwise is not Columnwise.NONE
        if self.makes_columnwise:
            columnwise = False  # the transposed codes are the same codes
        data, scale_inv = self.direction(columnwise)
        if data.dtype == dtype:
            return data
        key, backend = str(self.format), backends.choose(data.device)
        return self._dequantized(backend, key, data, scale_inv, self.amax, *self.matrix_shape, columnwise, dtype)

    def upcast(self, columnwise: bool) -> tuple[Tensor, Tensor]:
        """(E4M3 codes uint8, scale_inv f32 a 128x128 block) of the same values, laid out as the
        `direction` of an fp8_block weight; for formats that are exact in FP8.
        """
        from_copy = columnwise and not self.makes_columnwise  # which lies as a rowwise weight does
        data, scale_inv = self.direction(columnwise=from_copy)
        shape = self.matrix_shape[::-1] if from_copy else self.matrix_shape
        key, backend = str(self.format), backends.choose(data.device)
        return self._upcast(backend, key, data, scale_inv, *shape, columnwise and not from_copy)


class StoredWeight(WeightReader):
    """The weight that `QuantizedWeight.as_arguments` took apart, for as long as an op runs; what a
    weight checks before it is read was checked.
    """

    __slots__ = ("_buffers", "amax", "dtype", "format", "makes_columnwise", "matrix_shape", "shape")
    is_traced = False
    _dequantized = staticmethod(ops.dequantized)
    _upcast = staticmethod(ops.upcast_codes)
    _transposed = staticmethod(ops.transposed_copy)

    def __init__(
        self,
        shape: Sequence[int],
        fmt: str,
        dtype: torch.dtype,
        on_demand: bool,
        row_data: Tensor,
        row_scale: Tensor | None,
        column_data: Tensor | None,
        column_scale: Tensor | None,
        amax: Tensor | None,
    ) -> None:
        self.format: FormatSpec = get_format(fmt)
        self.shape, self.dtype, self.amax = shape, dtype, amax
        self.matrix_shape: Block = layout.matrix_shape(shape)
        self.makes_columnwise = on_demand and self.format.columnwise is Columnwise.TRANSPOSE
        self._buffers = (row_data, row_scale), (column_data, column_scale)

    def stored(self, columnwise: bool) -> tuple[Tensor, Tensor | None]:
        """(data, scale_inv) of one direction as they lie in memory."""
        (row_data, row_scale), (column_data, column_scale) = self._buffers
        if not columnwise:
            return row_data, row_scale
        if self.format.columnwise is Columnwise.SHARED:
            return row_data, column_scale
        assert column_data is not None
        return column_data, row_scale if column_scale is None else column_scale

    def cached_per_cast(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives: an op keeps nothing."""
        return make()
