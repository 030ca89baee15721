"""WeightView: a tensor of TransformerEngine as a QuantizedWeight over the same buffers."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zerocast import QuantizedWeight
from zerocast.formats import Columnwise, ScaleRule, layout

from .adapters import Adapter, adapter_of, quantizer_of

_COLUMNWISE = ("columnwise_data", "columnwise_scale_inv")
_DATA = "rowwise_data"


class WeightView:
    """A QuantizedWeight over the current buffers of a tensor. It does not keep the tensor alive.

    TransformerEngine may replace the buffers of a tensor, or drop its columnwise copy, between two
    calls. `locate` and `locate_columnwise` point `weight` at the current ones.

    Args:
        tensor: the tensor of TransformerEngine.
        nominal: the dtype that masters are rounded to before the cast.

    Attributes:
        adapter: the names and conventions of the tensor's quantizer class.
        weight: the QuantizedWeight over the tensor's buffers.
        derives: True if the columnwise copy is the transpose of the rowwise codes.
        shares: True if one set of codes serves both directions (MXFP8 in tiles of 32x32). A cast
            writes the scales of both. TransformerEngine's attribute for columnwise codes is pointed
            at the rowwise memory by `share`.
        codes_in_transpose: True if an FP8 tensor has its codes only in the transpose, like one
            direction of a Hybrid tensor on GPUs whose products read transposes. `weight` then has
            no codes.
        owns_amax: True if the tensor has no buffer for the amax that a cast writes. The weight then
            has its own.
    """

    def __init__(self, tensor: Any, nominal: torch.dtype) -> None:
        self._quantizer = quantizer_of(tensor)
        self.adapter: Adapter = adapter_of(self._quantizer)
        self._nominal = nominal
        self._shape = tuple(tensor.shape)
        fmt = self._format = self.adapter.format_of(tensor, self._quantizer)
        layout.check_shape(fmt, self._shape)
        self._expected = layout.buffers(fmt, layout.matrix_shape(self._shape), nominal)
        self._choices = self.adapter.choices(self._quantizer)
        self.derives = fmt.columnwise is Columnwise.TRANSPOSE
        self.shares = fmt.columnwise is Columnwise.SHARED
        # The columnwise scales of shared codes. TransformerEngine may drop them from the tensor.
        self._scales: Tensor | None = None
        # Address and storage size of each buffer of `weight`, to detect a move at the next call.
        self._addresses: dict[str, tuple[int, int]] = {}
        # The codes of this rank's shard until they are copied into the transpose.
        self._scratch: Tensor | None = None
        buffers: dict[str, Tensor] = {}
        present = self._present(tensor)
        # A cast writes all buffers except a copy that is made from the gathered codes.
        self._written = [name for name in present if name not in _COLUMNWISE or not self.derives]
        transpose = present.get("columnwise_data")
        self.codes_in_transpose = self.derives and present[_DATA] is None and transpose is not None
        if self.codes_in_transpose and transpose is not None:
            self._written.remove(_DATA)
            buffers[_DATA] = torch.empty(0, dtype=torch.uint8, device=transpose.device)
        buffers |= {name: self._noted(name, present[name]) for name in self._written}
        self.owns_amax = "amax" not in present and self._expected["amax"] is not None
        if self.owns_amax:
            buffers["amax"] = torch.zeros(1, dtype=torch.float32, device=buffers[_DATA].device)
        make = QuantizedWeight.of_part if self.codes_in_transpose else QuantizedWeight.of_buffers
        self.weight = make(self._shape, fmt, nominal, buffers)

    def is_of(self, tensor: Any, nominal: torch.dtype) -> bool:
        """Return True if the tensor still has the format, shape and dtype of this view."""
        if self._nominal is not nominal or tuple(tensor.shape) != self._shape:
            return False
        if self.codes_in_transpose and getattr(tensor, self.adapter.of_tensor[_DATA]) is not None:
            return False
        quantizer = getattr(tensor, "_quantizer", None)
        if quantizer in (None, self._quantizer) and self._choices == self.adapter.choices(self._quantizer):
            return True
        return self._takes(tensor, self._quantizer if quantizer is None else quantizer)

    def _takes(self, tensor: Any, quantizer: Any) -> bool:
        """Accept a new quantizer of the same format and return True; otherwise return False.

        The scale and amax of delayed scaling are buffers of the quantizer: `locate` finds the
        buffers of the new one.
        """
        is_same = adapter_of(quantizer) is self.adapter
        is_same = is_same and self.adapter.format_of(tensor, quantizer) == self.weight.format
        if is_same:
            self._quantizer = quantizer
            self._choices = self.adapter.choices(quantizer)
        return is_same

    def cast_attributes(self, tensor: Any) -> tuple[str, ...]:
        """Return the attributes that decide how this tensor is cast, and into which buffers."""
        checked = self.adapter.checked(tensor, self._quantizer)
        written = [*self._written, *(_COLUMNWISE[:1] if self.shares else ())]
        return self._watched(tensor, ["dtype", *checked, *self.adapter.places(written)])

    def copy_attributes(self, tensor: Any) -> tuple[str, ...]:
        """Return the attributes that hold the rowwise buffers and the columnwise copy."""
        copy = [name for name in _COLUMNWISE if name in self.adapter.of_tensor]
        return self._watched(tensor, self.adapter.places([*self._written, *copy]))

    def _watched(self, tensor: Any, names: list[str]) -> tuple[str, ...]:
        # A part of a tensor may have no quantizer, and then has no attributes of one.
        if getattr(tensor, "_quantizer", None) is self._quantizer:
            return ("_quantizer", *names)
        return ("_quantizer", *(name for name in names if not name.startswith("_quantizer.")))

    def locate(self, tensor: Any) -> None:
        """Point the weight at the current buffers that a cast writes.

        Raises ValueError for a buffer that was dropped, and for options that are not cast.
        """
        self.adapter.check(tensor, self._quantizer)
        self._locate(self._present(tensor), self._written)

    def locate_columnwise(self, tensor: Any) -> None:
        """Point the weight at the current rowwise buffers and columnwise copy, if any."""
        present = self._present(tensor)
        self._locate(present, self._written)
        if self.shares:
            self.weight.state.buffers["columnwise_data"] = self._foreign_codes(tensor)
            return
        copy = [name for name in _COLUMNWISE if name in present]
        if any(present[name] is None for name in copy):
            self.forget_columnwise()
        else:
            self._locate(present, copy)

    def share(self, tensor: Any) -> None:
        """Point the tensor's columnwise codes at its rowwise ones, and restore dropped scales.

        Does nothing unless one set of codes serves both directions.
        """
        if not self.shares:
            return
        codes, copy, scale_inv = (self.adapter.of_tensor[name] for name in (_DATA, *_COLUMNWISE))
        if getattr(tensor, copy) is None or self._foreign_codes(tensor) is not None:
            setattr(tensor, copy, getattr(tensor, codes))
            self.weight.state.buffers["columnwise_data"] = None
        if getattr(tensor, scale_inv) is None:
            setattr(tensor, scale_inv, self.weight.state.buffers["columnwise_scale_inv"])

    def _foreign_codes(self, tensor: Any) -> Tensor | None:
        """Columnwise codes of the tensor in memory other than the rowwise codes'; None without any.

        They are stale after a cast, which writes the shared codes only.
        """
        codes, copy = (getattr(tensor, self.adapter.of_tensor[name]) for name in (_DATA, "columnwise_data"))
        if copy is None or codes is None or copy.data_ptr() == codes.data_ptr():
            return None
        foreign: Tensor = copy.detach().view(torch.uint8).view(self.weight.matrix_shape)
        return foreign

    def _present(self, tensor: Any) -> dict[str, Tensor | None]:
        """Return the tensor's current buffers, without columnwise codes that share the rowwise
        memory.
        """
        present = self.adapter.buffers(tensor, self._quantizer)
        if self.shares:
            del present["columnwise_data"]
            present["columnwise_scale_inv"] = self._columnwise_scales(present)
        return present

    def _columnwise_scales(self, present: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return the columnwise scales of tiles: the tensor's, or else the last ones that it had.

        A tensor that never had any gets new ones, made from its rowwise scales. `share` gives them
        to the tensor.
        """
        rowwise, columnwise = present["rowwise_scale_inv"], present["columnwise_scale_inv"]
        if columnwise is not None:
            self._scales = columnwise
        if self._scales is None and rowwise is not None:
            buffer, block = self._expected["columnwise_scale_inv"], self._format.block
            assert buffer is not None and block is not None
            height, width = block
            block_rows, block_columns = layout.amax_grid(
                block, *layout.matrix_shape(self._shape)
            )  # tiles of the matrix
            # A tile has one scale. Rowwise it is stored once for each of its rows, columnwise once
            # for each of its columns.
            self._scales = torch.full(buffer.shape, buffer.padding, dtype=buffer.dtype, device=rowwise.device)
            tiles = rowwise.detach().view(torch.uint8)[: block_rows * height : height, :block_columns]
            self._scales[:block_rows, : block_columns * width] = tiles.repeat_interleave(width, 1)
        return self._scales

    def live(self, tensor: Any) -> QuantizedWeight:
        """Return the bytes that matrix products read from the tensor now, without an outdated copy.

        Returns a separate weight over the same buffers, for `zerocast.verify`. Codes that are only
        in a transpose are copied, so that they can be read by rows.
        """
        present = self._present(tensor)
        if self.adapter.outdated(tensor) or self.codes_in_transpose or present.get(_COLUMNWISE[0]) is None:
            present = {name: buffer for name, buffer in present.items() if name in self._written}
        buffers = {name: self._checked(name, buffer) for name, buffer in present.items()}
        if "columnwise_scale_inv" in buffers and self.derives and self.weight.format.block is not None:
            buffers["columnwise_scale_inv"] = self._padded(buffers["columnwise_scale_inv"])
        if self.shares and (foreign := self._foreign_codes(tensor)) is not None:
            buffers["columnwise_data"] = foreign
        own_amax = self.weight.state.buffers["amax"]
        if self.owns_amax and own_amax is not None:
            buffers["amax"] = own_amax
        if self.codes_in_transpose:
            buffers[_DATA] = self.transpose_of(tensor).contiguous()
        return QuantizedWeight.of_buffers(self._shape, self.weight.format, self._nominal, buffers)

    def _padded(self, scale_inv: Tensor) -> Tensor:
        """Return the scales of a columnwise copy with zerocast's padding.

        TransformerEngine's padding may have different values. No product reads it, and a comparison
        of all bytes must not see the difference.
        """
        fmt = self.weight.format
        rows, columns = self.weight.matrix_shape
        buffer = layout.columnwise_scale_inv(fmt, rows, columns)
        block_rows, block_columns = layout.amax_grid(fmt.block, columns, rows)
        assert buffer is not None
        if fmt.scale_rule is not ScaleRule.FP32:
            # FP32 scales have one row per block, other scales one row per row of the copy.
            block_rows = columns
        padded = torch.full_like(scale_inv, buffer.padding)
        padded[:block_rows, :block_columns] = scale_inv[:block_rows, :block_columns]
        return padded

    def forget_columnwise(self) -> bool:
        """Drop the references to a derived columnwise copy. Returns True if there was one."""
        has_copy = self.derives and self.weight.state.buffers["columnwise_data"] is not None
        if has_copy:
            for name in _COLUMNWISE:
                self._addresses.pop(name, None)
            self.weight.state.drop_columnwise()
        return has_copy

    def give_columnwise(self, tensor: Any) -> None:
        """Give the tensor the columnwise copy that was made for it, if it had none."""
        for name in _COLUMNWISE:
            attribute, made = self.adapter.of_tensor.get(name), self.weight.state.buffers[name]
            if attribute is None or made is None or self._addresses.get(name) == _address_of(made):
                continue
            # The host's FP8 transpose has all dimensions of the tensor. Scales, and codes of two
            # elements per byte, have the shape of a matrix.
            if self.weight.format.elements_per_byte == 1 and name == "columnwise_data":
                made_view = made.view(self._shape[-1], *self._shape[:-1])
            else:
                made_view = made
            setattr(tensor, attribute, made_view)
            self._addresses[name] = _address_of(made)

    def transpose_of(self, tensor: Any) -> Tensor:
        """Return the codes in the transpose, as a view of shape `[M, K]`."""
        name = "columnwise_data"
        present = self.adapter.buffers(tensor, self._quantizer)
        return self._checked(name, present[name]).t()

    def scratch(self, numel: int) -> Tensor:
        """uint8[numel], a buffer for codes that are then copied into the transpose."""
        if self._scratch is None or self._scratch.numel() != numel:
            self._scratch = torch.empty(numel, dtype=torch.uint8, device=self.weight.device)
        return self._scratch

    def _locate(self, present: dict[str, Tensor | None], names: Iterable[str]) -> None:
        """Give the weight the current buffers whose addresses changed."""
        moved = {}
        for name in names:
            buffer = present[name]
            if buffer is None or _address_of(buffer) != self._addresses.get(name):
                moved[name] = self._noted(name, buffer)
        if moved:
            self.weight.state.set_storage(moved)

    def _noted(self, name: str, tensor: Tensor | None) -> Tensor:
        """Return the `_checked` buffer. Its address is stored for the next comparison."""
        checked = self._checked(name, tensor)
        self._addresses[name] = _address_of(checked)
        return checked

    def _checked(self, name: str, tensor: Tensor | None) -> Tensor:
        """Return a view of a buffer in the shape of the layout. Raises ValueError if it does not
        fit.
        """
        buffer, attribute = self._expected[name], self.adapter.attribute(name)
        assert buffer is not None, name
        if tensor is None:
            raise ValueError(f"it has no {attribute}: dropped, or never made, and a cast writes it")
        view = tensor.detach()
        if view.dtype.itemsize == 1:
            view = view.view(torch.uint8)
        fits = view.numel() == math.prod(buffer.shape) and view.dtype == buffer.dtype and view.is_contiguous()
        # Padded scales need the exact shape: kernels write their rows by the layout's stride.
        is_padded = name.endswith("scale_inv") and len(buffer.shape) == 2
        if not fits or (is_padded and tuple(view.shape) != buffer.shape):
            raise ValueError(
                f"its {attribute} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}, contiguous "
                f"{buffer.dtype} {buffer.shape} is needed"
            )
        return view.view(buffer.shape)


def _address_of(buffer: Tensor) -> tuple[int, int]:
    """Return the address of a buffer and the size of its storage.

    The size, since a host may free or shrink a storage that keeps its address.
    """
    return buffer.data_ptr(), buffer.untyped_storage().nbytes()


_views: WeakIdKeyDictionary = WeakIdKeyDictionary()


def view_of(tensor: Any, nominal: torch.dtype) -> WeightView:
    """Return the view of a tensor, the same at every call.

    Raises TypeError or ValueError for a tensor that is not cast.
    """
    view: WeightView | None = _views.get(tensor)
    if view is None or not view.is_of(tensor, nominal):
        view = _views[tensor] = WeightView(tensor, nominal)
    return view


def forget_view(tensor: Any) -> None:
    """Drop the view of a tensor."""
    _views.pop(tensor, None)
