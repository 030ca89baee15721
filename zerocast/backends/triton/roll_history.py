"""Stage roll_history: the amax history of delayed scaling, one program a weight.

docs/formats/fp8_delayed.md has the formula.
"""

import struct

import triton
import triton.language as tl
from torch import Tensor

from zerocast.backends.triton.codec import INF, as_f32
from zerocast.backends.triton.launch import AMAX, HISTORY, SCALE, WIDTH, address, addresses, launch, skip_flag
from zerocast.formats import FormatSpec


def roll_history(
    fmt: FormatSpec,
    table: Tensor,
    amaxes: list[Tensor],
    scales: list[Tensor],
    histories: list[Tensor],
    skip: Tensor | None,
) -> None:
    """Shift each amax history by one and write the scale of the next cast."""
    assert fmt.element
    device = table.device
    bases = [addresses(tensors, device) for tensors in (amaxes, scales, histories)]
    launch(
        _roll,
        table.shape[0],
        device,
        table,
        *bases,
        skip_flag(skip, device),
        LENGTH=fmt.amax_history_len,
        SIZE=triton.next_power_of_2(fmt.amax_history_len),
        LARGEST=struct.unpack("<f", struct.pack("<f", fmt.element.max * 2.0**-fmt.margin))[0],
        MAX=fmt.amax_compute_algo == "max",
    )


@triton.jit
def _roll(
    table,
    amaxes,
    scales,
    histories,
    skip,
    LENGTH: tl.constexpr,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    MAX: tl.constexpr,
):
    if tl.load(skip) != 0:
        return
    row = table + tl.program_id(0).to(tl.int64) * WIDTH
    amax = tl.load(address(amaxes, row, AMAX, 4).to(tl.pointer_type(tl.float32)))
    scale_at = address(scales, row, SCALE, 4).to(tl.pointer_type(tl.float32))
    scale = tl.load(scale_at)
    history = address(histories, row, HISTORY, 4).to(tl.pointer_type(tl.float32))
    last = tl.where(amax != 0, amax, tl.load(history))
    i = tl.arange(0, SIZE)
    older = tl.load(history + i + 1, mask=i < LENGTH - 1, other=0)
    moved = tl.where(i == LENGTH - 1, last, older)
    chosen = last
    if MAX:
        # A history has no negative values and no NaN, so bits order as values do.
        chosen = as_f32(tl.max(moved.to(tl.int32, bitcast=True), 0))
    fresh = tl.div_rn(LARGEST, chosen).to(tl.int32, bitcast=True)
    finite = (chosen > 0) & (chosen.to(tl.int32, bitcast=True) < INF)
    fresh = tl.where(finite, fresh, scale.to(tl.int32, bitcast=True))
    fresh = tl.where(fresh == INF, 0x7F7FFFFF, fresh)
    # The history is shifted in place, so all of it must be read before any of it is written.
    tl.debug_barrier()
    if last != 0:
        tl.store(history + i, tl.where(i == 0, 0.0, moved), mask=i < LENGTH)
        tl.store(scale_at, as_f32(fresh))
