"""Arguments for casts, good and bad in any mix, in storages with guards around what is passed."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies import shapes
from zerocast import QuantizedWeight

FORMATS = (
    "nvfp4",
    "nvfp4:exact_in_fp8=True",
    "mxfp4",
    "mxfp4:exact_in_fp8=False,scale_rounding=floor",
    "int4",
    "mxfp8",
    "mxfp8:block=32x32",
    "fp8_block",
    "fp8_block:power_of_2_scale=False",
    "fp8_current",
    "fp8_current:element=e5m2",
    "fp8_delayed:amax_history_len=3",
    "identity",
)
GUARD = 0xA5
ROOM = 64  # bytes before and behind
MASTERS = ("good",) * 12 + (
    "none",
    "strided",
    "matrix",
    "expanded",
    "double",
    "half",
    "int",
    "short",
    "list",
    "grad",
    "empty",
)
STARTS = ("good",) * 12 + ("none", "negative", "late", "huge", "float", "bool", "text")
WEIGHTS = ("good",) * 12 + ("transposed", "plain", "meta", "same", "none")


@dataclass(frozen=True)
class Shard:
    """One weight with the master of a span of it, as a test is to pass them."""

    fmt: str
    shape: tuple[int, ...]
    nominal: torch.dtype
    span: tuple[int, int]
    offset: int  # of master and bytes in their storages
    weight: str
    master: str
    start: str


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    fmt = draw(st.sampled_from(FORMATS))
    shape = draw(shapes(fmt))
    numel = torch.Size(shape).numel()
    first, last = sorted((draw(st.integers(0, numel)), draw(st.integers(0, numel))))
    return Shard(
        fmt,
        shape,
        draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32))),
        (0, numel) if draw(st.booleans()) else (first, last),
        draw(st.integers(0, 17)),
        draw(st.sampled_from(WEIGHTS)),
        draw(st.sampled_from(MASTERS)),
        draw(st.sampled_from(STARTS)),
    )


class Guarded:
    """A tensor somewhere in a storage, and whether what is around it is as it was."""

    def __init__(self, values: Tensor, offset: int) -> None:
        size = values.element_size()
        before = ROOM + offset * size
        self._bytes = torch.full((before + values.nbytes + ROOM,), GUARD, dtype=torch.uint8)
        self._range = before, before + values.nbytes
        storage = self._bytes.view(torch.uint8)[before : before + values.nbytes]
        self.tensor = torch.empty(0, dtype=values.dtype).set_(
            self._bytes.untyped_storage(), before // size, values.shape, values.stride()
        )
        assert storage.numel() == values.nbytes
        self.tensor.copy_(values)

    def is_intact(self) -> bool:
        first, last = self._range
        return bool((self._bytes[:first] == GUARD).all() and (self._bytes[last:] == GUARD).all())


def master_of(shard: Shard, values: Tensor) -> tuple[Any, Guarded | None]:
    """Return the case's master. `values` are those of the whole weight, flat."""
    good = values[slice(*shard.span)].clone()
    if shard.master == "none":
        return None, None
    if shard.master == "list":
        return good.tolist(), None
    guarded = Guarded(
        good.to({"double": torch.float64, "half": torch.float16, "int": torch.int32}.get(shard.master, torch.float32)),
        shard.offset,
    )
    tensor = guarded.tensor
    made = {
        "strided": lambda: tensor[::2],
        "matrix": lambda: tensor.view(1, -1),
        "expanded": lambda: tensor[:1].expand(tensor.numel()) if tensor.numel() else tensor,
        "short": lambda: tensor[:-1],
        "empty": lambda: tensor[:0],
        "grad": lambda: tensor.requires_grad_(),
    }
    return made.get(shard.master, lambda: tensor)(), guarded


def start_of(shard: Shard) -> Any:
    first = shard.span[0]
    made = {
        "none": None,
        "negative": -1 - first,
        "late": first + 1,
        "huge": 2**63 - 1,
        "float": float(first),
        "text": "0",
    }
    return bool(first) if shard.start == "bool" else made.get(shard.start, first)


def weight_of(shard: Shard, others: list[Any]) -> tuple[Any, Guarded | None]:
    """Return the case's weight, its bytes in a guarded storage."""
    if shard.weight == "plain":
        return torch.zeros(shard.shape), None
    if shard.weight == "none":
        return None, None
    if shard.weight == "same" and others:
        return others[0], None
    if shard.weight == "meta":
        return QuantizedWeight.empty(shard.shape, shard.fmt, shard.nominal, "meta"), None
    weight = QuantizedWeight.empty(shard.shape, shard.fmt, shard.nominal)
    guarded = Guarded(torch.randint(0, 120, weight.rowwise_data.shape).to(weight.rowwise_data.dtype), shard.offset)
    weight.rebind(rowwise_data=guarded.tensor)
    return (weight.t() if shard.weight == "transposed" and len(shard.shape) == 2 else weight), guarded
