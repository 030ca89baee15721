"""The buffers of weights: as attributes of a QuantizedWeight (WeightBuffers), as products read them
(WeightReader and StoredWeight), and in flat tensors. Their layouts are in docs/formats/common.md.

A product asks for one direction of a weight: as stored, dequantized, or upcast to FP8. Eager code
asks the QuantizedWeight. A compiled graph checks the weight before it runs and passes plain buffers
to an op. Making a tensor subclass from these would take the CPU longer than the product, so the op
makes a StoredWeight, a plain object with the same methods.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerocast import backends
from zerocast.backends import ops
from zerocast.formats import Block, Columnwise, FormatSpec, get_format, layout
from zerocast.formats.layout import BUFFER_ALIGNMENT_ELEMENTS, round_up
from zerocast.weight.experts import ExpertOf
from zerocast.weight.gathered_operands import take_gathered_operand
from zerocast.weight.state import WeightState

# Decodes (codes, scales, tensor amax).
Dequantize = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


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
        source = self.format.columnwise
        is_transpose = columnwise and source is Columnwise.TRANSPOSE
        # A transposed copy holds the same codes, so the rowwise bytes give the same values without
        # the work of making it, or of turning it back.
        columnwise = columnwise and source not in (Columnwise.NONE, Columnwise.TRANSPOSE)
        data, scale_inv = self.direction(columnwise)
        if is_transpose and not self.makes_columnwise:
            # A copy that is kept must be fresh.
            self.stored(columnwise=True)
        if data.dtype == dtype:
            return data
        count, matrix = self.stored_matrices
        dequantize = self._dequantization(matrix, columnwise, dtype)
        if count == 1:
            return dequantize(data, scale_inv, self.amax)
        assert scale_inv is not None
        parts = zip(data.chunk(count), scale_inv.chunk(count), strict=True)
        return torch.cat([dequantize(*part, None) for part in parts])

    def _dequantization(self, matrix: Block, columnwise: bool, dtype: torch.dtype) -> Dequantize:
        """Return the function that decodes one direction of one matrix to `dtype`."""
        raise NotImplementedError

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

    def _dequantization(self, matrix: Block, columnwise: bool, dtype: torch.dtype) -> Dequantize:
        (data, _), _ = self._buffers
        backend, fmt = backends.choose(data.device), str(self.format)
        return lambda data, scale_inv, amax: ops.dequantized(
            backend, fmt, data, scale_inv, amax, *matrix, columnwise, dtype
        )


class WeightBuffers(Tensor):
    """The buffers of `state`, keyed by name. Reading data or scales waits for an all-gather in
    flight.
    """

    state: WeightState
    expert_of: ExpertOf | None

    @property
    def format(self) -> FormatSpec:
        """The format, which `zerocast.switch` may change."""
        return self.state.format

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(rows, columns) as stored: leading dimensions folded into the rows."""
        return self.state.matrix_shape

    @property
    def stored_matrices(self) -> tuple[int, tuple[int, int]]:
        """(number, shape) of the matrices that are stored consecutively, nearly always one."""
        return self.state.matrices

    @property
    def rowwise_data(self) -> Tensor:
        """uint8 `[M, K]`, `[M, K/2]` for 4-bit codes; nominal dtype for identity. Waits for a
        gather in flight.
        """
        self.wait()
        return self.state.rowwise_data

    @property
    def rowwise_scale_inv(self) -> Tensor | None:
        """Decode scales of the rowwise data: f32, bf16, or uint8 holding E8M0 or E4M3 codes; None
        for identity. Waits for a gather in flight, which may fill them.
        """
        # Compiled functions read it twice at every call.
        if self.state.validity.before_read is not None:
            self.wait()
        return self.state.buffers["rowwise_scale_inv"]

    @property
    def columnwise_data(self) -> Tensor | None:
        """uint8 `[K, M]`, `[K, M/2]` for 4-bit codes, `[M, K]` for mxfp8; None until
        post-all-gather processing.
        """
        self.wait()
        return self.state.buffers["columnwise_data"]

    @property
    def columnwise_scale_inv(self) -> Tensor | None:
        """Decode scales of the columnwise data."""
        self.wait()
        return self.state.buffers["columnwise_scale_inv"]

    @property
    def amax(self) -> Tensor | None:  # type: ignore[override]
        """f32[1]: the amax of the last cast; None for formats without a tensor amax."""
        return self.state.buffers["amax"]

    @property
    def scale(self) -> Tensor | None:
        """f32[1]: the scale of the next cast; delayed scaling only."""
        return self.state.buffers["scale"]

    @property
    def amax_history(self) -> Tensor | None:
        """f32[amax_history_len] of past amaxes; None without delayed scaling."""
        return self.state.buffers["amax_history"]

    @property
    def high_precision_init_val(self) -> Tensor | None:
        """The value before it was quantized, until an optimizer made its masters, a plan cast other
        ones, or different bytes were loaded.
        """
        return self.state.initial

    @high_precision_init_val.setter
    def high_precision_init_val(self, value: Tensor | None) -> None:
        self.state.initial = value

    @property
    def master_owner(self) -> Any:
        """The object that shows the master weights to `zerocast.verify`, such as an optimizer or a
        plan. None if there is none, or if it is gone.
        """
        owner = self.state.validity.owner
        return None if owner is None else owner()

    def wait(self) -> None:
        """Wait for the all-gather of this weight, if one is in flight."""
        # Read the attribute once. Another thread that completes the last gather sets it to None,
        # which could happen between a test and a second read.
        finish = self.state.validity.before_read
        if finish is not None:
            finish(self if self.expert_of is None else self.expert_of.weight)


def into_flat_buffer(weights: Sequence[WeightBuffers], name: str) -> list[Tensor]:
    """Move the buffer `name` of all weights into flat tensors, and return one for each dtype. A
    stage then sees few storages.

    Weights whose format has no such buffer are left out. Storage of a buffer that does not exist
    yet is uninitialised.
    """
    by_dtype: dict[torch.dtype, list[tuple[WeightBuffers, layout.Buffer]]] = {}
    for weight in weights:
        buffer = layout.buffers(weight.format, weight.shape, weight.dtype)[name]
        if buffer is not None:
            by_dtype.setdefault(buffer.dtype, []).append((weight, buffer))
    flats = []
    for dtype, members in by_dtype.items():
        sizes = [round_up(math.prod(buffer.shape), BUFFER_ALIGNMENT_ELEMENTS) for _, buffer in members]
        flat = torch.empty(sum(sizes), dtype=dtype, device=members[0][0].device)
        for (weight, buffer), part in zip(members, flat.split(sizes), strict=True):
            weight.state.move_to({name: part[: math.prod(buffer.shape)].view(buffer.shape)})
        flats.append(flat)
    return flats
