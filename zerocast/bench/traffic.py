"""Bytes that must move: what each piece of work reads and writes at least, counted from shapes and layouts alone.

A master is read once for the amaxes and once for the cast, rounded to the nominal dtype in
registers. Whatever every rank does alike counts in full: packed amaxes of all weights (stored and read), scale buffers of all
weights (written). Per element of the shard that is 9 bytes for FP8, 8.5 for nvfp4 and 10 for mxfp8; per element of the whole
0.3125 more for mxfp8 and 0.078 for nvfp4.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from zerocast.bench.workload import Workload
from zerocast.formats import Columnwise, FormatSpec
from zerocast.formats.layout import Buffer, amax_counts, amax_grid, buffers

NOMINAL = torch.bfloat16
FP32 = torch.float32.itemsize
ADAM = 7 * FP32  # reads master, gradient and two moments, writes all but the gradient


def nbytes(buffer: Buffer | None) -> int:
    """Bytes of a buffer with its padding; none where there is no buffer."""
    return math.prod(buffer.shape) * buffer.dtype.itemsize if buffer else 0


@dataclass(frozen=True)
class Traffic:
    """The bytes of each piece of work on `workload` in `fmt`."""

    workload: Workload
    fmt: FormatSpec

    def _whole(self, count: Callable[[int, int], int]) -> int:
        """A count of one weight, over all weights."""
        return self.workload.layers * sum(count(*shape) for shape in self.workload.layer)

    @cached_property
    def packed(self) -> int:
        """The packed amaxes of all weights, in the nominal dtype."""
        return NOMINAL.itemsize * self._whole(lambda m, k: sum(amax_counts(self.fmt, m, k)))

    @cached_property
    def scales(self) -> int:
        """What compute_scales writes: scale buffers with their padding and tensor amaxes of all weights."""
        own = ("columnwise_scale_inv",) if self.fmt.columnwise is Columnwise.OWN_GRID else ()
        names = ("rowwise_scale_inv", "amax", *own)
        return self._whole(lambda m, k: sum(nbytes(buffers(self.fmt, (m, k), NOMINAL)[name]) for name in names))

    @property
    def masters(self) -> int:
        """The owned masters, once."""
        return FP32 * self.workload.owned

    @property
    def codes(self) -> int:
        """The codes of the owned elements, in both directions where both are cast."""
        directions = 2 if self.fmt.columnwise is Columnwise.OWN_GRID else 1
        return directions * self.workload.owned * (self.fmt.bits or 16) // 8

    @property
    def owned_amaxes(self) -> int:
        """The amaxes of the owned elements, pro rata."""
        return self.packed * self.workload.owned // self.workload.numel

    @property
    def partial_amax(self) -> int:
        """Masters in, their amaxes out."""
        return self.masters + self.owned_amaxes

    @property
    def compute_scales(self) -> int:
        """All amaxes in, all scales out."""
        return self.packed + self.scales

    @property
    def partial_cast(self) -> int:
        """Masters and their amaxes in, codes out."""
        return self.masters + self.owned_amaxes + self.codes

    @property
    def amax_and_cast(self) -> int:
        """The two stages that are a shard's work."""
        return self.partial_amax + self.partial_cast

    @property
    def cast(self) -> int:
        """A whole cast: masters twice, packed amaxes stored and read, scales and codes out."""
        return 2 * self.masters + 2 * self.packed + self.scales + self.codes

    @property
    def adam(self) -> int:
        """An Adam step alone: 28 bytes an element."""
        return ADAM * self.workload.owned

    @property
    def step(self) -> int:
        """Adam with the amaxes in the same pass, then scales and cast: the master is read once more only."""
        return self.adam + self.cast - self.masters

    @property
    def transpose(self) -> int:
        """Columnwise copies of all weights: codes in and out, each scale in once, the columnwise scale buffer out."""
        return self._whole(self._transpose_of)

    def _transpose_of(self, rows: int, columns: int) -> int:
        found = buffers(self.fmt, (rows, columns), NOMINAL)
        row, column = found["rowwise_scale_inv"], found["columnwise_scale_inv"]
        scales = 0
        if self.fmt.block and row:  # a scale a tensor serves both directions
            scales = math.prod(amax_grid(self.fmt.block, rows, columns)) * row.dtype.itemsize + nbytes(column)
        return nbytes(found["rowwise_data"]) + nbytes(found["columnwise_data"]) + scales
