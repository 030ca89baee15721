"""Single stages on hand-made descriptor rows, and through them single codes and scales of any backend."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests import devices
from zerocast import get_format
from zerocast.backends.descriptor import WIDTH, Column
from zerocast.formats import ScaleRule, layout

# For elements of 4 bits: a format, the elements of its blocks, and the amax and the scale entry by which the scale of a block
# is one. A tensor amax of 2688 makes the global scale of nvfp4 one.
OF_4_BITS = {"e2m1": ("nvfp4", 256, 6.0, 0x38), "int4": ("int4", 32, 7.0, 1.0)}


def row(**columns: int) -> list[int]:
    """Return a descriptor row with the named columns (`rows=4, master_base=0`) and -1 in the others."""
    values = [-1] * WIDTH
    for name, value in columns.items():
        values[Column[name.upper()]] = value
    return values


def table(*rows: list[int]) -> Tensor:
    """Return rows as the descriptor table of a stage."""
    return torch.tensor(rows, dtype=torch.int64).view(-1, WIDTH)


def encode(backend: str, element: str, x: Tensor) -> Tensor:
    """Return the codes of f32 `x`, one a byte, by a backend's own partial_cast: with scales of exactly one, a
    cast is an encoder.
    """
    stage = devices.stage(backend, "partial_cast")
    one = torch.ones(1)
    where = {"rows": x.numel(), "columns": 1, "start": 0, "numel": x.numel(), "master_base": 0, "master_offset": 0}
    where |= {"row_data_base": 0, "row_data_offset": 0, "amax_base": 0, "amax_offset": 0, "row_amax": 0}
    if element not in OF_4_BITS:
        codes = torch.empty(x.numel(), dtype=torch.uint8)
        rows = table(row(**where, scale_base=0, scale_offset=0))
        fmt = get_format("fp8_delayed", element=element)
        stage(fmt, torch.float32, [x], one, [one], [one], rows, [codes], [], None)
        return codes
    name, block, largest, _ = OF_4_BITS[element]
    whole = torch.nn.functional.pad(x, (0, -x.numel() % 512))
    packed, amax = torch.full((whole.numel() // block,), largest), torch.tensor([2688.0])
    packed_codes = torch.empty(whole.numel() // 2, dtype=torch.uint8)
    where |= {"rows": 16, "columns": whole.numel() // 16, "numel": whole.numel()}
    data = [packed_codes], []
    stage(get_format(name), torch.float32, [whole], packed, [amax], [], table(row(**where)), *data, None)
    return torch.stack((packed_codes & 15, packed_codes >> 4), -1).view(-1)[: x.numel()]


def to_nominal(backend: str, nominal: torch.dtype, x: Tensor) -> Tensor:
    """Return the words of f32 `x` rounded to a nominal dtype of 16 bits, by a backend's own partial_cast."""
    words = torch.empty(x.numel() * nominal.itemsize, dtype=torch.uint8)
    where = {"rows": x.numel(), "columns": 1, "start": 0, "numel": x.numel(), "master_base": 0, "master_offset": 0}
    rows = table(row(**where, row_data_base=0, row_data_offset=0))
    stage = devices.stage(backend, "partial_cast")
    stage(get_format("identity"), nominal, [x], torch.empty(0), [], [], rows, [words], [], None)
    return words.view(torch.int16)


def decode(backend: str, element: str, codes: Tensor) -> Tensor:
    """Return the values of a multiple of 16 codes, given one a byte, by a backend's own dequantize."""
    stage = devices.stage(backend, "dequantize")
    if element not in OF_4_BITS:
        fmt, values = get_format("fp8_delayed", element=element), torch.empty(codes.numel() // 16, 16)
        stage(fmt, codes.view(-1, 16), torch.ones(1), torch.ones(1), *values.shape, False, values)
        return values.view(-1)
    name, _, _, entry = OF_4_BITS[element]
    pairs = codes.repeat(2)  # rows of int4 have 32 codes
    values = torch.empty(pairs.numel() // 32, 32)
    fmt, data = get_format(name), (pairs[0::2] | pairs[1::2] << 4).view(-1, 16)
    buffer = layout.rowwise_scale_inv(fmt, *values.shape)
    assert buffer
    one = torch.full(buffer.shape, entry, dtype=buffer.dtype)
    stage(fmt, data, one, torch.tensor([2688.0]), *values.shape, False, values)
    return values.view(-1)[: codes.numel()]


def scales(backend: str, fmt: str, amaxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scale of each block, tensor amax) that a backend derives from these f32 block amaxes, in 128
    rows if many.
    """
    spec, down = get_format(fmt), 128 if amaxes.numel() > 1000 else 1
    assert spec.block
    across = -(-amaxes.numel() // down)
    rows, columns = down * spec.block[0], across * spec.block[1]
    buffer, own = layout.rowwise_scale_inv(spec, rows, columns), layout.columnwise_scale_inv(spec, rows, columns)
    assert buffer
    stored = torch.empty(buffer.shape, dtype=buffer.dtype)
    unused = torch.empty(own.shape, dtype=own.dtype) if own else torch.empty(0, dtype=torch.uint8)
    amax, one = torch.empty(1), torch.ones(1)
    packed = torch.zeros(sum(layout.amax_counts(spec, rows, columns)))
    packed[: amaxes.numel()] = amaxes
    where = {"rows": rows, "columns": columns, "row_amax": 0}
    if spec.scale_rule is not ScaleRule.TWO_LEVEL:
        where["column_amax"] = down * across
    names = ("row_scale", "column_scale", "amax", "scale")
    where |= {f"{name}_base": 0 for name in names} | {f"{name}_offset": 0 for name in names}
    bases = [stored.view(-1)], [unused.view(-1)], [amax], [one], None
    devices.stage(backend, "compute_scales")(spec, packed, table(row(**where)), *bases)
    repeat = (
        spec.block[0] if buffer.dtype is torch.uint8 else 1
    )  # nvfp4 repeats its tiles' scales, mxfp8 has rows of one
    return stored.view(buffer.shape)[: down * repeat : repeat, :across].reshape(-1)[: amaxes.numel()].clone(), amax


def floats(bits: list[str]) -> Tensor:
    """Return the f32 values of the hexadecimal bit patterns of goldens.json."""
    words: NDArray[Any] = np.array([int(word, 16) for word in bits], np.uint32)
    return torch.from_numpy(words.view(np.float32))
