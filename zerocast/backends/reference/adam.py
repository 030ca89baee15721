"""AdamW in plain torch: the stage adam_amax, which updates masters with moments in FP32 or bf16,
and the stage adam_8bit, which keeps moments in 8 bits (docs/formats/moments_8bit.md), with their
codes and scales.
"""

import torch
from torch import Tensor

from zerocast.backends.descriptor import Column, Piece
from zerocast.backends.reference.scales import FLT_MAX
from zerocast.backends.reference.stages import partial_amax
from zerocast.formats import FormatSpec
from zerocast.formats.layout import MOMENT_GROUP


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, scalars: Tensor, clip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the AdamW update of f32 tensors as a pure function: the new (p, m, v).

    Each line is one f32 operation on an element, in the order that ../README.md fixes.
    """
    decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, root_c2, eps = scalars.unbind()
    g = g * clip
    p = p * decay
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + (one_minus_beta2 * g) * g
    p = p - step_size * (m / (square_root(v) / root_c2 + eps))
    return p, m, v


def square_root(x: Tensor) -> Tensor:
    """Return the correctly rounded f32 square root; torch.sqrt on the CPU is often off by one
    ulp.
    """
    return x.double().sqrt().float()


def adam_amax(
    fmt: FormatSpec,
    nominal: torch.dtype,
    masters: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    table: Tensor,
    groups: Tensor,
    scalars: Tensor,
    clip: Tensor,
    packed: Tensor,
    skip: Tensor | None,
) -> None:
    """Stage adam_amax: run Adam over the owned spans, then take the amaxes of the new masters."""
    if skip is not None and bool(skip):
        return
    for row, group in zip(table.tolist(), groups.tolist(), strict=True):
        base, offset, numel = row[Column.MASTER_BASE], row[Column.MASTER_OFFSET], row[Column.NUMEL]
        if numel:
            state = (tensors[base][offset : offset + numel] for tensors in (masters, grads, exp_avgs, exp_avg_sqs))
            master, grad, exp_avg, exp_avg_sq = state
            p, m, v = adamw(master, grad.float(), exp_avg.float(), exp_avg_sq.float(), scalars[group], clip)
            master.copy_(p)
            # The copies round to bf16 if the moments are bf16.
            exp_avg.copy_(m)
            exp_avg_sq.copy_(v)
    partial_amax(fmt, nominal, masters, table, packed)


SMALLEST_SCALE = 2.0**-100
# The elements of momentum that are quantized together, which needs about twenty bytes per element.
ELEMENTS_AT_ONCE = 1 << 24
UINT32 = 0xFFFFFFFF
# 2**32 over the golden ratio, odd. Multiples of it are far from each other.
STEP_FACTOR = 0x9E3779B9


def first_values(device: torch.device) -> Tensor:
    """Return the values of the codes 0 to 127 of |m|, in units of the scale: f32 [128]."""
    code = torch.arange(128, dtype=torch.float32, device=device)
    return code / (254 - code)


def second_values(device: torch.device) -> Tensor:
    """Return the values of the codes 0 to 255 of v, in units of the scale: f32 [256]."""
    code = torch.arange(256, dtype=torch.float64, device=device)
    # Both powers are integers below 2**53, so only the quotient is rounded, and then to f32.
    values = ((code + 4) ** 4 / 259.0**4).float()
    values[0] = 0
    return values


def group_scale(largest: Tensor) -> Tensor:
    """Return the scales of groups, f32, from their largest |m| or v. A group of zeros has
    scale 0.
    """
    scale = largest.clamp(SMALLEST_SCALE, FLT_MAX)
    return torch.where(largest > 0, scale, torch.zeros_like(scale))


def quantize_first(m: Tensor, scale: Tensor) -> Tensor:
    """Return the i8 codes of first moments, f32 `[groups, n]`, rounded to the nearest value by the
    scales `[groups]`. A tie goes to the smaller one, and NaN becomes 0.
    """
    size = _finite(m.abs(), scale)
    code, low, high = _around(size, scale, first_values(m.device))
    code = code + (size - low > high - size)
    return torch.where(m < 0, -code, code).to(torch.int8)


def quantize_second(v: Tensor, scale: Tensor, random: Tensor) -> Tensor:
    """Return the u8 codes of second moments, f32 `[groups, n]`, rounded at random by the scales
    `[groups]`; `random` is f32 in [0, 1), like `v`. The roots of `v`, by which an update divides,
    are right on average. A positive value never becomes 0, and NaN does.
    """
    size = _finite(v, scale)
    code, *bounds = _around(size, scale, second_values(v.device))
    root, low, high = map(square_root, (size, *bounds))
    code = code + (root - low > random * (high - low))
    return torch.where(size > 0, code.clamp(min=1), torch.zeros_like(code)).to(torch.uint8)


def dequantize_first(code: Tensor, scale: Tensor) -> Tensor:
    """Return the first moments, f32, from i8 codes and a scale for each."""
    size = first_values(code.device)[code.abs().long()] * scale
    return torch.where(code < 0, -size, size)


def dequantize_second(code: Tensor, scale: Tensor) -> Tensor:
    """Return the second moments, f32, from u8 codes and a scale for each."""
    return second_values(code.device)[code.long()] * scale


def random_numbers(key: int, step: int, element: Tensor) -> Tensor:
    """Return the random numbers of elements of a weight, f32 in [0, 1) in multiples of 2**-24.

    They are a function of the key of the weight, the step and the index of an element in the full
    weight, i64, so they do not depend on the sharding.
    """
    of_step = _mix(torch.tensor(key + step * STEP_FACTOR, device=element.device))
    bits = _mix(_mix(of_step + (element >> 32)) + element)
    return (bits >> 8).float() * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    """Return the finalizer of MurmurHash3 on the low 32 bits of i64, which permutes them."""
    x = x & UINT32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & UINT32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & UINT32
    return x ^ (x >> 16)


def _finite(size: Tensor, scale: Tensor) -> Tensor:
    """Return the sizes between 0 and the scale of their group; 0 for NaN."""
    return torch.where(size > 0, size, torch.zeros_like(size)).minimum(scale.unsqueeze(1))


def _around(size: Tensor, scale: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (the largest code whose value is at most `size`, that value, the value of the next
    code). The last code is its own next one.
    """
    bounds = values * scale.unsqueeze(1)
    code = torch.searchsorted(bounds, size, right=True) - 1
    code = torch.where(scale.unsqueeze(1) > 0, code, torch.zeros_like(code))
    following = (code + 1).clamp(max=len(values) - 1)
    return code, bounds.gather(1, code), bounds.gather(1, following)


