"""WeightState: the storage of one weight, common to all objects that stand for it (parameter,
detached, transposed).
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerocast.formats import AmaxPolicy, Block, Columnwise, FormatSpec, ScaleRule, layout
from zerocast.formats.layout import BUFFERS
from zerocast.formats.memory import check_buffers, check_tensor
from zerocast.formats.shared_amax import SharedAmax
from zerocast.weight.validity import Validity


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """True if two tensors of one shape and dtype are equal bit by bit, NaN included; on a GPU
    the host waits for it.
    """
    return torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


@dataclass
class WeightState:
    """The buffers of a weight by the names in `layout.BUFFERS`, None where there is none, and how
    fresh they are.

    `columnwise_cast` is the cast that this weight's own columnwise copy was made from, where it is
    not that of all others; `was_cast` says that the bytes were valid before the weight joined its
    present plan; `is_cast` that it counts those of this weight, which has a master. With
    `columnwise_on_demand` a copy that derives from the rowwise bytes is made by each product that
    reads it, and not kept.
    `initial` is the high-precision value of these bytes, until somebody has made masters of it.
    `choices` keeps what was decided for the storage as it lies now: by `zerocast.gemm`, and what a
    compiled function is given. `name` is the
    parameter's, where it is known. `shared_amax` are the weights that have one tensor amax, this
    one among them. `host_casts_gradient` says that a host adds gradients up, in the `grad_dtype`
    that it sets: products make them in the nominal dtype.

    Every way in which bytes become a weight comes through here, so here the buffers are checked:
    TypeError or ValueError unless they are those of the layout (`zerocast.formats.memory`). With
    `is_part` they are what a cast or a reader has of a larger weight, of any size: a descriptor
    table or an op then checks what it reaches.
    """

    format: FormatSpec
    matrix_shape: Block
    dtype: torch.dtype
    buffers: dict[str, Tensor | None]
    validity: Validity = field(default_factory=Validity)
    columnwise_cast: int = 0
    was_cast: bool = True
    is_cast: bool = True
    columnwise_on_demand: bool = False
    name: str = ""
    shared_amax: SharedAmax | None = None
    host_casts_gradient: bool = False
    initial: Tensor | None = None
    is_part: bool = False
    choices: dict[Hashable, Any] = field(default_factory=dict)
    _derived: dict[Hashable, tuple[int, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.is_part:
            check_buffers(self.format, self.matrix_shape, self.dtype, self.buffers)
        self.buffers = {name: self.buffers.get(name) for name in BUFFERS}
        self._share_scalar()

    @staticmethod
    def empty(fmt: FormatSpec, matrix_shape: Block, dtype: torch.dtype, device: torch.device) -> "WeightState":
        """Zero bytes, padding as specified; no columnwise copy where post-all-gather processing
        makes it.
        """
        buffers: dict[str, Tensor | None] = {}
        for name, buffer in layout.buffers(fmt, matrix_shape, dtype).items():
            later = fmt.columnwise is Columnwise.TRANSPOSE and name.startswith("columnwise")
            if buffer is not None and not later:
                buffers[name] = torch.full(buffer.shape, buffer.padding, dtype=buffer.dtype, device=device)
        return WeightState(fmt, matrix_shape, dtype, buffers, was_cast=False)

    @property
    def rowwise_data(self) -> Tensor:
        """The buffer that every weight has."""
        data = self.buffers["rowwise_data"]
        assert data is not None
        return data

    @property
    def external_scaling_state(self) -> bool:
        """True if a host keeps the amax history: `amax` then grows by what casts see, and
        `scale` is the host's to set.
        """
        return self.format.amax_policy is AmaxPolicy.DELAYED and self.buffers["amax_history"] is None

    @property
    def ever_cast(self) -> bool:
        """True if the bytes come from a cast, from loading or copying a weight that was cast, or
        were there before the weight.
        """
        return self.was_cast or (self.is_cast and self.validity.casts > 0)

    def names_read_by_products(self) -> list[str]:
        """The names of the buffers that products read, each buffer once."""
        has_two_levels = self.format.scale_rule is ScaleRule.TWO_LEVEL
        names = [name for name in BUFFERS[: 5 if has_two_levels else 4] if self.buffers[name] is not None]
        row_scale, column_scale = self.buffers["rowwise_scale_inv"], self.buffers["columnwise_scale_inv"]
        if column_scale is not None and column_scale is row_scale:
            names.remove("columnwise_scale_inv")
        return names

    def recorded(self) -> tuple[Validity, int] | None:
        """The version that a forward pass keeps for `check_recorded`; None while tracing."""
        return None if torch.compiler.is_compiling() else (self.validity, self.validity.version)

    def columnwise_is_fresh(self) -> bool:
        """True if there is a columnwise copy, made from the last cast."""
        shared = self.format.columnwise is Columnwise.SHARED
        present = self.buffers["columnwise_scale_inv" if shared else "columnwise_data"] is not None
        return present and (self.format.columnwise is not Columnwise.TRANSPOSE or self.is_gathered())

    def is_gathered(self) -> bool:
        """True if post-all-gather processing has followed the last cast."""
        return max(self.validity.copies, self.columnwise_cast) == self.validity.casts

    def mark_columnwise(self) -> None:
        """The columnwise copy was made from the last cast."""
        self.columnwise_cast = self.validity.casts

    def join(self, validity: Validity, is_cast: bool = True) -> None:
        """Share the validity of a plan; a columnwise copy that is fresh stays so. Another plan
        notices that it lost the weight.

        `is_cast` says whether the casts of that plan write this weight. A plan keeps columnwise
        copies, unless its owner decides otherwise.
        """
        fresh = self.columnwise_is_fresh()
        self.validity.moved()
        self._forget()
        self.was_cast = self.ever_cast
        self.validity, self.is_cast = validity, is_cast
        self.columnwise_cast = validity.casts if fresh else -1
        self.columnwise_on_demand = False
        self.validity.moved()

    def set_columnwise_on_demand(self, on_demand: bool) -> None:
        """Let each product make the columnwise copy that it reads, and free the one that is kept;
        or read one that is kept.
        """
        self.columnwise_on_demand = on_demand
        if on_demand:
            self.drop_columnwise()
        self.validity.moved()

    def drop_columnwise(self) -> None:
        """Free the columnwise copy that derives from the rowwise bytes, if there is one."""
        if self.format.columnwise is Columnwise.TRANSPOSE and self.buffers["columnwise_data"] is not None:
            self.buffers["columnwise_data"] = self.buffers["columnwise_scale_inv"] = None
            self._share_scalar()
            self.choices.clear()
            self.validity.moved()

    def move_to(self, targets: Mapping[str, Tensor]) -> None:
        """Move buffers, by name, into new storage: same bytes, new place.

        ValueError, with nothing moved, unless each target is contiguous and has the shape, dtype
        and device of what it replaces.
        """
        expected = layout.buffers(self.format, self.matrix_shape, self.dtype)
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
        """Their owner moved these buffers, by name, and the bytes with them: read and write them
        there from now on. TypeError or ValueError, with nothing changed, for buffers that do
        not fit.
        """
        if not self.is_part:
            check_buffers(self.format, self.matrix_shape, self.dtype, {**self.buffers, **buffers})
        self.buffers.update(buffers)
        self._forget()
        self._share_scalar()
        self.validity.moved()

    def convert(self, fmt: FormatSpec) -> None:
        """Be a weight of another format from now on, in new storage that the next cast fills."""
        empty = WeightState.empty(fmt, self.matrix_shape, self.dtype, self.rowwise_data.device)
        self._forget()
        self.format, self.buffers = fmt, empty.buffers
        self.columnwise_cast, self.initial = -1, None
        self.validity.moved()

    def take(self, other: "WeightState") -> None:
        """Copy the bytes of a weight of the same format and shape, as loading a state dict does."""
        for name in BUFFERS:
            ours, theirs = self.buffers[name], other.buffers[name]
            if ours is not None and theirs is not None:
                ours.copy_(theirs)
                if not ours.is_inference():
                    # an operator below autograd does not count a write by itself
                    torch.autograd.graph.increment_version(ours)
        self._forget()
        self.was_cast = True
        # ours was that of the old bytes
        self.initial = None if other.initial is None else other.initial.clone()
        if other.columnwise_is_fresh() and self.buffers["columnwise_data"] is not None:
            self.mark_columnwise()
        else:
            self.drop_columnwise()  # it was the copy of the old bytes

    def cached_per_cast(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The value that `make` derives from the bytes of the last cast, kept until the next cast
        or until the bytes change or move.
        """
        cast, value = self._derived.get(name, (-1, None))
        if value is None or cast != self.validity.casts:
            value = make()
            self._derived[name] = self.validity.casts, value
        return value

    def _forget(self) -> None:
        """Drop values that were derived from the old storage or bytes."""
        self.choices.clear()
        self._derived.clear()

    def differs(self, other: "WeightState") -> bool:
        """True if two weights of one format and shape hold other bytes; columnwise copies, which
        derive from these, aside.

        Reads them, so the host waits for the device.
        """
        names = [name for name in BUFFERS if not name.startswith("columnwise") or self.format.casts_columnwise]
        pairs = [(self.buffers[name], other.buffers[name]) for name in names]
        return any(not same_bytes(a, b) for a, b in pairs if a is not None and b is not None)

    def copies(self, copy: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """A copy of every buffer, of this weight's own bytes only; a stale columnwise copy is
        left out.
        """
        stale = not self.columnwise_is_fresh()
        return {
            name: copy(tensor.detach())
            for name, tensor in self.buffers.items()
            if tensor is not None and not (stale and name.startswith("columnwise"))
        }

    def _share_scalar(self) -> None:
        """A scale a tensor serves both directions."""
        if self.format.columnwise is Columnwise.TRANSPOSE and self.format.block is None:
            self.buffers["columnwise_scale_inv"] = self.buffers["rowwise_scale_inv"]
