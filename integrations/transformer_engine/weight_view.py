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
    """Reads and writes a tensor's own buffers, wherever they lie at a call.

    Does not keep the tensor alive.

    `nominal` is the dtype that masters are rounded to first. An FP8 tensor may hold its codes in
    the transpose alone (a direction of a Hybrid tensor, where products read transposes):
    `codes_in_transpose`; its `weight` has no codes then.

    With `shares` one set of codes serves both directions (MXFP8 in tiles of 32x32), and a cast
    writes the scales of both. TransformerEngine keeps codes by columns all the same: `share` lets
    them be the rowwise memory.
    """

    def __init__(self, tensor: Any, nominal: torch.dtype) -> None:
        self._quantizer = quantizer_of(tensor)
        self.adapter: Adapter = adapter_of(self._quantizer)
        self._nominal, self._shape = nominal, tuple(tensor.shape)
        fmt = self._format = self.adapter.format_of(tensor, self._quantizer)
        layout.check_shape(fmt, self._shape)
        self._expected = layout.buffers(fmt, layout.matrix_shape(self._shape), nominal)
        self._choices = self.adapter.choices(self._quantizer)
        self.derives = fmt.columnwise is Columnwise.TRANSPOSE
        self.shares = fmt.columnwise is Columnwise.SHARED
        self._scales: Tensor | None = None  # of tiles by columns
        held = self._held(tensor)
        self._places: dict[str, tuple[int, int]] = {}
        self._scratch: Tensor | None = None
        buffers: dict[str, Tensor] = {}
        self._written = [name for name in held if name not in _COLUMNWISE or not self.derives]
        transpose = held.get("columnwise_data")
        self.codes_in_transpose = self.derives and held[_DATA] is None and transpose is not None
        if self.codes_in_transpose and transpose is not None:
            self._written.remove(_DATA)
            buffers[_DATA] = torch.empty(0, dtype=torch.uint8, device=transpose.device)
        buffers |= {name: self._noted(name, held[name]) for name in self._written}
        self.owns_amax = "amax" not in held and self._expected["amax"] is not None
        if self.owns_amax:
            buffers["amax"] = torch.zeros(1, dtype=torch.float32, device=buffers[_DATA].device)
        make = QuantizedWeight.of_part if self.codes_in_transpose else QuantizedWeight.of_buffers
        self.weight = make(self._shape, fmt, nominal, buffers)

    def is_of(self, tensor: Any, nominal: torch.dtype) -> bool:
        """True if the tensor still has the format, shape and dtype that this was made for."""
        if self._nominal is not nominal or tuple(tensor.shape) != self._shape:
            return False
        if self.codes_in_transpose and getattr(tensor, self.adapter.of_tensor[_DATA]) is not None:
            return False
        quantizer = getattr(tensor, "_quantizer", None)
        if quantizer in (None, self._quantizer) and self._choices == self.adapter.choices(self._quantizer):
            return True
        return self._takes(tensor, self._quantizer if quantizer is None else quantizer)

    def _takes(self, tensor: Any, quantizer: Any) -> bool:
        """Take another quantizer of the same format; `locate` finds the buffers that it holds."""
        same = adapter_of(quantizer) is self.adapter
        same = same and self.adapter.format_of(tensor, quantizer) == self.weight.format
        if same:
            self._quantizer, self._choices = quantizer, self.adapter.choices(quantizer)
        return same

    def cast_attributes(self, tensor: Any) -> tuple[str, ...]:
        """The attributes that decide how this tensor is cast, and where its codes go."""
        checked = self.adapter.checked(tensor, self._quantizer)
        written = [*self._written, *(_COLUMNWISE[:1] if self.shares else ())]
        return self._watched(tensor, ["dtype", *checked, *self.adapter.places(written)])

    def copy_attributes(self, tensor: Any) -> tuple[str, ...]:
        """The attributes that hold what a columnwise copy is made of, and the copy."""
        copy = [name for name in _COLUMNWISE if name in self.adapter.of_tensor]
        return self._watched(tensor, self.adapter.places([*self._written, *copy]))

    def _watched(self, tensor: Any, names: list[str]) -> tuple[str, ...]:
        if getattr(tensor, "_quantizer", None) is self._quantizer:
            return ("_quantizer", *names)
        return ("_quantizer", *(name for name in names if not name.startswith("_quantizer.")))

    def locate(self, tensor: Any) -> None:
        """Look where the buffers that a cast writes are now.

        ValueError for one that is gone, and for options that are not cast.
        """
        self.adapter.check(tensor, self._quantizer)
        self._locate(self._held(tensor), self._written)

    def locate_columnwise(self, tensor: Any) -> None:
        """Look where the rowwise buffers and the columnwise copy are now; the copy may be
        missing.
        """
        held = self._held(tensor)
        self._locate(held, self._written)
        if self.shares:
            self.weight.state.buffers["columnwise_data"] = self._foreign_codes(tensor)
            return
        copy = [name for name in _COLUMNWISE if name in held]
        if any(held[name] is None for name in copy):
            self.forget_columnwise()
        else:
            self._locate(held, copy)

    def share(self, tensor: Any) -> None:
        """Let the codes by columns be the rowwise ones, and give back scales that were dropped,
        where one set of codes serves both directions.
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
        """Codes by columns in memory of their own, as the tensor's products read them now."""
        codes, copy = (getattr(tensor, self.adapter.of_tensor[name]) for name in (_DATA, "columnwise_data"))
        if copy is None or codes is None or copy.data_ptr() == codes.data_ptr():
            return None
        found: Tensor = copy.detach().view(torch.uint8).view(self.weight.matrix_shape)
        return found

    def _held(self, tensor: Any) -> dict[str, Tensor | None]:
        """The buffers as they are now, without codes by columns that are the rowwise ones."""
        held = self.adapter.buffers(tensor, self._quantizer)
        if self.shares:
            del held["columnwise_data"]
            held["columnwise_scale_inv"] = self._scales_by_columns(held)
        return held

    def _scales_by_columns(self, held: Mapping[str, Tensor | None]) -> Tensor | None:
        """The scales of tiles by columns. A tensor without any is given them by `share`: those that
        it had, which casts go on to write, or else what its scales by rows say.
        """
        rowwise, kept = held["rowwise_scale_inv"], held["columnwise_scale_inv"]
        self._scales = self._scales if kept is None else kept
        if self._scales is None and rowwise is not None:
            buffer, block = self._expected["columnwise_scale_inv"], self._format.block
            assert buffer is not None and block is not None
            (height, width), (down, across) = block, layout.amax_grid(block, *layout.matrix_shape(self._shape))
            self._scales = torch.full(buffer.shape, buffer.padding, dtype=buffer.dtype, device=rowwise.device)
            tiles = rowwise.detach().view(torch.uint8)[: down * height : height, :across]
            self._scales[:down, : across * width] = tiles.repeat_interleave(width, 1)
        return self._scales

    def live(self, tensor: Any) -> QuantizedWeight:
        """The tensor's bytes as its products read them now, without an outdated columnwise copy.

        A weight of its own over the same buffers. Codes that are in a transpose alone are copied,
        to be read by rows.
        """
        held = self._held(tensor)
        if self.adapter.outdated(tensor) or self.codes_in_transpose or held.get(_COLUMNWISE[0]) is None:
            held = {name: buffer for name, buffer in held.items() if name in self._written}
        buffers = {name: self._checked(name, buffer) for name, buffer in held.items()}
        if "columnwise_scale_inv" in buffers and self.derives and self.weight.format.block is not None:
            buffers["columnwise_scale_inv"] = self._padded(buffers["columnwise_scale_inv"])
        if self.shares and (foreign := self._foreign_codes(tensor)) is not None:
            buffers["columnwise_data"] = foreign
        own = self.weight.state.buffers["amax"]
        if self.owns_amax and own is not None:
            buffers["amax"] = own
        if self.codes_in_transpose:
            buffers[_DATA] = self.transpose_of(tensor).contiguous()
        return QuantizedWeight.of_buffers(self._shape, self.weight.format, self._nominal, buffers)

    def _padded(self, scale_inv: Tensor) -> Tensor:
        """The scales of a columnwise copy with our padding; nothing reads the host's."""
        fmt, (rows, columns) = self.weight.format, self.weight.matrix_shape
        buffer, (down, across) = (
            layout.columnwise_scale_inv(fmt, rows, columns),
            layout.amax_grid(fmt.block, columns, rows),
        )
        assert buffer is not None
        if fmt.scale_rule is not ScaleRule.FP32:
            down = columns  # a row for each, where FP32 scales have one a block
        padded = torch.full_like(scale_inv, buffer.padding)
        padded[:down, :across] = scale_inv[:down, :across]
        return padded

    def forget_columnwise(self) -> bool:
        """Hold on to no columnwise copy that derives from the rowwise codes; whether there was
        one.
        """
        held = self.derives and self.weight.state.buffers["columnwise_data"] is not None
        if held:
            for name in _COLUMNWISE:
                self._places.pop(name, None)
            self.weight.state.drop_columnwise()
        return held

    def give_columnwise(self, tensor: Any) -> None:
        """Give the tensor the columnwise copy that was made, where it had none."""
        for name in _COLUMNWISE:
            attribute, made = self.adapter.of_tensor.get(name), self.weight.state.buffers[name]
            if attribute is None or made is None or self._places.get(name) == _place(made):
                continue
            whole = self.weight.format.elements_per_byte == 1 and name == "columnwise_data"
            setattr(tensor, attribute, made.view(self._shape[-1], *self._shape[:-1]) if whole else made)
            self._places[name] = _place(made)

    def transpose_of(self, tensor: Any) -> Tensor:
        """The codes in the transpose, seen `[M, K]`."""
        name = "columnwise_data"
        held = self.adapter.buffers(tensor, self._quantizer)
        return self._checked(name, held[name]).t()

    def scratch(self, numel: int) -> Tensor:
        """uint8[numel], where codes wait that belong into the transpose."""
        if self._scratch is None or self._scratch.numel() != numel:
            self._scratch = torch.empty(numel, dtype=torch.uint8, device=self.weight.device)
        return self._scratch

    def _locate(self, held: dict[str, Tensor | None], names: Iterable[str]) -> None:
        moved = {}
        for name in names:
            buffer = held[name]
            if buffer is None or _place(buffer) != self._places.get(name):
                moved[name] = self._noted(name, buffer)
        if moved:
            self.weight.state.set_storage(moved)

    def _noted(self, name: str, tensor: Tensor | None) -> Tensor:
        """A buffer that is `_checked`, and found there again by its address."""
        found = self._checked(name, tensor)
        self._places[name] = _place(found)
        return found

    def _checked(self, name: str, tensor: Tensor | None) -> Tensor:
        """A buffer in the shape that the layout has; ValueError unless it fits."""
        buffer, attribute = self._expected[name], self.adapter.attribute(name)
        assert buffer is not None, name
        if tensor is None:
            raise ValueError(f"it has no {attribute}: dropped, or never made, and a cast writes it")
        found = tensor.detach()
        if found.dtype.itemsize == 1:
            found = found.view(torch.uint8)
        fits = found.numel() == math.prod(buffer.shape) and found.dtype == buffer.dtype and found.is_contiguous()
        # its rows have the stride that is written by
        padded = name.endswith("scale_inv") and len(buffer.shape) == 2
        if not fits or (padded and tuple(found.shape) != buffer.shape):
            raise ValueError(
                f"its {attribute} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}, contiguous "
                f"{buffer.dtype} {buffer.shape} is needed"
            )
        return found.view(buffer.shape)


def _place(buffer: Tensor) -> tuple[int, int]:
    """The address of a buffer and the bytes of its storage, which a host may free or shrink."""
    return buffer.data_ptr(), buffer.untyped_storage().nbytes()


_views: WeakIdKeyDictionary = WeakIdKeyDictionary()


def view_of(tensor: Any, nominal: torch.dtype) -> WeightView:
    """The view of a tensor, the same at every call.

    TypeError or ValueError for a tensor that is not cast.
    """
    view: WeightView | None = _views.get(tensor)
    if view is None or not view.is_of(tensor, nominal):
        view = _views[tensor] = WeightView(tensor, nominal)
    return view


def forget_view(tensor: Any) -> None:
    """Keep nothing of a tensor."""
    _views.pop(tensor, None)
