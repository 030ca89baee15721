"""Traffic: the bytes that each piece of work must at least read and write, from shapes and layouts.

A master is read once for the amaxes and once for the cast, and rounded to the nominal dtype in
registers. Work that every rank repeats counts in full: the packed amaxes of all weights (stored and
read) and their scale buffers (written). An element of the shard needs 9 bytes for FP8, 8.5 for
nvfp4 and 10 for mxfp8; an element of the whole model adds 0.3125 for mxfp8 and 0.078 for nvfp4. If
scales are gathered from their owners, a rank has the latter bytes for its own elements only.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from zerocast.bench.workload import Workload
from zerocast.formats import Columnwise, FormatSpec
from zerocast.formats.layout import (
    Buffer,
    GradientMessage,
    amax_counts,
    amax_grid,
    buffers,
    moment_groups,
    upcast_operand,
)

NOMINAL = torch.bfloat16
FP32 = torch.float32.itemsize
# Adam reads master, gradient and both moments, and writes all but the gradient.
ADAM = 7 * FP32
# Codes of both moments take a byte.
ADAM_8BIT = 3 * FP32 + 4


def nbytes(buffer: Buffer | None) -> int:
    """Return the bytes of a buffer with its padding; 0 if there is no buffer."""
    return buffer.nbytes if buffer else 0


@dataclass(frozen=True)
class Traffic:
    """The bytes of each piece of work on `workload` in `fmt`."""

    workload: Workload
    fmt: FormatSpec

    def _whole(self, count: Callable[[int, int], int]) -> int:
        """Return the sum over all weights of a count for one weight."""
        return self.workload.layers * sum(count(*shape) for shape in self.workload.layer)

    @cached_property
    def packed(self) -> int:
        """The packed amaxes of all weights, in the nominal dtype."""
        return NOMINAL.itemsize * self._whole(lambda m, k: sum(amax_counts(self.fmt, m, k)))

    @cached_property
    def scales(self) -> int:
        """The bytes that compute_scales writes: padded scale buffers and tensor amaxes of all
        weights.
        """
        names = ["rowwise_scale_inv", "amax"]
        if self.fmt.columnwise in (Columnwise.OWN_GRID, Columnwise.SHARED):
            names.append("columnwise_scale_inv")
        return self._whole(lambda m, k: sum(nbytes(buffers(self.fmt, (m, k), NOMINAL)[name]) for name in names))

    @property
    def masters(self) -> int:
        """The owned masters, counted once."""
        return FP32 * self.workload.owned

    @property
    def codes(self) -> int:
        """The codes of the owned elements, of both directions if both are cast."""
        directions = 2 if self.fmt.columnwise is Columnwise.OWN_GRID else 1
        return directions * self.workload.owned * (self.fmt.bits or 16) // 8

    @property
    def owned_amaxes(self) -> int:
        """The share of the packed amaxes that the owned elements have."""
        return self.packed * self.workload.owned // self.workload.numel

    @property
    def messages(self) -> int:
        """A gradient with the shard's number of elements, in messages for all ranks."""
        return self.workload.world * GradientMessage(self.workload.owned // self.workload.world).nbytes

    @property
    def quantize_gradient(self) -> int:
        """A bf16 gradient is read, its messages written."""
        return NOMINAL.itemsize * self.workload.owned + self.messages

    @property
    def add_gradients(self) -> int:
        """Messages are read, their mean written."""
        return self.messages + FP32 * self.workload.owned // self.workload.world

    @property
    def partial_amax(self) -> int:
        """Masters are read, their amaxes written."""
        return self.masters + self.owned_amaxes

    @property
    def compute_scales(self) -> int:
        """All amaxes are read, all scales written."""
        return self.packed + self.scales

    @property
    def partial_cast(self) -> int:
        """Masters and their amaxes are read, codes written."""
        return self.masters + self.owned_amaxes + self.codes

    @property
    def amax_and_cast(self) -> int:
        """The two stages whose work is proportional to the shard."""
        return self.partial_amax + self.partial_cast

    @property
    def cast(self) -> int:
        """A complete cast: masters twice, packed amaxes stored and read, scales and codes out."""
        return 2 * self.masters + 2 * self.packed + self.scales + self.codes

    @property
    def cast_of_own_scales(self) -> int:
        """A cast of the amaxes and scales of the owned elements only."""
        all_scales = 2 * self.packed + self.scales
        own_scales = all_scales * self.workload.owned // self.workload.numel
        return 2 * self.masters + own_scales + self.codes

    @property
    def adam(self) -> int:
        """An Adam step only: 28 bytes per element."""
        return ADAM * self.workload.owned

    @property
    def adam_8bit(self) -> int:
        """An Adam step with moments in 8 bits: 16 bytes per element, the two scales of each group
        read and written, and amaxes. If the format casts in one pass, also the codes of blocks that
        have one owner.
        """
        owned = zip(self.workload.shapes, self.workload.spans(self.workload.rank), strict=True)
        groups = sum(moment_groups(span.start, span.numel, columns) for (_, columns), span in owned if span.numel)
        cast_at_once = self.workload.owned - self.workload.cut(self.fmt) if self.fmt.casts_in_one_pass else 0
        codes = self.codes * cast_at_once // self.workload.owned
        return ADAM_8BIT * self.workload.owned + 4 * FP32 * groups + self.owned_amaxes + codes

    @property
    def step(self) -> int:
        """Adam with amaxes, and with codes if the format casts in one pass; then scales and the
        other codes, whose masters are read once more.
        """
        if not self.fmt.casts_in_one_pass:
            return self.step_in_two_passes
        cast_at_once = self.workload.owned - self.workload.cut(self.fmt)
        return self.step_in_two_passes - FP32 * cast_at_once

    @property
    def step_in_two_passes(self) -> int:
        """Adam with amaxes, then scales and all codes, whose masters are read once more."""
        return self.adam + self.cast - self.masters

    @property
    def transpose(self) -> int:
        """Columnwise copies of all weights: codes read and written, scales read once and written
        padded.
        """
        return self._whole(self._transpose_of)

    @property
    def upcast(self) -> int:
        """E4M3 operands of all weights: codes and a scale per tile read, codes and a scale per
        group written.
        """
        return self._whole(self._upcast_of)

    @property
    def upcast_transposed(self) -> int:
        """The same bytes in another order."""
        return self.upcast

    def _upcast_of(self, rows: int, columns: int) -> int:
        data = nbytes(buffers(self.fmt, (rows, columns), NOMINAL)["rowwise_data"])
        return (
            data
            + math.prod(amax_grid(self.fmt.block, rows, columns))
            + sum(map(nbytes, upcast_operand(self.fmt, rows, columns)))
        )

    def _transpose_of(self, rows: int, columns: int) -> int:
        layout = buffers(self.fmt, (rows, columns), NOMINAL)
        row_scales = layout["rowwise_scale_inv"]
        total = nbytes(layout["rowwise_data"]) + nbytes(layout["columnwise_data"])
        # A scale per tensor serves both directions and is not copied.
        if self.fmt.block and row_scales:
            total += math.prod(amax_grid(self.fmt.block, rows, columns)) * row_scales.dtype.itemsize
            total += nbytes(layout["columnwise_scale_inv"])
        return total
