"""WeightBuffers: the data, scale and amax buffers of a QuantizedWeight as attributes. Their layouts
are in docs/formats/common.md.
"""

from typing import Any

from torch import Tensor

from zerocast.formats import FormatSpec
from zerocast.weight.experts import ExpertOf
from zerocast.weight.state import WeightState


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
