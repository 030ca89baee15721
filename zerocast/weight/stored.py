"""WeightReader and StoredWeight: the buffers of a weight as products read them.

A product asks for one direction of a weight: as stored, dequantized, or upcast to FP8. Eager code
asks the QuantizedWeight. A compiled graph checks the weight before it runs and passes plain buffers
to an op. Making a tensor subclass from these would take the CPU longer than the product, so the op
makes a StoredWeight, a plain object with the same methods.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast import backends
from zerocast.backends import ops
from zerocast.formats import Block, Columnwise, FormatSpec, get_format, layout
from zerocast.weight.gathered_operands import take_gathered_operand


class WeightReader:
    """The methods by which products read a weight.

    Attributes:
        format: the FormatSpec of the stored bytes.
        matrix_shape: (rows, columns) as stored.
        stored_matrices: (number, shape) of the matrices that are stored consecutively.
        amax: f32[1] tensor amax, a part of the decode scale of two-level formats; else None.
        makes_columnwise: True if a columnwise copy is made at each use and not kept.
    """

    __slots__ = ()
    format: Any
    matrix_shape: Any
    stored_matrices: Any
    amax: Any
    makes_columnwise: Any
    # The stages as registered ops: a compiler traces through the methods of a QuantizedWeight and
    # must find operators there. StoredWeight runs inside an op and calls the stages themselves.
    _dequantized: Callable[..., Tensor] = staticmethod(ops.dequantize)
    _upcast: Callable[..., tuple[Tensor, Tensor]] = staticmethod(ops.upcast)
    _transposed: Callable[..., tuple[Tensor, Tensor]] = staticmethod(ops.transposed)

    def stored(self, columnwise: bool) -> tuple[Tensor, Tensor | None]:
        """Return (data, scale_inv) of one direction as stored."""
        raise NotImplementedError

    def cached_per_cast(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the value that `make` derives from the bytes of the last cast."""
        raise NotImplementedError

    def direction(self, columnwise: bool) -> tuple[Tensor, Tensor | None]:
        """Return (data, scale_inv) of one direction. Makes the columnwise copy if none is kept."""
        if not (columnwise and self.makes_columnwise):
            return self.stored(columnwise)
        data, scale_inv = self.stored(columnwise=False)
        count, matrix = self.stored_matrices
        if count > 1:
            return self._transposed_matrices(data, scale_inv, count, matrix)
        made = None if self.format.is_exact_in_fp8 else take_gathered_operand(data, columnwise)
        if made is None:
            key, backend = str(self.format), backends.choose(data.device)
            made = self._transposed(backend, key, data, scale_inv, *matrix)
        made_data, made_scale_inv = made
        # Only block scales are transposed. A scale per tensor stays as it is.
        return made_data, made_scale_inv if self.format.block else scale_inv

    def read(self, columnwise: bool, dtype: torch.dtype) -> Tensor:
        """Return one direction, dequantized to `dtype`, as `[rows, columns]`. It is the storage
        itself if that holds `dtype` already. Raises RuntimeError for a stale or missing columnwise
        copy.
        """
        columnwise = columnwise and self.format.columnwise is not Columnwise.NONE
        if columnwise and self.format.columnwise is Columnwise.TRANSPOSE:
            # A transposed copy holds the same codes, so the rowwise bytes give the same values
            # without the work of making it, or of turning it back. A kept one must be fresh.
            if not self.makes_columnwise:
                self.direction(columnwise)
            columnwise = False
        data, scale_inv = self.direction(columnwise)
        if data.dtype == dtype:
            return data
        key, backend = str(self.format), backends.choose(data.device)
        count, matrix = self.stored_matrices
        if count == 1:
            return self._dequantized(backend, key, data, scale_inv, self.amax, *matrix, columnwise, dtype)
        assert scale_inv is not None
        parts = zip(data.chunk(count), scale_inv.chunk(count), strict=True)
        return torch.cat([self._dequantized(backend, key, *part, None, *matrix, columnwise, dtype) for part in parts])

    def _transposed_matrices(
        self, data: Tensor, scale_inv: Tensor | None, count: int, matrix: Block
    ) -> tuple[Tensor, Tensor]:
        assert scale_inv is not None
        key, backend = str(self.format), backends.choose(data.device)
        parts = zip(data.chunk(count), scale_inv.chunk(count), strict=True)
        made = [self._transposed(backend, key, *part, *matrix) for part in parts]
        return torch.cat([codes for codes, _ in made]), torch.cat([scales for _, scales in made])

    def upcast(self, columnwise: bool) -> tuple[Tensor, Tensor]:
        """Return (E4M3 codes uint8, scale_inv f32) of the same values, for formats that are exact
        in FP8. The layout is as in `direction`: for mxfp4 of an fp8_block weight, for nvfp4 of an
        fp8_current weight.
        """
        # A kept copy `[columns, rows]` is read like a rowwise weight of the transposed shape. If
        # none is kept, the upcast itself transposes the rowwise codes.
        from_copy = columnwise and not self.makes_columnwise
        data, scale_inv = self.direction(columnwise=from_copy)
        if not from_copy and (made := take_gathered_operand(data, columnwise)) is not None:
            return made
        shape = self.matrix_shape[::-1] if from_copy else self.matrix_shape
        key, backend = str(self.format), backends.choose(data.device)
        return self._upcast(backend, key, data, scale_inv, self.amax, *shape, columnwise and not from_copy)

    def operand(self, columnwise: bool) -> tuple[Tensor, Tensor | None]:
        """Return (codes, scale_inv) of one direction as products of codes read them: `upcast` for
        formats that are exact in FP8, else `direction`.
        """
        return self.upcast(columnwise) if self.format.is_exact_in_fp8 else self.direction(columnwise)


class StoredWeight(WeightReader):
    """A weight made from the arguments of an op (`QuantizedWeight.as_arguments`), which lives while
    the op runs. It checks nothing: the graph has read `readable_rowwise_data`, which checks.
    """

    __slots__ = (
        "_buffers",
        "amax",
        "dtype",
        "format",
        "makes_columnwise",
        "matrix_shape",
        "shape",
        "stored_matrices",
    )
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
        self.shape = shape
        self.dtype = dtype
        self.amax = amax
        self.matrix_shape: Block = layout.matrix_shape(shape)
        self.stored_matrices = layout.stored_matrices(self.format, shape) if len(shape) > 2 else (1, self.matrix_shape)
        self.makes_columnwise = on_demand and self.format.columnwise is Columnwise.TRANSPOSE
        self._buffers = (row_data, row_scale), (column_data, column_scale)

    def stored(self, columnwise: bool) -> tuple[Tensor, Tensor | None]:
        """Return (data, scale_inv) of one direction as stored."""
        (row_data, row_scale), (column_data, column_scale) = self._buffers
        if not columnwise:
            return row_data, row_scale
        if self.format.columnwise is Columnwise.SHARED:
            return row_data, column_scale
        assert column_data is not None
        # One scale per tensor serves both directions.
        return column_data, row_scale if column_scale is None else column_scale

    def cached_per_cast(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Make the value. An op has no place to keep it until the next call."""
        return make()
