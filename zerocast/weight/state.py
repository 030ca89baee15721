"""WeightState: the storage of one weight, shared by all tensor objects over it (the parameter, its
detached aliases, transposed readings).
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import AmaxPolicy, Block, Columnwise, FormatSpec, ScaleRule, layout
from zerocast.formats.layout import BUFFERS
from zerocast.formats.memory import as_bytes, check_buffers, check_tensor
from zerocast.formats.shared_amax import SharedAmax
from zerocast.weight.validity import InvalidWeights, Validity


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors of the same shape and dtype are equal bit by bit, NaN included. On
    a GPU the CPU waits for the result.
    """
    return torch.equal(as_bytes(a.contiguous()), as_bytes(b.contiguous()))


@dataclass
class WeightState:
    """The buffers of a weight, and how current they are.

    Every way in which bytes become a weight comes through here. So the constructor checks the
    buffers, and raises TypeError or ValueError unless they have the layout of the format
    (`zerocast.formats.memory`).

    Args:
        format: the format of the bytes. `convert` changes it.
        shape: the logical shape, also for transposed readings.
        dtype: the nominal dtype, which the weight shows to torch.
        buffers: tensors keyed by the names in `layout.BUFFERS`, None for a buffer that does not
            exist.
        validity: whether the bytes may be used; shared by all weights of a plan (`join`).
        columnwise_cast: the number of the cast that this weight's columnwise copy was made from, if
            it was made apart from the other weights' copies (whose cast is `validity.copies`).
        was_cast: True if the bytes were valid before the weight joined its current plan.
        has_master: True if `validity.casts` counts casts of this weight, that is, if it has a
            master.
        had_masters: True if the bytes are a copy of a weight that was cast from masters, or an
            earlier plan has cast them.
        columnwise_on_demand: True if each product makes the columnwise copy that it reads and drops
            it afterwards; only for formats whose copy is a transpose of the rowwise codes.
        name: the name of the parameter, if it is known.
        shared_amax: the weights with which this weight shares one tensor amax, itself included.
        fp8_weight_gradients: True if products compute the weight gradient from FP8 operands where
            `zerocast.gemm.use` says "nominal" (`Recipe(fast=True)`).
        host_casts_gradient: True if a host accumulates gradients in the `grad_dtype` that it sets.
            Products then make them in the nominal dtype.
        initial: the high-precision value that the bytes were cast from, until an optimizer has made
            masters from it.
        is_part: True for buffers that a cast or a reader has of a larger weight. They may have any
            size, and the descriptor table or op that uses them checks the range that it accesses.
        version: changes with the values of this weight, if other weights of its validity stay.
        joined_version: the version of its validity when the weight joined it, which has changed no
            value.
        choices: decisions for the current storage: the GEMM path, the functions that decode it, and
            the inner tensors that a compiled function is given. Cleared whenever buffers move or
            change.
    """

    format: FormatSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    buffers: dict[str, Tensor | None]
    validity: Validity = field(default_factory=Validity)
    columnwise_cast: int = 0
    was_cast: bool = True
    has_master: bool = True
    had_masters: bool = False
    columnwise_on_demand: bool = False
    name: str = ""
    shared_amax: SharedAmax | None = None
    fp8_weight_gradients: bool = False
    host_casts_gradient: bool = False
    initial: Tensor | None = None
    is_part: bool = False
    version: int = -1
    joined_version: int = -1
    choices: dict[Hashable, Any] = field(default_factory=dict)
    # (rows, columns) with leading dimensions folded into the rows.
    matrix_shape: Block = field(init=False)
    # name -> (numbers of the cast and of the gather, value that was derived from their bytes):
    # `cached_per_cast`.
    _derived: dict[Hashable, tuple[tuple[int, int], Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.matrix_shape = layout.matrix_shape(self.shape)
        if not self.is_part:
            check_buffers(self.format, self.shape, self.dtype, self.buffers)
        self.buffers = {name: self.buffers.get(name) for name in BUFFERS}
        self._share_scalar()

    @staticmethod
    def empty(fmt: FormatSpec, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> "WeightState":
        """Return a weight of zero bytes that was never cast, with the padding that the format
        specifies.

        A columnwise copy is left out if post-all-gather processing makes it from the rowwise bytes.
        """
        buffers: dict[str, Tensor | None] = {}
        for name, buffer in layout.buffers(fmt, shape, dtype).items():
            is_derived = fmt.columnwise is Columnwise.TRANSPOSE and name.startswith("columnwise")
            if buffer is not None and not is_derived:
                buffers[name] = torch.full(buffer.shape, buffer.padding, dtype=buffer.dtype, device=device)
        return WeightState(fmt, shape, dtype, buffers, was_cast=False)

    @property
    def matrices(self) -> tuple[int, Block]:
        """(number, shape) of the matrices that are stored consecutively, nearly always one."""
        # Every product asks.
        return layout.stored_matrices(self.format, self.shape) if len(self.shape) > 2 else (1, self.matrix_shape)

    @property
    def rowwise_data(self) -> Tensor:
        """The codes of the rowwise copy, the one buffer that every format has."""
        data = self.buffers["rowwise_data"]
        assert data is not None
        return data

    @property
    def external_scaling_state(self) -> bool:
        """True if a host, such as TransformerEngine, keeps the amax history of delayed scaling.
        Casts then only raise `amax` to the largest value that they see, and the framework sets
        `scale`.
        """
        return self.format.amax_policy is AmaxPolicy.DELAYED and self.buffers["amax_history"] is None

    @property
    def ever_cast(self) -> bool:
        """True if the bytes come from a cast, from a load, from a copy of a weight that was cast,
        or from buffers that existed before the weight (`QuantizedWeight.of_buffers`).
        """
        return self.was_cast or (self.has_master and self.validity.casts > 0)

    @property
    def is_cast_from_masters(self) -> bool:
        """True if a plan has cast the bytes, or those that they are a copy of."""
        return self.had_masters or (self.has_master and self.validity.casts > 0)

    def names_read_by_products(self) -> list[str]:
        """Return the names of the buffers that products read, each buffer once."""
        # The fifth buffer is the tensor amax. Only two-level scales are decoded with it.
        has_two_levels = self.format.scale_rule is ScaleRule.TWO_LEVEL
        candidates = BUFFERS[: 5 if has_two_levels else 4]
        names = [name for name in candidates if self.buffers[name] is not None]
        row_scale = self.buffers["rowwise_scale_inv"]
        column_scale = self.buffers["columnwise_scale_inv"]
        # One scale per tensor serves both directions (`_share_scalar`), and a graph needs it once.
        if column_scale is not None and column_scale is row_scale:
            names.remove("columnwise_scale_inv")
        return names

    def recorded(self) -> "tuple[WeightState, int] | None":
        """Return this object and the version of its values, which a forward pass saves for
        `check_recorded`; None while a compiler traces, since a graph would hold the number as a
        constant.
        """
        return None if torch.compiler.is_compiling() else (self, self._values_version())

    def check_recorded(self, recorded: "tuple[WeightState, int] | None") -> None:
        """Raise RuntimeError in a backward pass whose forward pass `recorded` other values of this
        weight. Storage that `weight.data = other` has replaced since is not compared.
        """
        if recorded is not None and recorded[0] is self and recorded[1] != self._values_version():
            raise InvalidWeights(
                "the weights changed between this forward pass and its backward pass (an optimizer step, a load, or a swapped "
                "average)",
                "",
                "input gradients would be computed with the new weights: run the backward pass before the change, or run "
                "the forward pass again",
            )

    def _values_version(self) -> int:
        of_all = self.validity.version
        return self.version if of_all == self.joined_version else max(of_all, self.version)

    def columnwise_is_fresh(self) -> bool:
        """Return True if there is a columnwise copy and it was made from the last cast."""
        has_shared_data = self.format.columnwise is Columnwise.SHARED
        present = self.buffers["columnwise_scale_inv" if has_shared_data else "columnwise_data"] is not None
        # Other columnwise copies are written by the cast itself. Only a transpose can lag behind.
        return present and (self.format.columnwise is not Columnwise.TRANSPOSE or self.is_gathered())

    def is_gathered(self) -> bool:
        """Return True if post-all-gather processing has followed the last cast."""
        return max(self.validity.copies, self.columnwise_cast) == self.validity.casts

    def mark_columnwise(self) -> None:
        """Note that this weight's columnwise copy was made from the last cast."""
        self.columnwise_cast = self.validity.casts

    def join(self, validity: Validity, has_master: bool) -> None:
        """Share the validity of a plan. A fresh columnwise copy stays fresh.

        `has_master` says whether the casts of that plan write this weight. Columnwise copies are
        kept afterwards, unless the plan's owner calls `set_columnwise_on_demand`.
        """
        fresh = self.columnwise_is_fresh()
        # Notify the old validity first, so that the plan which had this weight notices the loss.
        self.validity.moved()
        self._forget()
        # `ever_cast` and the number of the cast are relative to the validity. Carry both over.
        self.was_cast, self.had_masters = self.ever_cast, self.is_cast_from_masters
        self.version, self.joined_version = self._values_version(), validity.version
        self.validity, self.has_master = validity, has_master
        self.columnwise_cast = validity.casts if fresh else -1
        self.columnwise_on_demand = False
        self.validity.moved()

    def set_columnwise_on_demand(self, on_demand: bool) -> None:
        """Choose whether each product makes the columnwise copy that it reads. If so, free the copy
        that is kept now; if not, products read a copy that is kept.
        """
        self.columnwise_on_demand = on_demand
        if on_demand:
            self.drop_columnwise()
        self.validity.moved()

    def drop_columnwise(self) -> None:
        """Free the columnwise copy if there is one and it derives from the rowwise bytes."""
        if self.format.columnwise is Columnwise.TRANSPOSE and self.buffers["columnwise_data"] is not None:
            self.buffers["columnwise_data"] = None
            self.buffers["columnwise_scale_inv"] = None
            self._share_scalar()
            self.choices.clear()
            self.validity.moved()

    def move_to(self, targets: Mapping[str, Tensor]) -> None:
        """Move buffers, keyed by name, into new storage with the same bytes.

        Raises ValueError, with nothing moved, unless each target is contiguous and has the shape,
        dtype and device of the buffer that it replaces.
        """
        # Check all targets before the first copy, so that an error changes nothing.
        expected = layout.buffers(self.format, self.shape, self.dtype)
        for name, target in targets.items():
            check_tensor(name, target, expected[name], self.format, self.rowwise_data.device)
        for name, target in targets.items():
            source = self.buffers[name]
            if source is not None:
                target.copy_(source)
            self.buffers[name] = target
        self._forget()
        self._share_scalar()
        self.validity.moved()

    def set_storage(self, buffers: Mapping[str, Tensor | None]) -> None:
        """Read and write buffers, keyed by name, in storage into which their owner has moved the
        bytes.

        Raises TypeError or ValueError, with nothing changed, for buffers that do not fit.
        """
        if not self.is_part:
            check_buffers(self.format, self.shape, self.dtype, {**self.buffers, **buffers})
        self.buffers.update(buffers)
        self._forget()
        self._share_scalar()
        self.validity.moved()

    def convert(self, fmt: FormatSpec) -> None:
        """Change the format. The storage is new, and the next cast fills it."""
        empty = WeightState.empty(fmt, self.shape, self.dtype, self.rowwise_data.device)
        self._forget()
        self.format, self.buffers = fmt, empty.buffers
        self.columnwise_cast, self.initial = -1, None
        self.validity.moved()

    def copy_from(self, other: "WeightState") -> None:
        """Copy the bytes of a weight of the same format and shape, as loading a state dict does."""
        for name in BUFFERS:
            ours, theirs = self.buffers[name], other.buffers[name]
            if ours is not None and theirs is not None:
                ours.copy_(theirs)
                if not ours.is_inference():
                    # This runs inside `__torch_dispatch__`, below autograd, where copy_ does not
                    # raise the version counter by itself. Inference tensors have no counter.
                    torch.autograd.graph.increment_version(ours)
        self._forget()
        self.was_cast = True
        # The initial value belongs to the bytes, which are the other weight's now.
        self.initial = None if other.initial is None else other.initial.clone()
        if other.columnwise_is_fresh() and self.buffers["columnwise_data"] is not None:
            self.mark_columnwise()
        else:
            # The other weight has no copy to give, and ours was made from the old bytes.
            self.drop_columnwise()

    def cached_per_cast(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the value that `make` derives from the bytes of the last cast, kept until they are
        gathered, the next cast, or until the bytes change or move.

        Nothing is kept for a CUDA graph that is recorded: its replay derives the value from the
        bytes of that time.
        """
        if self.rowwise_data.is_cuda and torch.cuda.is_current_stream_capturing():
            return make()
        now = self.validity.casts, self.validity.copies
        then, value = self._derived.get(name, (now, None))
        if value is None or then != now:
            value = make()
            self._derived[name] = now, value
        return value

    def _forget(self) -> None:
        """Drop the values that were derived from the old storage or bytes."""
        self.choices.clear()
        self._derived.clear()

    def differs(self, other: "WeightState") -> bool:
        """Return True if the bytes of two weights of the same format and shape differ. Columnwise
        copies that derive from the rowwise bytes are not compared.

        The CPU waits for the device.
        """
        names = [name for name in BUFFERS if not name.startswith("columnwise") or self.format.casts_columnwise]
        pairs = [(self.buffers[name], other.buffers[name]) for name in names]
        return any(not same_bytes(a, b) for a, b in pairs if a is not None and b is not None)

    def matrix(self, index: int) -> "WeightState":
        """Return the state of one matrix of a weight of several: the same memory, except for scales
        with a padding that is not in it. It shares the validity.

        A transposed copy is made at each use, since the copy of all matrices does not hold the rows
        of one matrix side by side. It does if the matrices are stored consecutively.
        """
        matrix = self.shape[-2:]
        are_apart = self.matrices[0] > 1
        buffers = dict(self.buffers)
        for name, buffer in layout.buffers(self.format, matrix, self.dtype).items():
            whole = buffers[name]
            if whole is None or buffer is None or len(buffer.shape) != 2:
                continue
            if are_apart:
                buffers[name] = _rows_of_matrix(whole, buffer, index, buffer.shape[0])
            elif name.startswith("columnwise") and self.format.columnwise is Columnwise.TRANSPOSE:
                buffers[name] = None
            else:
                buffers[name] = _rows_of_matrix(whole, buffer, index, layout.buffer_rows(self.format, name, matrix[0]))
        choices, derived = self.choices.setdefault(("matrix", index), ({}, {}))
        return WeightState(
            self.format,
            matrix,
            self.dtype,
            buffers,
            self.validity,
            self.columnwise_cast,
            self.was_cast,
            self.has_master,
            self.had_masters,
            columnwise_on_demand=True,
            name=f"{self.name}[{index}]" if self.name else "",
            fp8_weight_gradients=self.fp8_weight_gradients,
            host_casts_gradient=self.host_casts_gradient,
            is_part=True,
            choices=choices,
            _derived=derived,
        )

    def copies(self, copy: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return `copy` of every buffer, keyed by name. A stale columnwise copy is left out.

        `copy` gets the buffer's own view, so a flat buffer around it is not copied.
        """
        stale = not self.columnwise_is_fresh()
        return {
            name: copy(tensor.detach())
            for name, tensor in self.buffers.items()
            if tensor is not None and not (stale and name.startswith("columnwise"))
        }

    def _share_scalar(self) -> None:
        """Let a transposed copy with one scale per tensor use the rowwise scale tensor itself."""
        if self.format.columnwise is Columnwise.TRANSPOSE and self.format.block is None:
            self.buffers["columnwise_scale_inv"] = self.buffers["rowwise_scale_inv"]


def _rows_of_matrix(whole: Tensor, buffer: layout.Buffer, index: int, rows: int) -> Tensor:
    """Return the `rows` rows of one matrix in a buffer of several, padded to the shape of
    `buffer`.
    """
    part = whole[index * rows : (index + 1) * rows]
    missing = buffer.shape[0] - rows
    return torch.nn.functional.pad(part, (0, 0, 0, missing), value=buffer.padding) if missing else part