class PieceGroups:
    """The groups of a piece of a weight, which may have parts of the first and of the last one.

    Attributes:
        owned: the elements of the piece in the flat tensors.
        scales: the indices of the scales of its groups, i64 `[2, groups]`, a row for each moment.
        element: the index in the full weight of each element, i64.
        group: the group of each element, counted from the first one of the piece, i64.
        cut: the index in `cut_largest` of each cut group, of which other ranks also have a part.
    """

    def __init__(self, piece: list[int], device: torch.device) -> None:
        start, numel, columns = piece[Piece.START], piece[Piece.NUMEL], piece[Piece.COLUMNS]
        self.owned = slice(piece[Piece.OFFSET], piece[Piece.OFFSET] + numel)
        self.element = torch.arange(start, start + numel, device=device)
        row, column = self.element // columns, self.element % columns
        number = row * -(-columns // MOMENT_GROUP) + column // MOMENT_GROUP
        self.group = number - number[0]
        self._slot = column % MOMENT_GROUP
        self.count = int(self.group[-1]) + 1
        firsts = torch.tensor([[piece[Piece.SCALE]], [piece[Piece.SECOND_SCALE]]], device=device)
        self.scales = firsts + torch.arange(self.count, device=device)
        cut = {0: piece[Piece.CUT_FIRST], self.count - 1: piece[Piece.CUT_LAST]}
        self.cut = {group: place for group, place in cut.items() if place >= 0}

    def split(self, flat: Tensor) -> Tensor:
        """Return the elements of the piece as `[groups, 128]`, with zeros where there are none."""
        canvas = flat.new_zeros(self.count, MOMENT_GROUP)
        canvas[self.group, self._slot] = flat
        return canvas

    def join(self, canvas: Tensor) -> Tensor:
        """Return the elements of the piece, flat, from `[groups, 128]`."""
        return canvas[self.group, self._slot]


def quantize_moments(
    m: Tensor,
    v: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scales: Tensor,
    piece: list[int],
    step: int,
    cut_largest: Tensor,
    finishes: bool,
) -> None:
    """Quantize and store the moments of a piece, f32, in two calls. The first one, with
    `finishes=False`, writes the codes and scales of the groups that this rank has all of, and
    enters the largest values of cut groups into `cut_largest`. After these were reduced over the
    ranks, the second one, with `finishes=True`, writes the codes and scales of the cut groups.
    """
    groups = PieceGroups(piece, m.device)
    split_m, split_v = groups.split(m), groups.split(v)
    largest = torch.stack([torch.where(x > 0, x, torch.zeros_like(x)).amax(1) for x in (split_m.abs(), split_v)])
    written = torch.full((groups.count,), not finishes, device=m.device)
    for group, place in groups.cut.items():
        written[group] = finishes
        if finishes:
            largest[:, group] = cut_largest[:, place]
        else:
            cut_largest[:, place] = largest[:, group]
    scale = group_scale(largest)
    random = groups.split(random_numbers(piece[Piece.KEY], step, groups.element))
    first = groups.join(quantize_first(split_m, scale[0]))
    second = groups.join(quantize_second(split_v, scale[1], random))
    element_written = written[groups.group]
    exp_avg[groups.owned] = torch.where(element_written, first, exp_avg[groups.owned])
    exp_avg_sq[groups.owned] = torch.where(element_written, second, exp_avg_sq[groups.owned])
    flat_scales = scales.view(-1)
    flat_scales[groups.scales] = torch.where(written, scale, flat_scales[groups.scales])


def dequantize_moments(exp_avg: Tensor, exp_avg_sq: Tensor, scales: Tensor, piece: list[int]) -> tuple[Tensor, Tensor]:
    """Return both moments of a piece, flat f32."""
    groups = PieceGroups(piece, exp_avg.device)
    scale = scales.view(-1)[groups.scales][:, groups.group]
    return dequantize_first(exp_avg[groups.owned], scale[0]), dequantize_second(exp_avg_sq[groups.owned], scale[1])


def quantize_rows(momentum: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Store the momentum of full rows, f32 `[m, n]`, as first moments: i8 `codes` of that shape and
    f32 `scales` `[m, groups of a row]`. Some rows are quantized at a time, which bounds the memory
    that it needs.
    """
    count, columns = scales.shape[1], codes.shape[1]
    rows = max(1, ELEMENTS_AT_ONCE // columns)
    for part, into, scale in zip(*(x.split(rows) for x in (momentum, codes, scales)), strict=True):
        groups = torch.nn.functional.pad(part, (0, count * MOMENT_GROUP - columns)).view(-1, MOMENT_GROUP)
        size = groups.abs()
        largest = torch.where(size > 0, size, torch.zeros_like(size)).amax(1)
        scale.copy_(group_scale(largest).view_as(scale))
        into.copy_(quantize_first(groups, scale.reshape(-1)).view(len(part), count * MOMENT_GROUP)[:, :columns])


def dequantize_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the momentum of full rows, f32 `[m, n]`, from the results of `quantize_rows`."""
    return dequantize_first(codes, scales.repeat_interleave(MOMENT_GROUP, 1)[:, : codes.shape[1]])


def adam_8bit(
    fmt: FormatSpec,
    nominal: torch.dtype,
    masters: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    moment_scales: list[Tensor],
    table: Tensor,
    pieces: Tensor,
    scalars: Tensor,
    clip: Tensor,
    steps: Tensor,
    packed: Tensor,
    cut_largest: Tensor,
    finishes: bool,
    skip: Tensor | None,
) -> None:
    """Stage adam_8bit: run Adam in place over pieces of weights in flat shards, then take the
    amaxes of the new masters.
    """
    if skip is not None and bool(skip):
        return
    for piece in pieces.tolist():
        base, row = piece[Piece.BASE], piece[Piece.SCALARS]
        s = slice(piece[Piece.OFFSET], piece[Piece.OFFSET] + piece[Piece.NUMEL])
        state = exp_avgs[base], exp_avg_sqs[base], moment_scales[base]
        old_m, old_v = dequantize_moments(*state, piece)
        p, m, v = adamw(masters[base][s], grads[base][s].float(), old_m, old_v, scalars[row], clip)
        if not finishes:
            masters[base][s] = p
        quantize_moments(m, v, *state, piece, int(steps[row]), cut_largest, finishes)
    if not finishes:
        partial_amax(fmt, nominal, masters, table, packed)
