"""An independent numpy model of the formats, written from docs/formats. It does not import zerocast.

Codes are found by searching the table of values that the element type has, not by bit manipulation, and E8M0 by `frexp`: what the
model and the reference backend have in common is the text that they were written from.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Block = tuple[int, int]

FLT_MAX = np.finfo(np.float32).max
FLT_MIN = np.finfo(np.float32).tiny
ONE = np.float32(1.0)


def _float_values(exponent_bits: int, mantissa_bits: int, count: int) -> NDArray[np.float64]:
    """Return the first `count` non-negative values of a small float type, in the order of their codes."""
    bias = 2 ** (exponent_bits - 1) - 1
    code = np.arange(count)
    exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
    significand = mantissa / 2**mantissa_bits + (exponent > 0)
    return significand * 2.0 ** (np.maximum(exponent, 1) - bias)


VALUES = {
    "e4m3": _float_values(4, 3, 0x7F),
    "e5m2": _float_values(5, 2, 0x7C),
    "e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "int4": np.arange(8),
}
SIGN_AND_NAN = {"e4m3": (0x80, 0x7F), "e5m2": (0x80, 0x7F), "e2m1": (0x8, 0x7), "int4": (0x8, 0x7)}
# The stored value of each INT4 code of sign and magnitude: 8 plus the integer.
OFFSET_BY_8 = np.array([8, 9, 10, 11, 12, 13, 14, 15, 8, 7, 6, 5, 4, 3, 2, 1], np.uint8)
MAX = {"e4m3": 448.0, "e5m2": 57344.0}


def encode(element: str, x: F32) -> U8:
    """Encode to the nearest value, ties to the even code, saturating; sign kept, NaN to the NaN code (section 1.0).

    INT4 is encoded with a sign bit as well, and stored as `OFFSET_BY_8` says.
    """
    values = VALUES[element]
    sign, nan = SIGN_AND_NAN[element]
    middles = (values[1:] + values[:-1]) / 2
    with np.errstate(invalid="ignore"):  # signalling NaN
        magnitude = np.abs(x.astype(np.float64))
    code = np.searchsorted(middles, magnitude)
    tie = (code < len(middles)) & (middles[np.minimum(code, len(middles) - 1)] == magnitude)
    code = code + (tie & (code % 2 == 1)) + sign * np.signbit(x)
    code = np.where(np.isnan(x), nan, code)
    return OFFSET_BY_8[code] if element == "int4" else code.astype(np.uint8)


def steps(element: str) -> NDArray[np.uint32]:
    """Return the smallest bit pattern of a positive f32 for each code from 1 on. Encoding is monotone, so this
    defines it.
    """
    values = VALUES[element]
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    upper_is_odd = np.arange(1, len(values)) % 2 == 1
    return middles.view(np.uint32) + upper_is_odd.astype(np.uint32)


def encode_patterns(element: str, first: int, last: int) -> U8:
    """Return the codes of the f32 values whose bit patterns are `first` to `last`, within one half of the patterns."""
    sign, nan = SIGN_AND_NAN[element]
    negative = first >> 31
    edges = np.append(steps(element), np.uint32(0x7F800001)).astype(np.int64) + (negative << 31)
    cuts = np.clip(edges, first, last)
    codes = np.append(np.arange(len(edges)) + sign * negative, nan).astype(np.uint8)
    return np.repeat(codes, np.diff(cuts, prepend=first, append=last))


def to_16_bits(x: F32, nominal: str) -> NDArray[np.uint16]:
    """Return the words of the nominal dtype. NaN is 0x7FFF."""
    with np.errstate(over="ignore"):
        rounded = round_nominal(x, nominal)
        words = rounded.view(np.uint32) >> 16 if nominal == "bfloat16" else rounded.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), 0x7FFF, words).astype(np.uint16)


def round_nominal(x: F32, nominal: str) -> F32:
    """Round to the nominal dtype, nearest even, and widen again (1.0.1)."""
    if nominal == "float32":
        return x
    if nominal == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), x, rounded)


def block_amax(x: F32, block: Block) -> F32:
    """Return max |x| of each block, NaN ignored (1.0.2)."""
    magnitude = np.where(np.isnan(x), 0, np.abs(x))
    rows = range(0, x.shape[0], block[0])
    columns = range(0, x.shape[1], block[1])
    tiles = [[magnitude[r : r + block[0], c : c + block[1]].max() for c in columns] for r in rows]
    return np.array(tiles, np.float32)


def spread(grid: F32, block: Block, shape: tuple[int, int]) -> F32:
    """Return each block's value over its elements."""
    row, column = np.indices(shape)
    return grid[row // block[0], column // block[1]]


def scale_from_amax(amax: F32, fp8_max: float, pow2: bool, eps: float) -> F32:
    """Return scale_from_amax of docs/formats, in FP32 arithmetic."""
    a = np.where(amax < np.float32(eps), np.float32(eps), amax)
    with np.errstate(divide="ignore", over="ignore"):
        s = np.minimum(np.float32(fp8_max) / a, FLT_MAX)
    if pow2:
        s = (s.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return np.where(np.isinf(a) | (a == 0), ONE, s)


def e8m0(amax: F32, inverse: int = 0x3B124925) -> U8:
    """Return `e8m0_roundup(amax * fp32(1/448))` of section 1.5, as the exponent of the next power of two."""
    t = amax * np.array(inverse, np.uint32).view(np.float32)
    mantissa, exponent = np.frexp(t.astype(np.float64))
    code = np.clip(np.where(mantissa == 0.5, exponent - 1, exponent) + 127, 0, 254)
    return np.where(t == 0, 0, np.where(np.isinf(t), 254, code)).astype(np.uint8)


def bf16_scale(amax: F32) -> F32:
    """Return `amax / 7` as a bf16 number, at most the largest one."""
    seventh, largest = np.array([0x3E124925, 0x7F7F0000], np.uint32).view(np.float32)
    return np.minimum(round_nominal(amax * seventh, "bfloat16"), largest)


# The scales of a tile that `exact_in_fp8` allows, and the E4M3 code of each.
EXACT_SCALES = [m * 2.0**e for e in range(-3, 9) for m in (1.0, 1.25, 1.5)]
EXACT_CODES = np.array([np.flatnonzero(VALUES["e4m3"] == scale)[0] for scale in EXACT_SCALES], np.uint8)


def exact_amax(g: np.float32) -> np.float32:
    """Return the stored amax: 2688 times the tensor scale, which is a bf16 number."""
    if g == 0 or np.isinf(g):
        return g
    t = round_nominal(np.array([g * np.array(0x39E38E39, np.uint32).view(np.float32)]), "bfloat16")[0]
    with np.errstate(over="ignore"):
        return np.minimum(np.float32(2688) * np.maximum(t, FLT_MIN), FLT_MAX)


def exact_scale_bytes(v: F32, blocks: F32) -> U8:
    """Return the code of the nearest allowed scale, ties up, or 0 for a tile of zeros only."""
    middles = (np.array(EXACT_SCALES[1:]) + EXACT_SCALES[:-1]) / 2
    nearest = EXACT_CODES[np.searchsorted(middles, v.astype(np.float64), side="right")]
    return np.where(blocks > 0, nearest, 0).astype(np.uint8)


def nvfp4_scales(blocks: F32, g: np.float32, exact: bool = False) -> tuple[U8, F32]:
    """Return the stored bytes and the encode multipliers for the amax `g` that is stored."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        s_enc = np.minimum(np.float32(2688) / np.maximum(g, FLT_MIN), FLT_MAX) if g > 0 else ONE
        mult = s_enc * np.array(0x3E2AAAAB, np.uint32).view(np.float32)
        v = np.fmin(blocks * mult, FLT_MAX)
        byte = exact_scale_bytes(v, blocks) if exact and np.isfinite(g) else encode("e4m3", v)
        decoded = np.append(VALUES["e4m3"], np.nan)[byte].astype(np.float32)
        s_dec = ONE / (s_enc if s_enc > 0 else ONE)
        enc = np.where(decoded > 0, np.minimum(ONE / (decoded * s_dec), FLT_MAX), FLT_MAX)
    return byte, enc.astype(np.float32)


def padded(grid: NDArray[Any], shape: tuple[int, int], padding: float) -> NDArray[Any]:
    """Return `grid` in the corner of a buffer of padding."""
    full = np.full(shape, padding, grid.dtype)
    full[: grid.shape[0], : grid.shape[1]] = grid
    return full


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def pack(codes: U8) -> U8:
    """Pack two codes into a byte, the even element in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def decode(element: str, codes: U8) -> F32:
    """Return the value of each code. Codes above the largest value are NaN, except the infinity of E5M2."""
    half = 8 if element == "e2m1" else 128
    positive = np.full(half, np.nan, np.float32)
    positive[: len(VALUES[element])] = VALUES[element]
    if element == "e5m2":
        positive[0x7C] = np.inf
    return np.concatenate([positive, -positive])[codes]


@dataclass(frozen=True)
class Settings:
    """The settings that section 1 lets a format vary."""

    element: str = "e4m3"
    power_of_2_scale: bool = False
    amax_epsilon: float = 0.0
    block: str = "1x32"
    scale_rounding: str = "up"
    exact_in_fp8: bool | None = None  # the default of the format
    scale: float = 1.0  # delayed scaling: the scale on entry


Buffers = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Cast:
    """A whole unsharded cast: `Cast("nvfp4", "bfloat16").of(x)` gives the buffers of section 2 by name."""

    name: str
    nominal: str
    settings: Settings = field(default_factory=Settings)

    @property
    def height(self) -> int:
        """The rows of elements on which a scale depends, apart from those of the tensor."""
        heights = {"fp8_block": 128, "mxfp8": 32, "mxfp4": 128 if self.settings.exact_in_fp8 is not False else 32}
        return {**heights, "nvfp4": 16}.get(self.name, 1)

    def of(self, master: F32) -> Buffers:
        """Cast a master. Experts `[E, M, K]` are the matrix `[E*M, K]`, or E matrices in order where blocks
        would span two.
        """
        if master.ndim > 2 and master.shape[1] % self.height:
            experts = [self.of(expert) for expert in master]
            return {name: np.concatenate([buffers[name] for buffers in experts]) for name in experts[0]}
        x = round_nominal(master.reshape(-1, master.shape[-1]), self.nominal)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            buffers: Buffers = getattr(self, self.name)(x)
        return buffers

    def dequantized(self, buffers: Buffers, columnwise: bool) -> F32:
        """Return the weight from one direction: code times decode scale, in its own orientation."""
        direction = "columnwise" if columnwise else "rowwise"
        shared = "columnwise_data" not in buffers
        data, stored = buffers["rowwise_data" if shared else f"{direction}_data"], buffers[f"{direction}_scale_inv"]
        element, block = self.settings.element, (1, 10**9)
        if self.name == "nvfp4":
            element, block = "e2m1", (1, 16)  # tile rows are repeated in the buffer
            data = np.stack((data & 15, data >> 4), -1).reshape(len(data), -1)
            stored = (decode("e4m3", stored) * buffers["amax"]) * (ONE / np.float32(2688))
        elif self.name == "mxfp4":
            element, block = "e2m1", (1, 32)
            data = np.stack((data & 15, data >> 4), -1).reshape(len(data), -1)
            stored = np.ldexp(ONE, stored.astype(np.int32) - 127)
        elif self.name == "int4":
            data = np.stack((data & 15, data >> 4), -1).reshape(len(data), -1)
            scale = (stored.astype(np.uint32) << 16).view(np.float32)
            return (data.astype(np.float32) - 8) * spread(scale, (1, 32), data.shape)
        elif self.name == "mxfp8":  # also of 32x32 blocks, whose scales are repeated in the buffers
            block = (32, 1) if columnwise else (1, 32)
            stored = np.ldexp(ONE, stored.astype(np.int32) - 127)
        elif self.name == "fp8_block":
            block = (128, 128)
        scale = stored if stored.size == 1 else spread(stored, block, data.shape)
        value = decode(element, data) * scale
        return value.T if columnwise and self.name != "mxfp8" else value

    def _fp32(self, amax: F32) -> F32:
        s = self.settings
        return scale_from_amax(amax, MAX[s.element], s.power_of_2_scale, s.amax_epsilon)

    def _per_tensor(self, x: F32, amax: F32, scale: F32) -> Buffers:
        codes, inverse = encode(self.settings.element, x * scale), ONE / scale
        return {
            "rowwise_data": codes,
            "rowwise_scale_inv": inverse,
            "columnwise_data": codes.T,
            "columnwise_scale_inv": inverse,
            "amax": amax,
        }

    def fp8_delayed(self, x: F32) -> Buffers:
        return self._per_tensor(x, block_amax(x, x.shape)[0], np.array([self.settings.scale], np.float32))

    def fp8_current(self, x: F32) -> Buffers:
        amax = block_amax(x, x.shape)[0]
        return self._per_tensor(x, amax, self._fp32(amax))

    def fp8_block(self, x: F32) -> Buffers:
        scale = self._fp32(block_amax(x, (128, 128)))
        codes = encode(self.settings.element, x * spread(scale, (128, 128), x.shape))
        inverse = ONE / scale
        down, across = inverse.shape
        return {
            "rowwise_data": codes,
            "rowwise_scale_inv": padded(inverse, (down, up(across, 4)), 1.0),
            "columnwise_data": codes.T,
            "columnwise_scale_inv": padded(inverse.T, (across, up(down, 4)), 1.0),
        }

    def mxfp8(self, x: F32) -> Buffers:
        rows, columns = x.shape
        sizes = {"row": (up(rows, 128), up(columns // 32, 4)), "column": (up(rows // 32, 4), up(columns, 128))}
        buffers = {}
        if self.settings.block == "32x32":
            code = e8m0(block_amax(x, (32, 32)))
            enc = np.ldexp(ONE, 127 - code.astype(np.int32))
            return {
                "rowwise_data": encode("e4m3", x * spread(enc, (32, 32), x.shape)),
                "rowwise_scale_inv": padded(code.repeat(32, 0), sizes["row"], 0),
                "columnwise_scale_inv": padded(code.repeat(32, 1), sizes["column"], 0),
            }
        for direction, block in (("row", (1, 32)), ("column", (32, 1))):
            code = e8m0(block_amax(x, block))
            enc = np.ldexp(ONE, 127 - code.astype(np.int32))
            buffers[f"{direction}wise_data"] = encode("e4m3", x * spread(enc, block, x.shape))
            buffers[f"{direction}wise_scale_inv"] = padded(code, sizes[direction], 0)
        return buffers

    def mxfp4(self, x: F32) -> Buffers:
        rows, columns = x.shape
        amax = block_amax(x, (32, 32))
        code = e8m0(amax, 0x3E2AAAAB).astype(np.int32)
        if self.settings.scale_rounding == "floor":
            exponent = np.frexp(amax.astype(np.float64))[1] - 1 - 2 + 127
            finite = np.where((amax == 0) | (exponent < 0), 0, np.minimum(exponent, 254))
            code = np.where(np.isinf(amax), 254, finite).astype(np.int32)
        if self.settings.exact_in_fp8 is not False:
            for r in range(0, code.shape[0], 4):
                for c in range(0, code.shape[1], 4):
                    group = code[r : r + 4, c : c + 4]
                    np.maximum(group, group.max() - 14, out=group)
        codes = encode("e2m1", x * spread(np.ldexp(ONE, 127 - code), (32, 32), x.shape))
        byte = code.astype(np.uint8)
        return {
            "rowwise_data": pack(codes),
            "rowwise_scale_inv": padded(byte.repeat(32, 0), (up(rows, 128), up(columns // 32, 4)), 0),
            "columnwise_data": pack(codes.T),
            "columnwise_scale_inv": padded(byte.T.repeat(32, 0), (up(columns, 128), up(rows // 32, 4)), 0),
        }

    def int4(self, x: F32) -> Buffers:
        scale = bf16_scale(block_amax(x, (1, 32)))
        with np.errstate(divide="ignore"):
            enc = np.minimum(ONE / scale, FLT_MAX)
        codes = encode("int4", x * spread(enc, (1, 32), x.shape))
        return {"rowwise_data": pack(codes), "rowwise_scale_inv": to_16_bits(scale, "bfloat16")}

    def nvfp4(self, x: F32) -> Buffers:
        rows, columns = x.shape
        tiles = block_amax(x, (16, 16))
        exact = bool(self.settings.exact_in_fp8)
        g = exact_amax(tiles.max()) if exact else tiles.max()
        byte, enc = nvfp4_scales(tiles, g, exact)
        codes = encode("e2m1", x * spread(enc, (16, 16), x.shape))
        return {
            "rowwise_data": pack(codes),
            "rowwise_scale_inv": padded(byte.repeat(16, 0), (up(rows, 128), up(columns // 16, 4)), 0),
            "columnwise_data": pack(codes.T),
            "columnwise_scale_inv": padded(byte.T.repeat(16, 0), (up(columns, 128), up(rows // 16, 4)), 0),
            "amax": g.reshape(1),
        }


def delayed_update(
    history: F32, amax: float, scale: float, fp8_max: float, margin: int, algo: str
) -> tuple[F32, np.float32]:
    """Return the history and the scale after a step with this reduced amax (section 1.1)."""
    last = np.float32(amax) if amax != 0 else history[0]
    if last == 0:
        return history, np.float32(scale)
    new = np.concatenate([history[1:], [last]]).astype(np.float32)
    chosen = last if algo == "most_recent" else new.max()
    new[0] = 0
    fresh = np.float32(scale)
    if 0 < chosen < np.inf:
        with np.errstate(over="ignore"):
            fresh = np.float32(fp8_max * 2.0**-margin) / chosen
    return new, np.float32(FLT_MAX) if np.isinf(fresh) else fresh


def gradient_message(x: F32) -> U8:
    """Return the bytes in which a part of a gradient travels (docs/formats/fp8_1x128.md)."""
    groups = np.zeros(up(len(x), 128), np.float32)
    groups[: len(x)] = x
    groups = groups.reshape(-1, 128)
    amax = np.abs(groups).max(1, initial=0)  # NaN if any is
    with np.errstate(all="ignore"):
        scale = np.where(amax == 0, ONE, np.minimum(np.float32(448.0) / amax, FLT_MAX)).astype(np.float32)
        scale = np.where(np.isfinite(amax), scale, np.float32(np.nan))
        codes = encode("e4m3", groups * scale[:, None]).reshape(-1)[: len(x)]
        scale_inv = np.where(np.isnan(scale), np.float32(np.nan), ONE / scale)
    return np.concatenate([np.pad(part, (0, -len(part) % 16)) for part in (codes, scale_inv.view(np.uint8))])


def gradient_mean(messages: list[U8], numel: int, divisor: int) -> F32:
    """Return the f32 sum of these messages in their order, over `divisor`."""
    total = None
    with np.errstate(all="ignore"):
        for message in messages:
            scale_inv = message[up(numel, 16) :][: up(numel, 128) // 32].view(np.float32)
            value = decode("e4m3", message[:numel]) * np.repeat(scale_inv, 128)[:numel]
            total = value if total is None else total + value
        assert total is not None
        return (total / np.float32(divisor)).astype(np.float32)
