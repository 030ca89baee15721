"""Stages of one backend: single ones on hand-made descriptor rows, and through them single codes and scales; and on many weights at
once, in arenas of poison, so that what a stage wrote is compared to the byte.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests import casts, devices
from tests.casts import POISON, Weight
from zerocast import get_format
from zerocast.backends.descriptor import WIDTH, Column
from zerocast.backends.reference.codec import round_nominal
from zerocast.backends.reference.scales import block_amax
from zerocast.formats import AmaxPolicy, Columnwise, FormatSpec, ScaleRule, layout
from zerocast.formats.layout import Span, byte_range, matrix_shape

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


Place = tuple[int, int]
STAGES = ("partial_amax", "compute_scales", "partial_cast", "roll_history", "transpose")
_BASES = 2
ALIGNED = 16


class Arena:
    """Values of one role at odd and even places in a few storages, with guard elements before, between and behind them."""

    def __init__(self, dtype: torch.dtype, rng: np.random.Generator, guard: float = POISON) -> None:
        self.dtype, self._rng, self._guard = dtype, rng, guard
        self._parts: list[list[Tensor]] = [[], []]
        self.extents: list[tuple[int, int, int]] = []

    def place(self, values: Tensor) -> Place:
        """Return (base, offset) of a copy of `values`."""
        base = int(self._rng.integers(_BASES))
        parts = self._parts[base]
        end = sum(part.numel() for part in parts)
        offset = end + int(self._rng.integers(1, 40))
        if self._rng.integers(2):  # every other one where vectors can be stored
            offset += -offset % ALIGNED
        parts.append(torch.full((offset - end,), self._guard, dtype=self.dtype))
        parts.append(values.reshape(-1).to(self.dtype))
        self.extents.append((base, offset, values.numel()))
        return base, offset

    def bases(self) -> list[Tensor]:
        """Return new storages with their poison and guards."""
        end = torch.full((33,), self._guard, dtype=self.dtype)
        return [torch.cat([*parts, end]) for parts in self._parts]

    def outside(self, bases: list[Tensor]) -> list[NDArray[np.uint8]]:
        """Return the bytes of all guards."""
        size, left = self.dtype.itemsize, []
        for index, tensor in enumerate(bases):
            mask = np.ones(tensor.numel() * size, bool)
            for base, offset, numel in self.extents:
                if base == index:
                    mask[offset * size : (offset + numel) * size] = False
            left.append(casts.raw(tensor)[mask])
        return left


@dataclass
class Bench:
    """Weights of one format, nominal and master dtype, with the owned span of each, ready for any stage."""

    weights: tuple[Weight, ...]
    seed: int
    separate_shards: bool = False
    fmt: FormatSpec = field(init=False)
    arenas: dict[str, Arena] = field(init=False)
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        first = self.weights[0]
        self.fmt, self.nominal = get_format(first.fmt), first.nominal
        self._rng = np.random.default_rng(self.seed)
        roles = {name: torch.uint8 for name in ("row_data", "column_data")}
        roles |= {name: self.fmt.scale_dtype for name in ("row_scale", "column_scale")}
        roles |= {name: torch.float32 for name in ("amax", "scale", "history")}
        self.arenas = {name: Arena(dtype, self._rng) for name, dtype in roles.items()}
        self.arenas["master"] = Arena(first.nominal if first.nominal_master else torch.float32, self._rng, guard=3e4)
        all_bf16 = first.nominal is torch.bfloat16 and self.seed % 2 == 0
        self._packed_dtype = torch.bfloat16 if all_bf16 else torch.float32
        self._grids: list[Tensor] = []
        self.table = table(*[self._row(weight) for weight in self.weights])

    def _row(self, weight: Weight) -> list[int]:
        (start, stop), (rows, columns) = weight.spans[0], matrix_shape(weight.shape)
        master = weight.master()
        places: dict[str, Place] = {"master": self.arenas["master"].place(master.view(-1)[start:stop])}
        for name, buffer in layout.buffers(self.fmt, (rows, columns), self.nominal).items():
            if buffer is not None:
                role = name.replace("wise", "").replace("_inv", "").replace("amax_history", "history")
                places[role] = self._place(role, buffer, weight)
        values: dict[str, int] = {"rows": rows, "columns": columns, "start": start, "numel": stop - start}
        for role, (base, offset) in places.items():
            values |= {f"{role}_base": base, f"{role}_offset": offset}
        values |= self._pack(master.view(rows, columns), Span(start, stop))
        return row(**values)

    def _place(self, role: str, buffer: layout.Buffer, weight: Weight) -> Place:
        """Return a buffer with content that a stage may read, or must replace."""
        arena, size = self.arenas[role], int(np.prod(buffer.shape)) * buffer.dtype.itemsize
        if role in ("scale", "history"):
            return arena.place(torch.from_numpy(self._rng.uniform(0, 4, size // 4).astype(np.float32)))
        noise = torch.from_numpy(self._rng.integers(0, 256, size, dtype=np.uint8))
        if not role.endswith("data"):
            return arena.place(noise.view(arena.dtype))
        if not self.separate_shards:
            return arena.place(noise)
        first, last = byte_range(self.fmt, weight.shape, Span(*weight.spans[0]), self.nominal)
        base, offset = arena.place(noise[first:last])
        return base, offset - first

    def _pack(self, master: Tensor, span: Span) -> dict[str, int]:
        """Make room in the packed buffer for the amaxes of the whole master, as they are after the reduction."""
        x = round_nominal(master, self.nominal)
        if self.fmt.amax_policy is AmaxPolicy.NONE:
            return {}
        self._grids.append(torch.full((3,), 7.0))
        places = {"not_finite": sum(grid.numel() for grid in self._grids)}
        self._grids.append(torch.zeros(1))
        own = self.fmt.columnwise is Columnwise.OWN_GRID
        for name, block in (("row_amax", self.fmt.block), ("column_amax", self.fmt.columnwise_block))[: 1 + own]:
            self._grids.append(torch.full((3,), 7.0))
            places[name] = sum(grid.numel() for grid in self._grids)
            self._grids.append(block_amax(x, block).reshape(-1))
        return places

    def packed(self, reduced: bool) -> Tensor:
        """Return the packed amaxes before partial_amax or after the reduction, with 7.0 between those of two weights."""
        guards = [index % 2 == 0 for index in range(len(self._grids))]
        parts = [
            grid if reduced or guard else torch.zeros_like(grid)
            for grid, guard in zip(self._grids, guards, strict=True)
        ]
        return torch.cat([*parts, torch.full((9,), 7.0)]).to(self._packed_dtype)

    def run(self, stage: str, backend: str, skip: Tensor | None = None) -> dict[str, list[Tensor]]:
        """Run one stage on fresh arenas, and return their tensors as the stage has left them."""
        on = {name: arena.bases() for name, arena in self.arenas.items()}
        packed = self.packed(reduced=stage != "partial_amax")
        fmt, function = self.fmt, devices.stage(backend, stage)
        delayed = on["scale"] if fmt.amax_policy is AmaxPolicy.DELAYED else []
        if stage == "partial_amax":
            function(fmt, self.nominal, on["master"], self.table, packed)
        elif stage == "compute_scales":
            function(fmt, packed, self.table, on["row_scale"], on["column_scale"], on["amax"], delayed, skip)
        elif stage == "partial_cast":
            amaxes = self._with_tensor_amaxes(on["amax"])
            data = on["row_data"], on["column_data"]
            function(fmt, self.nominal, on["master"], packed, amaxes, delayed, self.table, *data, skip)
        elif stage == "roll_history":
            function(fmt, self.table, self._with_tensor_amaxes(on["amax"]), on["scale"], on["history"], skip)
        else:
            function(fmt, self.table, on["row_data"], on["row_scale"], on["column_data"], on["column_scale"])
        return on | {"packed": [packed]}

    def _with_tensor_amaxes(self, bases: list[Tensor]) -> list[Tensor]:
        """Return the tensor amaxes that compute_scales leaves for the later stages."""
        if not self.fmt.has_tensor_amax:
            return bases
        for weight, (base, offset, _) in zip(self.weights, self.arenas["amax"].extents, strict=True):
            x = round_nominal(weight.master().view(1, -1), self.nominal)
            bases[base][offset] = block_amax(x, None).view(())
        return bases

    def applies(self, stage: str) -> bool:
        """Return whether the plan runs this stage for this format."""
        fmt = self.fmt
        return {
            "partial_amax": fmt.amax_policy is not AmaxPolicy.NONE,
            "compute_scales": fmt.scale_rule is not ScaleRule.NONE,
            "partial_cast": True,
            "roll_history": fmt.amax_policy is AmaxPolicy.DELAYED,
            "transpose": fmt.columnwise is Columnwise.TRANSPOSE and not self.separate_shards,
        }[stage]
